"""`flatten` for a rank that saves at every step: what did not change is not walked again.

Between two steps the values of tensors change, but rarely which tensors there are. So states are
signed (signing.py). Equal signatures mean that the tensors and the text of the last walk still
hold: the tensors kept from it alias the same memory, and as long as they are kept no other tensor
can lie there. An optimizer's settings change with the learning rate, so they are walked each time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from relit_platform.worker.sharding import StateTensors
from relit_platform.worker.signing import Signed, sign, without_settings
from relit_platform.worker.state_tree import Flattening, StateHolder, state_of

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
        signed = {name: sign(holder) for name, holder in objects.items()}
        self._renew(objects, signed)
        walk, texts = self._walk, dict(self._texts)
        for name, its in signed.items():
            if its.settings is not None:
                walk, text = _with_settings(walk, its.settings, f"{name}.{_SETTINGS}")
                texts[name] = f'{texts[name][:-1]}, "{_SETTINGS}": {text}}}'
        same = len(walk.tensors) == len(self._walk.tensors)
        body = ", ".join(f"{json.dumps(name)}: {texts[name]}" for name in objects)
        return self._walk.tensors if same else walk.tensors, f"{{{body}}}".encode()

    def _renew(self, objects: Mapping[str, StateHolder], signed: Mapping[str, Signed]) -> None:
        """Walk the states unless they are those of the last time."""
        parts = [part for name, its in signed.items() for part in (name, its.signature)]
        signature = None if None in parts else parts
        if signature is not None and signature == self._signature:
            return
        walk = Flattening()
        texts = {}
        for name, holder in objects.items():
            state = signed[name].state
            if state is None:
                state, _ = without_settings(state_of(holder))
            texts[name] = json.dumps(walk.encode(state, name, 0))
        self._walk, self._signature, self._texts = walk, signature, texts


def _with_settings(walk: Flattening, settings: Any, path: str) -> tuple[Flattening, str]:
    """The walk that has seen an optimizer's settings, too, and their text.

    They are nearly always plain numbers, for which the walk need not be copied.
    """
    alone = Flattening()
    node = alone.encode(settings, path, 1)
    if alone.tensors:
        walk = walk.copy()
        node = walk.encode(settings, path, 1)
    return walk, json.dumps(node)
