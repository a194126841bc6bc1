"""Which tensors of an image are pieces, in the metadata of its header: the key `relit.pieces`.

Canonical JSON, by name: {"global_shape": [...], "offsets": [...]}. The shape of the piece is the
tensor's own, in the header. Absent if every tensor is whole, so that other readers of safetensors
files see nothing new, and an image says by itself what it holds, in memory and in every tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relit_storage.checkpoint.pieces import Shape
from relit_storage.checkpoint.strict_json import canonical, load_strict

PIECES_KEY = "relit.pieces"
Place = tuple[Shape, Shape]  # global shape, offsets in it
_FIELDS = ("global_shape", "offsets")


def write_listing(places: Mapping[str, Place]) -> str:
    """The text for these pieces, the same for any order of them."""
    listing = {name: dict(zip(_FIELDS, place, strict=True)) for name, place in places.items()}
    return canonical(listing)


def parse_listing(text: str) -> dict[str, Place]:
    """The places that a listing gives, by the name of the tensor. Their numbers are natural, and
    nothing else is known about them: `TensorSpec.fault` compares them with the tensor.

    Raises ValueError or RecursionError for a text that `write_listing` would not have written.
    """
    loaded = load_strict(text)
    if not isinstance(loaded, dict) or not loaded:
        raise ValueError("is not a map of pieces")
    places = {name: _place(name, entry) for name, entry in loaded.items()}
    if canonical(loaded) != text:
        raise ValueError("is not in canonical form")
    return places


def _place(name: str, entry: Any) -> Place:
    if not isinstance(entry, dict) or entry.keys() != set(_FIELDS):
        raise ValueError(f"{name!r} has not exactly the fields {_FIELDS}")
    shape, offsets = (entry[field] for field in _FIELDS)
    for numbers in (shape, offsets):
        if not are_naturals(numbers):
            raise ValueError(f"{name!r} lies at {numbers!r}")
    return tuple(shape), tuple(offsets)


def are_naturals(value: Any) -> bool:
    """True for a list of whole numbers that are not negative; True and 1.0 are none."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
