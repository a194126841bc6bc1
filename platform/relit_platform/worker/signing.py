"""Signatures of states: equal ones mean that nothing changed but the values of tensors.

A signature holds every key, every scalar, and of every tensor where it lies and how it is laid out.
That of a module or an optimizer whose `state_dict` is torch's own is read off the object itself: to
make the dictionary costs more than to look whether it would be another one. This is done at each
step of a rank that saves at each step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relit_platform.worker.sharding import is_dtensor, local_of, storage_of
from relit_platform.worker.state_tree import PLAIN_TENSORS, StateHolder, state_of

_SCALARS = (int, bool, str, float, type(None))
_SETTINGS = "param_groups"
_OWN = ("state_dict", "_save_to_state_dict", "get_extra_state")
_plain_kinds: dict[type, bool] = {}  # of the modules that were met


class Signed(NamedTuple):
    """signature: None for a state that has to be walked each time. settings: an optimizer's, which
    change with the learning rate and are no part of it. state: the rest, if it was made.
    """

    signature: list[Any] | None
    settings: list[dict[str, Any]] | None
    state: Any = None


class _Unsigned(Exception):
    """The state holds something whose changes a signature would not show."""


def sign(holder: StateHolder) -> Signed:
    """What the state of a registered object is made of now."""
    signature: list[Any] = []
    try:
        if isinstance(holder, nn.Module) and _sign_module(holder, signature):
            return Signed(signature, None)
        if isinstance(holder, torch.optim.Optimizer) and _is_plain_optimizer(holder):
            return Signed(signature, _sign_optimizer(holder, signature))
    except (_Unsigned, RuntimeError):  # RuntimeError: a sparse tensor, say, has no address
        pass
    state, settings = without_settings(state_of(holder))
    return Signed(_signature(state), settings, state)


def without_settings(state: Any) -> tuple[Any, list[dict[str, Any]] | None]:
    """An optimizer's state and its settings; any other state as it is, and None."""
    if type(state) is dict and state.keys() == {"state", _SETTINGS}:
        return {"state": state["state"]}, state[_SETTINGS]
    return state, None


def _signature(state: Any) -> list[Any] | None:
    signature: list[Any] = []
    try:
        _sign(state, signature)
    except (_Unsigned, RuntimeError):
        return None
    return signature


def _sign_module(module: nn.Module, out: list[Any]) -> bool:
    """False for a module whose `state_dict` may be more than its parameters and buffers."""
    if not _is_plain_module(module):
        return False
    for name, parameter in module._parameters.items():
        if parameter is not None:
            out.append(name)
            _sign_tensor(parameter, out)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            out.append(name)
            _sign_tensor(buffer, out)
    for name, child in module._modules.items():
        if child is not None:
            out += ("(", name)
            if not _sign_module(child, out):
                return False
            out.append(")")
    return True


def _is_plain_module(module: nn.Module) -> bool:
    kind = type(module)
    plain = _plain_kinds.get(kind)
    if plain is None:
        plain = all(getattr(kind, name) is getattr(nn.Module, name) for name in _OWN)
        _plain_kinds[kind] = plain
    own = vars(module)
    if not plain or "state_dict" in own or "_save_to_state_dict" in own or "get_extra_state" in own:
        return False
    return not module._state_dict_hooks and not module._state_dict_pre_hooks


def _is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    own = "state_dict" in vars(optimizer)  # as torch.distributed.checkpoint patches it in
    if own or type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        return False
    hooks = optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks
    return not hooks


def _sign_optimizer(optimizer: torch.optim.Optimizer, out: list[Any]) -> list[dict[str, Any]]:
    """Its settings, as `state_dict` has them: parameters by their numbers."""
    numbers: dict[int, int] = {}
    settings, start = [], 0
    for group in optimizer.param_groups:
        params = group["params"]
        # As torch does it: of a parameter that is twice in one group the last place counts.
        numbers |= {id(p): i for i, p in enumerate(params, start) if id(p) not in numbers}
        start += len(params)
        packed = {key: value for key, value in group.items() if key != "params"}
        settings.append({**packed, "params": [numbers[id(param)] for param in params]})
    out += numbers
    for key, value in optimizer.state.items():
        name: Any = numbers.get(id(key), key) if isinstance(key, Tensor) else key
        if type(name) is not int and type(name) is not str:
            raise _Unsigned
        out.append(name)
        _sign(value, out)
    return settings


def _sign(value: Any, out: list[Any]) -> None:
    kind = type(value)
    if isinstance(value, dict):
        out += (kind, len(value))
        for key, item in value.items():
            if type(key) is not str and type(key) is not int:
                raise _Unsigned
            out.append(key)
            if type(item) in PLAIN_TENSORS:  # nearly everything: spared a call
                out += (item.data_ptr(), item.shape, item.stride(), item.dtype, item.device)
            else:
                _sign(item, out)
    elif kind is list or kind is tuple:
        out += (kind, len(value))
        for item in value:
            _sign(item, out)
    elif kind in _SCALARS:
        # 0.0 equals -0.0, but is not saved as it.
        out += (kind, value if value or kind is not float else str(value))
    else:
        _sign_tensor(value, out)


def _sign_tensor(tensor: Any, out: list[Any]) -> None:
    if type(tensor) in PLAIN_TENSORS:
        out += (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    elif is_dtensor(tensor):
        # An empty part has no address, but a storage. The rest says which part it is.
        local = local_of(tensor)
        out += (storage_of(local), local.data_ptr(), local.shape, local.stride(), local.dtype)
        out += (local.device, tensor.shape, tensor.placements, tensor.device_mesh)
    else:
        raise _Unsigned
