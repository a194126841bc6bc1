"""Saved tensors, whole, go where registered DTensors lie.

A checkpoint says nothing of meshes: it has whole tensors, in pieces of any size. What is to become
of one is seen at the place where it goes in the registered object's own state: a DTensor there
wants its rank's part. An optimizer that has made no state yet gets DTensors like its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from relit_platform.worker.sharding import is_dtensor, part_of

Place = Callable[[Any, Any], Any]  # (what was saved, the DTensor at its place) -> what to load


def placed(saved: Any, pattern: Any, place: Place) -> Any:
    """`saved` with every leaf replaced whose place in `pattern` holds a DTensor.

    Both are states of one object; where their structure differs, saved stays as it is.
    """
    if is_dtensor(pattern):
        return place(saved, pattern)
    if type(saved) is dict and isinstance(pattern, Mapping):
        return {k: placed(v, pattern[k], place) if k in pattern else v for k, v in saved.items()}
    alike = type(saved) in (list, tuple) and type(pattern) is type(saved)
    if alike and len(pattern) == len(saved):
        pairs = zip(saved, pattern, strict=True)
        return type(saved)(placed(one, like, place) for one, like in pairs)
    return saved


def pattern_of(holder: Any, state: Any, saved: Any) -> Any:
    """What the saved state of a registered object is to be placed like.

    state: what the object gives now. For an optimizer, all that is saved of a parameter is placed
    like the parameter; `place` leaves alone what has another shape.
    """
    if not isinstance(holder, torch.optim.Optimizer) or not isinstance(saved, Mapping):
        return state
    of_params = saved.get("state")
    if not isinstance(of_params, Mapping):
        return state
    params = [param for group in holder.param_groups for param in group["params"]]
    now: Mapping[Any, Any] = state.get("state", {})
    patterns: dict[Any, Any] = {}
    for key, entries in of_params.items():
        if type(key) is int and key < len(params) and isinstance(entries, Mapping):
            like = params[key]
            patterns[key] = dict.fromkeys(entries, like) | _dtensors(now.get(key))
    return {**state, "state": patterns}


def like_registered(saved: Any, like: Any) -> Any:
    """What to load at the place of the DTensor `like`: its part of the saved whole tensor.

    A DTensor is one already. Of another shape, or no tensor at all, it is given back as it is, and
    who loads it complains.
    """
    if is_dtensor(saved) or not isinstance(saved, Tensor) or saved.shape != like.shape:
        return saved
    return part_of(saved, like)


def _dtensors(entries: Any) -> dict[Any, Any]:
    """Those entries of a parameter's state that are DTensors: they know better than it does."""
    if not isinstance(entries, Mapping):
        return {}
    return {name: value for name, value in entries.items() if is_dtensor(value)}
