"""Which registered tensors a restore may fill where they are, without a copy in between.

Only those of which it is known what loading does to them: a module copies what it is given into
its parameters, and torch's own optimizers keep it. An object with a loading of its own might, say,
zero its tensors and add the saved ones, or write into those of others. It is given tensors that are
nobody else's, and what is loaded after it is copied as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from relit_platform.facts import Json
from relit_platform.worker.state_tree import (
    PLAIN_TENSORS,
    SavedName,
    SavedNames,
    StateHolder,
    checked,
    state_of,
    unflatten,
)

_SAVES_AND_LOADS = (
    "load_state_dict",
    "state_dict",
    "_load_from_state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "set_extra_state",
)


def rooms(
    objects: Mapping[str, StateHolder], shapes: Mapping[str, Tensor], skeleton: Json
) -> dict[str, Tensor]:
    """By saved name, the registered tensor that has the same shape and dtype, dense, on the CPU.

    shapes: of all that is saved, meta tensors, say. Whatever shares memory, or a saved tensor, with
    something else is left out. Raises StateMismatchError as `state_tree.restore` would.
    """
    checked(objects, shapes, skeleton)
    named = unflatten(SavedNames(), {name: skeleton[name] for name in objects})
    found: dict[str, Tensor] = {}
    elsewhere: list[Tensor] = []
    strangers: set[str] = set()
    stranger_met = False
    for name, holder in objects.items():
        pairs = list(_pairs(named[name], state_of(holder)))
        if stranger_met or not _loads_as_known(holder):
            stranger_met = stranger_met or not isinstance(holder, LRScheduler)
            strangers.update(saved for saved, _ in pairs)
            elsewhere += [tensor for _, tensor in pairs]
            continue
        for saved, tensor in pairs:
            if saved in shapes and _fits(tensor, shapes[saved]):
                found.setdefault(saved, tensor.detach())
    mine = {saved: tensor for saved, tensor in found.items() if saved not in strangers}
    return dict(_apart(mine, elsewhere))


def _loads_as_known(holder: StateHolder) -> bool:
    if isinstance(holder, nn.Module):
        return all(_plain_module(module) for module in holder.modules())
    if not isinstance(holder, torch.optim.Optimizer):
        return False
    kind, stock = type(holder), torch.optim.Optimizer
    if kind.load_state_dict is not stock.load_state_dict or kind.state_dict is not stock.state_dict:
        return False
    if "state_dict" in vars(holder) or "load_state_dict" in vars(holder):
        return False
    loading = holder._optimizer_load_state_dict_pre_hooks
    return not loading and not holder._optimizer_state_dict_post_hooks


def _plain_module(module: nn.Module) -> bool:
    kind = type(module)
    # A batch norm of torch has a loading of its own, which only fills in what old files lack.
    torchs = kind.__module__.startswith("torch.nn.modules.")
    plain = torchs or all(getattr(kind, n) is getattr(nn.Module, n) for n in _SAVES_AND_LOADS)
    if not plain or any(name in vars(module) for name in _SAVES_AND_LOADS):
        return False
    return not module._load_state_dict_pre_hooks and not module._state_dict_hooks


def _pairs(saved: Any, now: Any) -> Iterator[tuple[str, Tensor]]:
    """Every saved name with the tensor that is at its place now."""
    if isinstance(saved, SavedName):
        if type(now) in PLAIN_TENSORS:
            yield str(saved), now
    elif isinstance(saved, dict) and isinstance(now, Mapping):
        for key, item in saved.items():
            if key in now:
                yield from _pairs(item, now[key])
    elif isinstance(saved, list | tuple) and type(now) is type(saved) and len(now) == len(saved):
        for one, other in zip(saved, now, strict=True):
            yield from _pairs(one, other)


def _fits(tensor: Tensor, like: Tensor) -> bool:
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    same = tensor.shape == like.shape and tensor.dtype == like.dtype
    return dense and same and tensor.is_contiguous() and tensor.numel() > 0


def _apart(found: Mapping[str, Tensor], others: Iterable[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Those that share no byte with another one, nor with `others`."""
    ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in found.items()]
    ranges += [(t.data_ptr(), t.data_ptr() + t.nbytes, "") for t in others if _has_address(t)]
    shared: set[str] = set()
    reached, last = 0, ""
    for begin, end, name in sorted(ranges):
        if begin < reached:
            shared |= {name, last}
        if end > reached:
            reached, last = end, name
    yield from ((name, tensor) for name, tensor in found.items() if name not in shared)


def _has_address(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu"
