"""What a client writes into a run directory: the run itself, its attempts, its place in the index.

`store` is the run directory but for `write_index`. Each write may be repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from relit.errors import BadInputError
from relit.provenance import about_run
from relit.spec.code_snapshot import CodeSnapshot
from relit.spec.resolve import login_name, run_directory
from relit.transport import JobTransport, entrypoint_command
from relit_platform.run_config import RunConfig
from relit_storage.run import layout
from relit_storage.stores.protocol import ObjectStore

_MAX_ATTEMPTS = 10_000
Changes = Mapping[str, tuple[Any, Any]]


def write_run(store: ObjectStore, config: RunConfig, code: CodeSnapshot) -> None:
    """Code, resolved configuration and provenance of a new run."""
    store.put_if_absent(config.code_key, code.data)
    store.put(layout.RESOLVED, to_json(config.to_json()))
    store.put(layout.RUN, to_json(about_run(config, code.root, time.time())))


def write_index(root: ObjectStore, config: RunConfig) -> None:
    """The store's index: how a run is found by its id."""
    entry = {
        "run_id": config.run_id,
        "name": config.name,
        "experiment": config.experiment,
        "run_key": config.run_key,
        "owner": config.owner,
        "created_at_s": time.time(),
    }
    root.put(layout.index_key(config.run_id), to_json(entry))


def start_attempt(
    store: ObjectStore, config: RunConfig, transport: JobTransport, changes: Changes | None = None
) -> str:
    """Number a new attempt by exclusive create and hand it to Ray; its submission id.

    A number whose job the cluster remembers as over, of a run directory that is gone, say, is left.
    """
    while True:
        submission_id = _number_attempt(store, config, changes or {})
        if hand_over(config, submission_id, transport):
            return submission_id


def start_first(store: ObjectStore, config: RunConfig, transport: JobTransport) -> None:
    """The first attempt: of several submitters at once all hand over the same Ray job."""
    body = to_json(_attempt(config, 1, {}))
    store.put_if_absent(layout.attempt_key(1), body)
    if not hand_over(config, _submission_id(config, 1), transport):
        start_attempt(store, config, transport)


def hand_over(config: RunConfig, submission_id: str, transport: JobTransport) -> bool:
    """Submit the Ray job of an attempt, again if the submit was cut off. False: it is over."""
    metadata = {
        "name": config.name,
        "job_name": config.name,  # what Ray's dashboard calls it
        "owner": config.owner,
        "run_id": config.run_id,
        "state": "SUBMITTED",
        "run_directory": run_directory(config.store, config.run_key),
    }
    command = entrypoint_command(config.store, config.run_key, submission_id)
    return transport.submit(submission_id, command, metadata)


def _number_attempt(store: ObjectStore, config: RunConfig, changes: Changes) -> str:
    first = len(store.list(layout.ATTEMPT_PREFIX)) + 1
    for number in range(first, _MAX_ATTEMPTS):
        body = to_json(_attempt(config, number, changes))
        if store.put_if_absent(layout.attempt_key(number), body):
            return _submission_id(config, number)
    raise BadInputError(f"run {config.run_id} has {_MAX_ATTEMPTS} attempts; start a new run.")


def _submission_id(config: RunConfig, number: int) -> str:
    return f"{config.run_id}-a{number}"


def _attempt(config: RunConfig, number: int, changes: Changes) -> dict[str, Any]:
    return {
        "n": number,
        "submission_id": _submission_id(config, number),
        "at_s": time.time(),
        "owner": login_name(),
        "changes": {path: list(pair) for path, pair in changes.items()},
        "allow": list(config.allow_drift),
    }


def archive_result(store: ObjectStore, result: Mapping[str, Any], attempt: int) -> None:
    """Keep an earlier outcome beside the run and make the run live again."""
    store.put(f"results/{attempt:06d}.json", to_json(result))
    store.delete(layout.RESULT)


def to_json(data: Any) -> bytes:
    """Stable JSON bytes."""
    return json.dumps(data, sort_keys=True).encode()
