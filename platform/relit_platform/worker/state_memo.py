"""`flatten` for a rank that saves at every step: what did not change is not walked again.

Between two steps the values of tensors change, but rarely which tensors there are. So a state is
signed: every key, every scalar, and of every tensor where it lies and how it is laid out. Equal
signatures mean that the tensors and the text of the last walk still hold: the tensors kept from it
alias the same memory, and as long as they are kept no other tensor can lie there. An optimizer's
settings change with the learning rate, so they are walked each time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from relit_platform.worker.sharding import StateTensors, is_dtensor, local_of, storage_of
from relit_platform.worker.state_tree import PLAIN_TENSORS, Flattening, StateHolder, state_of

_SCALARS = (int, bool, str, float, type(None))
_SETTINGS = "param_groups"


class StateMemo:
    """Flattens one set of registered objects again and again. Used by the rank's own thread."""

    def __init__(self) -> None:
        self._signature: list[Any] | None = None
        self._walk = Flattening()
        self._texts: dict[str, str] = {}

    def flatten(self, objects: Mapping[str, StateHolder]) -> tuple[StateTensors, bytes]:
        """The tensors as `state_tree.flatten` names them, and its skeleton as JSON text.

        The same dict of tensors as at the last call means that nothing but their values changed.
        Raises NotSavableError.
        """
        states: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        for name, holder in objects.items():
            states[name] = state_of(holder)
            if _is_optimizer(states[name]):
                settings[name] = states[name][_SETTINGS]
                states[name] = {"state": states[name]["state"]}
        self._renew(states)
        walk, texts = self._walk, dict(self._texts)
        if settings:
            walk = walk.copy()
            for name, groups in settings.items():
                text = json.dumps(walk.encode(groups, f"{name}.{_SETTINGS}", 1))
                texts[name] = f'{texts[name][:-1]}, "{_SETTINGS}": {text}}}'
        same = len(walk.tensors) == len(self._walk.tensors)
        body = ", ".join(f"{json.dumps(name)}: {texts[name]}" for name in objects)
        return self._walk.tensors if same else walk.tensors, f"{{{body}}}".encode()

    def _renew(self, states: Mapping[str, Any]) -> None:
        """Walk the states unless they are those of the last time."""
        signature = _signature(states)
        if signature is not None and signature == self._signature:
            return
        walk = Flattening()
        self._texts = {
            name: json.dumps(walk.encode(state, name, 0)) for name, state in states.items()
        }
        self._walk, self._signature = walk, signature


class _Unsigned(Exception):
    """The state holds something whose changes a signature would not show."""


def _is_optimizer(state: Any) -> bool:
    return type(state) is dict and state.keys() == {"state", _SETTINGS}


def _signature(states: Mapping[str, Any]) -> list[Any] | None:
    """None for states that have to be walked each time."""
    signature: list[Any] = []
    try:
        _sign(states, signature)
    except (_Unsigned, RuntimeError):  # RuntimeError: a sparse tensor, say, has no address
        return None
    return signature


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
    elif kind in PLAIN_TENSORS:
        out += (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
    elif kind in _SCALARS:
        # 0.0 equals -0.0, but is not saved as it.
        out += (kind, value if value or kind is not float else str(value))
    elif is_dtensor(value):
        # An empty part has no address, but a storage. The rest says which part it is.
        local = local_of(value)
        out += (storage_of(local), local.data_ptr(), local.shape, local.stride(), local.dtype)
        out += (local.device, value.shape, value.placements, value.device_mesh)
    else:
        raise _Unsigned
