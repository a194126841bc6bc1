"""Questions to the JSON that `state_tree.flatten` makes of a state, without torch.

Asked by whoever reads checkpoints: what of a step are weights, and which tensors belong to what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from relit_platform.facts import Json

EXTRA_STATE = "_extra_state"  # how torch ends the key of a module's state that is no tensor


def is_weights(node: Json) -> bool:
    """True for the structure of an nn.Module's state: names and tensors, nothing nested."""
    if not isinstance(node, dict) or "$d" in node or "$T" in node:
        return False
    values = [value for key, value in node.items() if not key.endswith(EXTRA_STATE)]
    return bool(values) and all(is_tensor(value) for value in values)


def is_tensor(node: Json) -> bool:
    """True for the place of a tensor."""
    return isinstance(node, dict) and node.keys() == {"$T"}


def tensor_names(node: Json) -> Iterator[Any]:
    """Names of all tensors in a structure, as far as they are names. RecursionError if endless."""
    if isinstance(node, list):
        for item in node:
            yield from tensor_names(item)
    elif isinstance(node, dict):
        if is_tensor(node):
            yield node["$T"]
        else:
            for item in node.values():
                yield from tensor_names(item)


def weight_keys(objects: Mapping[str, Json]) -> dict[str, str]:
    """Saved name of the tensor by `<object>.<key>`, of all objects that are weights.

    Tied weights have one saved name and a key each.
    """
    return {
        f"{name}.{key}": str(value["$T"])
        for name, node in objects.items()
        if is_weights(node)
        for key, value in node.items()
        if is_tensor(value)
    }
