"""The types of a manifest's fields, checked before any of them is used.

A schema is a dict (exactly these keys), a list of one schema (any length), a tuple of two schemas
(a pair), `map` (strings by strings), or a type. True is no number here, and no number is beyond
what 64 bits hold: arithmetic on thousands of digits would take the reader's time and memory.
"""

from __future__ import annotations

from typing import Any

MAX_NUMBER = 2**63 - 1
_NATURAL = int
_PIECE = {
    "file": str,
    "rank": _NATURAL,
    "offsets": [_NATURAL],
    "shape": [_NATURAL],
    "byte_range": (_NATURAL, _NATURAL),
}
_TENSOR = {"name": str, "dtype": str, "global_shape": [_NATURAL], "pieces": [_PIECE]}
_SHARD = {
    "rank": _NATURAL,
    "node_id": str,
    "file": str,
    "num_bytes": _NATURAL,
    "chunk_bytes": _NATURAL,
    "checksums": [str],
    "extras_file": str,
    "extras_bytes": _NATURAL,
    "extras_checksum": str,
}
MANIFEST: dict[str, Any] = {
    "v": _NATURAL,
    "run_id": str,
    "epoch": _NATURAL,
    "step": _NATURAL,
    "generation": _NATURAL,
    "world": _NATURAL,
    "tensors": [_TENSOR],
    "shards": [_SHARD],
    "cursor": object,
    "ids": map,
    "created_at_s": float,
}


def check_types(value: Any, schema: Any = MANIFEST, path: str = "manifest") -> None:
    """Raise ValueError naming the first field that is missing, unknown or of a wrong type."""
    if isinstance(schema, dict):
        if not isinstance(value, dict) or value.keys() != schema.keys():
            raise ValueError(f"{path} has not exactly the fields {sorted(schema)}")
        for key, inner in schema.items():
            check_types(value[key], inner, f"{path}.{key}")
    elif isinstance(schema, list):
        _require(isinstance(value, list), path, "a list")
        for number, item in enumerate(value):
            check_types(item, schema[0], f"{path}[{number}]")
    elif isinstance(schema, tuple):
        _require(isinstance(value, list) and len(value) == len(schema), path, "a pair")
        for item, inner in zip(value, schema, strict=True):
            check_types(item, inner, path)
    else:
        _check_leaf(value, schema, path)


def _check_leaf(value: Any, schema: Any, path: str) -> None:
    if schema is int:
        _require(type(value) is int and 0 <= value <= MAX_NUMBER, path, "a whole number")
    elif schema is float:
        finite = type(value) in (int, float) and abs(value) <= MAX_NUMBER  # false for NaN, too
        _require(finite, path, "a number")
    elif schema is str:
        _require(isinstance(value, str), path, "a string")
    elif schema is map:
        strings = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
        _require(strings, path, "a map of strings")


def _require(fits: bool, path: str, what: str) -> None:
    if not fits:
        raise ValueError(f"{path} is not {what}")
