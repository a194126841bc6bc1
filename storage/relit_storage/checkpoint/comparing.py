"""What differs between two committed steps, tensor by tensor, down to the elements.

Tensors are compared whole, in however many pieces either step has them. Those whose pieces lie at
equal places in chunks of equal checksums are equal without being read; of the others one pair at a
time is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from relit_storage.checkpoint.copy_reading import CopyReader, in_file_order
from relit_storage.checkpoint.image import ITEM_BYTES
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.checkpoint.manifest_entries import Piece, TensorEntry

SLICE_ELEMENTS = 1 << 20
_NUMBERS: dict[str, str] = {
    "BOOL": "u1",
    "U8": "<u1",
    "I8": "<i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """One tensor that is not the same. what: "only in A", "only in B", "dtype or shape", "values".

    max_abs is the largest |a - b| over elements that are finite in both; None where the dtype has
    no arithmetic here or nothing was compared.
    """

    name: str
    what: str
    a: str
    b: str
    differing: int = 0
    elements: int = 0
    max_abs: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def compare_fields(a: Manifest, b: Manifest) -> dict[str, tuple[Any, Any]]:
    """What differs beside the tensors: world, position, ids, and where they come from."""
    names = ("run_id", "step", "generation", "world", "cursor")
    found = {name: (getattr(a, name), getattr(b, name)) for name in names}
    for name in sorted({*a.ids, *b.ids}):
        found[f"ids.{name}"] = (a.ids.get(name, ""), b.ids.get(name, ""))
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def compare_tensors(
    a: CopyReader, b: CopyReader, on_bytes: Callable[[int], None] = lambda count: None
) -> Iterator[TensorChange]:
    """Every tensor that is not the same in both; blocks for the reads.

    on_bytes hears of each piece of A's tensors that is done with. Raises as CopyReader does.
    """
    mine = {tensor.name: tensor for tensor in a.manifest.tensors}
    theirs = {tensor.name: tensor for tensor in b.manifest.tensors}
    for tensor in in_file_order(a.manifest.tensors):
        other = theirs.get(tensor.name)
        if other is None:
            yield TensorChange(name=tensor.name, what="only in A", a=_kind(tensor), b="")
        elif _kind(tensor) != _kind(other):
            yield TensorChange(
                name=tensor.name, what="dtype or shape", a=_kind(tensor), b=_kind(other)
            )
        elif not _same_chunks(a, tensor, b, other):
            change = _compare_values(tensor, a.read(tensor), b.read(other))
            if change is not None:
                yield change
        on_bytes(sum(end - begin for begin, end in (p.byte_range for p in tensor.pieces)))
    for name in sorted(theirs.keys() - mine.keys()):
        yield TensorChange(name=name, what="only in B", a="", b=_kind(theirs[name]))


def _kind(tensor: TensorEntry) -> str:
    return f"{tensor.dtype} {list(tensor.global_shape)}"


def _same_chunks(a: CopyReader, one: TensorEntry, b: CopyReader, other: TensorEntry) -> bool:
    """Both are cut alike, and each piece lies at the same place in chunks that are the same."""
    if len(one.pieces) != len(other.pieces):
        return False
    return all(
        mine.box == theirs.box
        and mine.byte_range == theirs.byte_range
        and _checksums(a, mine) == _checksums(b, theirs)
        for mine, theirs in zip(one.pieces, other.pieces, strict=True)
    )


def _checksums(reader: CopyReader, piece: Piece) -> tuple[int, tuple[str, ...]]:
    shard = reader.shards[piece.file]
    begin, end = piece.byte_range
    if begin == end or shard.chunk_bytes < 1:
        return 0, ()
    first, last = begin // shard.chunk_bytes, (end - 1) // shard.chunk_bytes
    return shard.chunk_bytes, shard.checksums[first : last + 1]


def _compare_values(tensor: TensorEntry, a: bytearray, b: bytearray) -> TensorChange | None:
    if a == b:
        return None
    item = ITEM_BYTES[tensor.dtype]
    differing, largest = 0, None
    for begin in range(0, len(a), SLICE_ELEMENTS * item):
        ours, other = (memoryview(raw)[begin : begin + SLICE_ELEMENTS * item] for raw in (a, b))
        differing += _count(ours, other, item)
        found = _max_abs(tensor.dtype, ours, other)
        if found is not None:
            largest = found if largest is None else max(largest, found)
    return TensorChange(
        name=tensor.name,
        what="values",
        a=_kind(tensor),
        b=_kind(tensor),
        differing=differing,
        elements=len(a) // item,
        max_abs=largest,
    )


def _count(a: memoryview, b: memoryview, item: int) -> int:
    raw = [np.frombuffer(view, dtype=np.uint8).reshape(-1, item) for view in (a, b)]
    return int(np.count_nonzero((raw[0] != raw[1]).any(axis=1)))


def _max_abs(dtype: str, a: memoryview, b: memoryview) -> float | None:
    ours, other = _numbers(dtype, a), _numbers(dtype, b)
    if ours is None or other is None:
        return None
    with np.errstate(all="ignore"):
        distance = np.abs(ours - other)
    finite = distance[np.isfinite(distance)]
    return float(finite.max()) if finite.size else None


def _numbers(dtype: str, view: memoryview) -> npt.NDArray[np.float64] | None:
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(view, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    code = _NUMBERS.get(dtype)
    return None if code is None else np.frombuffer(view, code).astype(np.float64)
