"""Which registered tensors a restore may fill where they are, without a copy in between.

Only those of which it is known what loading does to them: a module copies what it is given into
its parameters, and torch's own optimizers keep it. An object with a loading of its own might, say,
zero its tensors and add the saved ones; it is given others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

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


def rooms(
    objects: Mapping[str, StateHolder], shapes: Mapping[str, Tensor], skeleton: Json
) -> dict[str, Tensor]:
    """By saved name, the registered tensor that has the same shape and dtype, dense, on the CPU.

    shapes: of all that is saved, meta tensors, say. Whatever shares memory with another one is
    left out. Raises StateMismatchError as `state_tree.restore` would.
    """
    checked(objects, shapes, skeleton)
    named = unflatten(SavedNames(), {name: skeleton[name] for name in objects})
    found: dict[str, Tensor] = {}
    for name, holder in objects.items():
        if _loads_as_known(holder):
            for saved, tensor in _pairs(named[name], state_of(holder)):
                if saved in shapes and _fits(tensor, shapes[saved]):
                    found.setdefault(saved, tensor.detach())
    return dict(_apart(found))


def _loads_as_known(holder: StateHolder) -> bool:
    if isinstance(holder, nn.Module):
        return all(_plain_module(module) for module in holder.modules())
    if isinstance(holder, torch.optim.Optimizer):
        kind = type(holder)
        hooks = (
            *holder._optimizer_load_state_dict_pre_hooks,
            *holder._optimizer_state_dict_post_hooks,
        )
        plain = kind.load_state_dict is torch.optim.Optimizer.load_state_dict
        return plain and kind.state_dict is torch.optim.Optimizer.state_dict and not hooks
    return False


def _plain_module(module: nn.Module) -> bool:
    kind = type(module)
    own = ("load_state_dict", "state_dict", "_load_from_state_dict", "_save_to_state_dict")
    hooks = (*module._load_state_dict_pre_hooks, *module._state_dict_hooks)
    # A batch norm of torch has a loading of its own, which only fills in what old files lack.
    torchs = kind.__module__.startswith("torch.nn.modules.")
    plain = torchs or all(getattr(kind, name) is getattr(nn.Module, name) for name in own)
    return plain and not hooks


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


def _apart(found: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Those that share no byte with another one."""
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in found.items())
    shared: set[str] = set()
    reached, last = 0, ""
    for begin, end, name in ranges:
        if begin < reached:
            shared |= {name, last}
        if end > reached:
            reached, last = end, name
    yield from ((name, tensor) for name, tensor in found.items() if name not in shared)
