"""The types of a manifest's fields, checked before any of them is used.

A schema is a dict (exactly these keys; one that ends in "?" may be absent), a list of one schema
(any length), a tuple of two schemas (a pair), `map` (strings by strings), or a type. True is no
number here, and no number is beyond what 64 bits hold: arithmetic on thousands of digits would
take the reader's time and memory. A manifest may have a hundred thousand pieces, so that the path
to a field is put together only when the field is refused.
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
# One tensor of a shard, as `ImageLayout.index` gives it and agents acknowledge it.
INDEXED: dict[str, Any] = {
    "name": str,
    "dtype": str,
    "shape": [_NATURAL],
    "byte_range": (_NATURAL, _NATURAL),
    "global_shape?": [_NATURAL],
    "offsets?": [_NATURAL],
}
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    map: "a map of strings",
}


def check_types(value: Any, schema: Any = MANIFEST, path: str = "manifest") -> None:
    """Raise ValueError naming the first field that is missing, unknown or of a wrong type."""
    if fault := _fault(value, schema):
        raise ValueError(path + fault)


def _fault(value: Any, schema: Any) -> str:
    """The rest of the path and what is wrong there, or ""."""
    if isinstance(schema, dict):
        return _fault_of_dict(value, schema)
    if isinstance(schema, list):
        return _fault_of_list(value, schema[0])
    if isinstance(schema, tuple):
        if not isinstance(value, list) or len(value) != len(schema):
            return " is not a pair"
        found = (_fault(item, inner) for item, inner in zip(value, schema, strict=True))
        return next((fault for fault in found if fault), "")
    return "" if _fits(value, schema) else f" is not {_WORDS[schema]}"


def _fault_of_dict(value: Any, schema: dict[str, Any]) -> str:
    if not isinstance(value, dict):
        return f" has not exactly the fields {sorted(schema)}"
    known = 0
    for key, inner in schema.items():
        name = key.removesuffix("?")
        if name in value:
            known += 1
            if fault := _fault(value[name], inner):
                return f".{name}{fault}"
        elif name == key:
            return f" has no {name}"
    return "" if known == len(value) else f" has not exactly the fields {sorted(schema)}"


def _fault_of_list(value: Any, schema: Any) -> str:
    if not isinstance(value, list):
        return " is not a list"
    for number, item in enumerate(value):
        if fault := _fault(item, schema):
            return f"[{number}]{fault}"
    return ""


def _fits(value: Any, schema: Any) -> bool:
    if schema is int:
        return type(value) is int and 0 <= value <= MAX_NUMBER
    if schema is float:  # the comparison is false for NaN, too
        return type(value) in (int, float) and abs(value) <= MAX_NUMBER
    if schema is str:
        return isinstance(value, str)
    if schema is map:
        return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
    return True
