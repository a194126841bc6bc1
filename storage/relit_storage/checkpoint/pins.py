"""Pins: steps that retention, `rm` and `gc` leave alone, one small object each.

A pin is about a step, not about a generation of it: whichever commit of the step is in force is
kept. It is a file of its own because a client writes it while a supervisor owns the commit log.
"""

from __future__ import annotations

import json

from relit_storage.errors import ObjectMissingError
from relit_storage.run.layout import PIN_PREFIX, pin_key
from relit_storage.stores.protocol import ObjectStore


def read_pins(store: ObjectStore) -> frozenset[int]:
    """The pinned steps of a run, by one listing; `store` is the run's own view. StoreError.

    The name of the object alone counts, so that a damaged pin still protects its step.
    """
    names = (key.removeprefix(PIN_PREFIX).removesuffix(".json") for key in store.list(PIN_PREFIX))
    steps = (int(name) for name in names if name.isascii() and name.isdigit())
    return frozenset(steps)


def read_reasons(store: ObjectStore) -> dict[int, str]:
    """Why each step was pinned, as far as its pin can be read: one read for each. StoreError."""
    reasons = {}
    for step in sorted(read_pins(store)):
        try:
            body = json.loads(store.get(pin_key(step)))
        except (ObjectMissingError, ValueError, RecursionError):
            continue  # taken away meanwhile, or damaged: its step is kept all the same
        if isinstance(body, dict) and isinstance(body.get("reason"), str):
            reasons[step] = body["reason"]
    return reasons


def write_pin(store: ObjectStore, step: int, *, reason: str, at_s: float) -> bool:
    """Pin a step; False if it was pinned already, which leaves the first reason. StoreError."""
    body = {"v": 1, "step": step, "reason": reason, "at_s": at_s}
    return store.put_if_absent(pin_key(step), json.dumps(body, sort_keys=True).encode())


def remove_pin(store: ObjectStore, step: int) -> bool:
    """Take a pin away; False if there was none. StoreError."""
    there = store.size(pin_key(step)) is not None
    store.delete(pin_key(step))
    return there
