"""The image of a shard: a safetensors file laid out once and filled in place at every snapshot.

    8 bytes            length of the JSON header, little endian
    header             JSON, padded with spaces so that the tensors begin at a multiple of 4096
    tensors            by descending item size, then by name, without holes

Descending item size keeps every tensor aligned to its own item although the format allows no
padding between tensors; 4096 keeps the file fit for direct I/O. A tensor may be a piece of a larger
one: the metadata then says which (`piece_listing`). `parse_header` trusts nothing: it reads files
of unknown origin, and all that it lets through tiles the file exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from relit_storage.checkpoint.piece_listing import (
    PIECES_KEY,
    Place,
    are_naturals,
    parse_listing,
    write_listing,
)
from relit_storage.checkpoint.pieces import Box, Shape
from relit_storage.checkpoint.strict_json import load_strict
from relit_storage.errors import CorruptShardError

ALIGN_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 64
MAX_TENSOR_BYTES = 2**63 - 1
MAX_REASON = 300  # characters: a reason quotes the file, which may quote without end
METADATA_KEY = "__metadata__"

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor by its safetensors dtype ("F32", "BF16", ...); shape () is a scalar.

    With global_shape and offsets it is a piece: `shape` is a box of a tensor of global_shape that
    begins at offsets. Without, or if the box turns out to be all of its tensor, it is whole, and
    both are None: one meaning has one spelling.
    """

    name: str
    dtype: str
    shape: Shape
    global_shape: Shape | None = None
    offsets: Shape | None = None

    def __post_init__(self) -> None:
        if self.global_shape == self.shape and self.offsets == (0,) * len(self.shape):
            object.__setattr__(self, "global_shape", None)
            object.__setattr__(self, "offsets", None)

    @property
    def whole(self) -> bool:
        """Not a piece of a larger tensor."""
        return self.global_shape is None and self.offsets is None

    @property
    def full_shape(self) -> Shape:
        """The shape of the tensor that this one, or a piece of which this one, is."""
        return self.shape if self.global_shape is None else self.global_shape

    @property
    def origin(self) -> Shape:
        """Where it begins in the tensor of full_shape; zeros for a whole one."""
        return (0,) * len(self.shape) if self.offsets is None else self.offsets

    @property
    def box(self) -> Box:
        """Its place in the tensor of full_shape."""
        return Box(self.origin, self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the dense tensor or piece; 0 for an empty one. KeyError: unknown dtype."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def fault(self) -> str:
        """Why there can be no such tensor, or "". Cheap for any shape, however absurd."""
        if self.dtype not in ITEM_BYTES:
            return f"has the unknown dtype {self.dtype!r}"
        if (self.global_shape is None) != (self.offsets is None):
            return "has one of global shape and offsets without the other"
        full = self.full_shape
        if len(full) > MAX_DIMS:
            return f"has {len(full)} dimensions"
        if any(size < 0 for size in full):
            return f"has the shape {full}"
        num_bytes = ITEM_BYTES[self.dtype]
        for size in full:
            # An empty dimension does not excuse the others: readers multiply in 64 bits.
            num_bytes *= max(1, size)
            if num_bytes > MAX_TENSOR_BYTES:
                return "has more elements than can be counted"
        return "" if self.whole else self.box.fault_in(full)


@dataclass(frozen=True)
class ImageLayout:
    """Where every tensor of an image lies. `specs` are in file order.

    header is all that precedes the tensors, length field and padding included; a writer puts it
    into the image once. Equal specs and metadata give equal bytes on every rank and in every run.
    """

    specs: tuple[TensorSpec, ...]
    metadata: Mapping[str, str]
    header: bytes
    total_bytes: int
    offsets: Mapping[str, int] = field(repr=False)

    @property
    def header_bytes(self) -> int:
        """Length of `header`; the first tensor begins here."""
        return len(self.header)

    def offset(self, name: str) -> int:
        """First byte of a tensor, counted from the start of the image. KeyError if unknown."""
        return self.offsets[name]

    def index(self) -> tuple[dict[str, Any], ...]:
        """JSON of what lies where: name, dtype, shape, byte_range [from, to) in the image, and
        global_shape and offsets of what is a piece.
        """
        return tuple(_indexed(spec, self.offsets[spec.name]) for spec in self.specs)

    @classmethod
    def plan(cls, specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> ImageLayout:
        """Lay out an image. Pure and the same for any order of `specs`.

        `format: pt` is added to the metadata, because common readers ask for it, and the listing
        of the pieces. Raises ValueError for a name used twice, a reserved name, an unknown dtype,
        a negative dimension, a piece that does not lie inside its tensor.
        """
        ordered = sorted(_checked(specs), key=lambda spec: (-ITEM_BYTES[spec.dtype], spec.name))
        header: dict[str, Any] = {METADATA_KEY: _metadata(ordered, metadata)}
        end = 0
        for spec in ordered:
            begin, end = end, end + spec.num_bytes
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
        if len(text) > MAX_HEADER_BYTES:
            raise ValueError(f"image header of {len(text)} bytes; {MAX_HEADER_BYTES} is the limit")
        base = 8 + len(text)
        return cls(
            specs=tuple(ordered),
            metadata=header.pop(METADATA_KEY),
            header=len(text).to_bytes(8, "little") + text,
            total_bytes=base + end,
            offsets={name: base + entry["data_offsets"][0] for name, entry in header.items()},
        )


def parse_header(buf: bytes | memoryview, total_bytes: int, file: str = "image") -> ImageLayout:
    """The layout of an image from its first bytes; `buf` must hold the header, may hold more.

    total_bytes is the size of the whole file; tensors must tile it from the header to its end.
    Each piece lies inside its tensor; whether the pieces of all images tile it, only their reader
    can see (`boxes_tile`). `file` only names it in the error. Raises CorruptShardError for
    anything else.
    """
    header_bytes = _header_bytes(buf, total_bytes, file)
    header = bytes(buf[:header_bytes])
    entries = _load(header[8:], file)
    metadata = entries.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _refuse(file, "metadata is not a map of strings")
    places = _places(metadata, entries, file)
    found = sorted(
        (_entry(name, entry, places.get(name), file) for name, entry in entries.items()),
        key=_by_place,
    )
    end = 0
    for begin, stop, spec in found:
        if begin != end:
            _refuse(file, f"tensor {spec.name!r} begins at {begin}, the one before ends at {end}")
        end = stop
    if header_bytes + end != total_bytes:
        _refuse(file, f"tensors end at {header_bytes + end}, the file at {total_bytes}")
    return ImageLayout(
        specs=tuple(spec for _, _, spec in found),
        metadata=metadata,
        header=header,
        total_bytes=total_bytes,
        offsets={spec.name: header_bytes + begin for begin, _, spec in found},
    )


def _indexed(spec: TensorSpec, begin: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": spec.name,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "byte_range": [begin, begin + spec.num_bytes],
    }
    if not spec.whole:
        entry |= {"global_shape": list(spec.full_shape), "offsets": list(spec.origin)}
    return entry


def _metadata(specs: Iterable[TensorSpec], given: Mapping[str, str]) -> dict[str, str]:
    if PIECES_KEY in given:
        raise ValueError(f"metadata {PIECES_KEY!r} is reserved")
    places = {spec.name: (spec.full_shape, spec.origin) for spec in specs if not spec.whole}
    listing = {PIECES_KEY: write_listing(places)} if places else {}
    return {"format": "pt", **given, **listing}


def _checked(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    seen: set[str] = set()
    checked = list(specs)
    for spec in checked:
        if spec.name in seen or spec.name == METADATA_KEY:
            raise ValueError(f"tensor name {spec.name!r} is used twice or reserved")
        if spec.fault:
            raise ValueError(f"tensor {spec.name!r} {spec.fault}")
        spec.name.encode()  # a lone surrogate would make a header that no reader accepts
        seen.add(spec.name)
    return checked


def _header_bytes(buf: bytes | memoryview, total_bytes: int, file: str) -> int:
    if len(buf) < 8:
        _refuse(file, f"{len(buf)} bytes, too short for a header")
    length = int.from_bytes(bytes(buf[:8]), "little")
    if length > MAX_HEADER_BYTES or 8 + length > min(total_bytes, len(buf)):
        _refuse(file, f"header of {length} bytes in a file of {total_bytes}")
    return 8 + length


def _load(text: bytes, file: str) -> dict[str, Any]:
    try:
        entries = load_strict(text.decode())
    except (ValueError, RecursionError) as error:
        _refuse(file, f"header does not parse: {error}")
    if not isinstance(entries, dict):
        _refuse(file, "header is not a JSON object")
    return entries


def _places(metadata: Mapping[str, str], entries: Mapping[str, Any], file: str) -> dict[str, Place]:
    if PIECES_KEY not in metadata:
        return {}
    try:
        places = parse_listing(metadata[PIECES_KEY])
    except (ValueError, RecursionError) as error:
        _refuse(file, f"{PIECES_KEY} does not parse: {error}")
    for name in places:
        if name not in entries:
            _refuse(file, f"{PIECES_KEY} names {name!r}, which is not in the file")
    return places


def _entry(name: str, entry: Any, place: Place | None, file: str) -> tuple[int, int, TensorSpec]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _refuse(file, f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        _refuse(file, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not are_naturals(shape):
        _refuse(file, f"tensor {name!r} has the shape {shape!r}")
    if not are_naturals(offsets) or len(offsets) != 2:
        _refuse(file, f"tensor {name!r} has the offsets {offsets!r}")
    global_shape, begin_at = place or (None, None)
    spec = TensorSpec(name, dtype, tuple(shape), global_shape, begin_at)
    if spec.fault:
        _refuse(file, f"tensor {name!r} {spec.fault}")
    if place and spec.whole:
        _refuse(file, f"tensor {name!r} is whole, and listed as a piece")
    begin, end = offsets
    if end - begin != spec.num_bytes:
        _refuse(file, f"tensor {name!r} takes {end - begin} bytes, its shape {spec.num_bytes}")
    return begin, end, spec


def _by_place(found: tuple[int, int, TensorSpec]) -> tuple[int, int]:
    return found[0], found[1]


def _refuse(file: str, reason: str) -> NoReturn:
    raise CorruptShardError(file=file, reason=reason[:MAX_REASON])
