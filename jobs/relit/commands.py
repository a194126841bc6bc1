"""Commands to a run, as files in its directory: they wait until the supervisor has seen them."""

from __future__ import annotations

import json

from relit_storage.run import layout
from relit_storage.stores.protocol import ObjectStore

_PREFIX = "control/"
_MAX_TRIES = 64


def send_command(store: ObjectStore, verb: str, reason: str, now: float) -> int:
    """Write the next command of a run; its number. `store` is the run directory.

    Numbers order commands that saw one another. Of another verb's at the same moment the number
    may be the same: the name of the file, which has both, is what is acknowledged.
    """
    for number in range(last_command(store) + 1, last_command(store) + 1 + _MAX_TRIES):
        body = {"v": 1, "n": number, "verb": verb, "reason": reason, "at_s": now}
        if store.put_if_absent(layout.command_key(number, verb), _encode(body)):
            return number
    raise AssertionError(f"{_MAX_TRIES} commands were written between two looks")


def last_command(store: ObjectStore) -> int:
    """The highest command number in a run directory; 0 if there is none."""
    numbers = (key.removeprefix(_PREFIX).partition("-")[0] for key in store.list(_PREFIX))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _encode(body: dict[str, object]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()
