"""The last completed boundary, kept so that an abandoned step leaves no trace in a survivor.

A step that a fault breaks is done again. Its forward pass may already have changed BatchNorm's
running statistics, and the rest of the user's loop body still runs once with the abandoned step
(a scheduler, an EMA, a counter). So at each boundary everything that something other than a
registered optimizer's update changes is kept aside, in this process:

| registered object | kept | cost |
|---|---|---|
| nn.Module | buffers, and parameters no registered optimizer owns (an EMA copy) | one copy |
| Optimizer | its param_groups' settings (lr, betas, ...), not its state | a few dicts |
| anything else | a deep copy of its state_dict() | small |

Parameters and optimizer state need no copy: only `run.step` changes them, and a broken step never
gets that far. Called by each rank's own thread, once per step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


class BoundaryState:
    """Keeps and brings back the forward-mutable part of the registered objects."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._live: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._others: list[tuple[Any, Any]] = []
        self.captured = False

    @torch.no_grad()
    def capture(self) -> None:
        """Keep the present state; reuses its buffers while shapes stay as they are."""
        live = _forward_mutable(self._objects)
        if not _same_shapes(live, self._kept):
            self._kept = [tensor.clone() for tensor in live]
        elif live:
            torch._foreach_copy_(self._kept, live)
        self._live = live
        self._groups = [
            (group, {k: _copied(v) for k, v in group.items() if k != "params"})
            for group in _param_groups(self._objects.values())
        ]
        self._others = [
            (obj, copy.deepcopy(_state(obj)))
            for obj in self._objects.values()
            if not isinstance(obj, torch.nn.Module | torch.optim.Optimizer)
        ]
        self.captured = True

    @torch.no_grad()
    def rollback(self) -> None:
        """Bring the kept state back in place. May be called any number of times per boundary."""
        if not self.captured:
            return
        if self._live:
            torch._foreach_copy_(self._live, self._kept)
        for group, kept in self._groups:
            for key in [k for k in group if k != "params" and k not in kept]:
                del group[key]
            for key, value in kept.items():
                group[key] = _copied(value)
        for obj, state in self._others:
            _load(obj, copy.deepcopy(state))


def trainable_parameters(objects: Mapping[str, Any]) -> list[torch.nn.Parameter]:
    """Parameters that want gradients, of every registered module, each once, in module order."""
    seen: dict[int, torch.nn.Parameter] = {}
    for obj in objects.values():
        if isinstance(obj, torch.nn.Module):
            seen.update((id(p), p) for p in obj.parameters() if p.requires_grad)
    return list(seen.values())


def _forward_mutable(objects: Mapping[str, Any]) -> list[torch.Tensor]:
    owned = {id(p) for group in _param_groups(objects.values()) for p in group["params"]}
    found: dict[int, torch.Tensor] = {}  # a tensor that two modules share counts once
    for obj in objects.values():
        if isinstance(obj, torch.nn.Module):
            for module in _submodules(obj):
                found.update((id(b), b) for b in module._buffers.values() if b is not None)
                for p in module._parameters.values():
                    if p is not None and id(p) not in owned:
                        found[id(p)] = p.detach()
    return list(found.values())


def _submodules(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """As root.modules(), in another order and a few times faster: this is done at each step."""
    seen: set[torch.nn.Module] = set()
    todo: list[torch.nn.Module | None] = [root]
    while todo:
        module = todo.pop()
        if module is not None and module not in seen:
            seen.add(module)
            yield module
            todo.extend(module._modules.values())


def _param_groups(objects: Iterable[Any]) -> list[dict[str, Any]]:
    return [
        group
        for obj in objects
        if isinstance(obj, torch.optim.Optimizer)
        for group in obj.param_groups
    ]


def _same_shapes(live: list[torch.Tensor], kept: list[torch.Tensor]) -> bool:
    return len(live) == len(kept) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        for a, b in zip(live, kept, strict=True)
    )


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, list | dict | tuple) else value


def _state(obj: Any) -> Any:
    return obj[0]() if isinstance(obj, tuple) else obj.state_dict()


def _load(obj: Any, state: Any) -> None:
    if isinstance(obj, tuple):
        obj[1](state)
    else:
        obj.load_state_dict(state)
