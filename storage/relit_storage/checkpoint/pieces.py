"""Boxes of tensors: do they tile the tensor, and where do the bytes of one lie in another.

A rank that holds a part of a tensor holds a box of it. The bytes of a box are dense and row-major,
as a safetensors file has them, whatever the tensor around it looks like. Everything here is
arithmetic on shapes; only `paste` touches bytes, in memory that its caller gave. Used by whoever
saves, checks, restores or exports tensors in pieces, at any world size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Shape = tuple[int, ...]
_Axis = tuple[int, int, int]  # count, stride in the source, stride in the destination; in bytes
_Ends = tuple[tuple[int, int], ...]  # a box as (begin, end) for each dimension

MAX_CUT_DIMS = 6  # the check may cost 2 ** this for each piece; meshes cut two or three
_NUMPY_AXES = 16  # as many at once; numpy itself has a limit
_LONG_RUN_BYTES = 64 << 10  # from here on a plain copy of each run is as fast


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: the elements from `offsets` on, `shape` of them in each dimension.

    Box((), ()) is the only box of a scalar. Nothing is checked here: see `fault_in`.
    """

    offsets: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """The box that is all of a tensor of this shape."""
        full = tuple(shape)
        return cls((0,) * len(full), full)

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """The elements that both have, None if there are none. Both are boxes of one tensor."""
        mine = zip(self.offsets, self.shape, strict=True)
        theirs = zip(other.offsets, other.shape, strict=True)
        offsets, shape = [], []
        for (begin, size), (other_begin, other_size) in zip(mine, theirs, strict=True):
            first = max(begin, other_begin)
            count = min(begin + size, other_begin + other_size) - first
            if count < 1:
                return None
            offsets.append(first)
            shape.append(count)
        return Box(tuple(offsets), tuple(shape))

    def fault_in(self, global_shape: Shape) -> str:
        """Why this is no piece of a tensor of global_shape, or "". A piece is never empty, unless
        the tensor is and the piece is all of it. Cheap for any numbers, however absurd.

        The reason is the end of a sentence that begins with the tensor's name.
        """
        if not len(self.offsets) == len(self.shape) == len(global_shape):
            found = f"{len(self.offsets)} offsets and {len(self.shape)} sizes"
            return f"has a piece of {found} in {len(global_shape)} dimensions"
        if self == Box.whole(global_shape):
            return ""
        for begin, size, limit in zip(self.offsets, self.shape, global_shape, strict=True):
            if size < 1:
                return f"has an empty piece, of the shape {self.shape}"
            if begin < 0 or begin + size > limit:
                return f"has a piece of {self.shape} at {self.offsets}, beyond {global_shape}"
        return ""


def boxes_tile(global_shape: Shape, boxes: Iterable[Box]) -> str | None:
    """None if the boxes cover a tensor of global_shape exactly once, else the reason why not.

    The reason is the end of a sentence that begins with the tensor's name. Exact for any boxes,
    in time proportional to their number (at worst times 2 ** MAX_CUT_DIMS); cut along more
    dimensions than that is refused. An empty tensor is one piece, which is all of it.
    """
    found = list(boxes)
    if any(size < 0 for size in global_shape):
        return f"has the shape {global_shape}"
    covered = 0
    for box in found:
        if fault := box.fault_in(global_shape):
            return fault
        covered += box.volume
    total = math.prod(global_shape)
    if covered < total or not found:
        return f"is not covered: its {len(found)} pieces hold {covered} of {total} elements"
    if covered > total or (not total and len(found) > 1):
        return f"has pieces that overlap: they hold {covered} elements of {total}"
    cut = _cut_dims(global_shape, found)
    if len(cut) > MAX_CUT_DIMS:
        return f"is cut along {len(cut)} dimensions, {MAX_CUT_DIMS} is the limit"
    signed: dict[_Ends, int] = {tuple((0, global_shape[dim]) for dim in cut): -1}
    for box in found:
        begins, sizes = box.offsets, box.shape
        ends = tuple((begins[dim], begins[dim] + sizes[dim]) for dim in cut)
        signed[ends] = signed.get(ends, 0) + 1
    return None if _cancel(signed) else "has pieces that overlap, and a hole"


def spans(source: Box, wanted: Box, itemsize: int) -> Iterator[tuple[int, int, int]]:
    """The bytes that two boxes of a tensor share, as runs without a gap in either.

    Yields (offset in the bytes of source, offset in the bytes of wanted, number of bytes), both
    offsets ascending; as few runs as there can be: one where only the first dimension is cut.
    """
    shared = _axes(source, wanted, itemsize)
    if shared is None:
        return
    begin, outer, num_bytes = shared
    for at, to in _places(begin, outer):
        yield at, to, num_bytes


def paste(
    data: bytes | bytearray | memoryview,
    source: Box,
    into: bytearray | memoryview,
    wanted: Box,
    itemsize: int,
) -> int:
    """Copy what two boxes share from the bytes of `source` into those of `wanted`.

    data and into hold exactly the dense bytes of their boxes, into is writable; what is outside of
    source keeps its value. Returns the number of bytes copied, 0 if the boxes are apart. Short
    rows are copied by numpy, many at a time. ValueError if a buffer has another size.
    """
    have, room = memoryview(data).cast("B"), memoryview(into).cast("B")
    for view, box in ((have, source), (room, wanted)):
        if len(view) != box.volume * itemsize:
            raise ValueError(f"{len(view)} bytes for a box of {box.volume * itemsize}")
    shared = _axes(source, wanted, itemsize)
    if shared is None:
        return 0
    begin, outer, num_bytes = shared
    if not outer or num_bytes >= _LONG_RUN_BYTES:
        for at, to in _places(begin, outer):
            room[to : to + num_bytes] = have[at : at + num_bytes]
    else:
        inner = outer[-_NUMPY_AXES:]
        for at, to in _places(begin, outer[:-_NUMPY_AXES]):
            rows = _rows(have, at, [(count, stride) for count, stride, _ in inner], num_bytes)
            _rows(room, to, [(count, stride) for count, _, stride in inner], num_bytes)[...] = rows
    return num_bytes * math.prod(count for count, _, _ in outer)


def _cut_dims(global_shape: Shape, boxes: Sequence[Box]) -> list[int]:
    """The dimensions that some box does not span."""
    shapes = {box.shape for box in boxes}
    return [
        dim for dim, size in enumerate(global_shape) if any(shape[dim] != size for shape in shapes)
    ]


def _cancel(signed: Mapping[_Ends, int]) -> bool:
    """Do boxes, each counted with its sign, add up to nothing at every point?

    The sum is nothing everywhere exactly if it changes nowhere. Along the first dimension it
    changes at the ends of the boxes, by their remaining dimensions: the same question with one
    dimension less. In a grid the neighbours at a cut are alike and are gone at once.
    """
    changes: dict[int, dict[_Ends, int]] = {}
    for box, sign in signed.items():
        if not sign:
            continue
        if not box:
            return False
        (begin, end), rest = box[0], box[1:]
        for place, change in ((begin, sign), (end, -sign)):
            at = changes.setdefault(place, {})
            at[rest] = at.get(rest, 0) + change
    return all(_cancel(at) for at in changes.values())


def _axes(
    source: Box, wanted: Box, itemsize: int
) -> tuple[tuple[int, int], list[_Axis], int] | None:
    """Where the shared bytes begin in both boxes, the loops over them, outermost first, and the
    bytes of the run without a gap that is inside. None if nothing is shared.

    Dimensions that go on where the one inside them ends are one loop.
    """
    both = source.overlap(wanted)
    if both is None:
        return None
    axes: list[_Axis] = [(itemsize, 1, 1)]  # innermost first until the end
    begin, to_begin = 0, 0
    stride, to_stride = itemsize, itemsize
    for dim in reversed(range(len(both.shape))):
        count = both.shape[dim]
        begin += (both.offsets[dim] - source.offsets[dim]) * stride
        to_begin += (both.offsets[dim] - wanted.offsets[dim]) * to_stride
        inside, inside_stride, inside_to = axes[-1]
        if (stride, to_stride) == (inside * inside_stride, inside * inside_to):
            axes[-1] = (inside * count, inside_stride, inside_to)
        elif count > 1:
            axes.append((count, stride, to_stride))
        stride *= source.shape[dim]
        to_stride *= wanted.shape[dim]
    return (begin, to_begin), axes[:0:-1], axes[0][0]


def _places(begin: tuple[int, int], axes: Sequence[_Axis]) -> Iterator[tuple[int, int]]:
    """Where each run begins, in the source and in the destination."""
    if not axes:
        yield begin
        return
    *outer, (count, stride, to_stride) = axes
    for at, to in _places(begin, outer):
        yield from zip(
            range(at, at + count * stride, stride),
            range(to, to + count * to_stride, to_stride),
            strict=True,
        )


def _rows(
    view: memoryview, begin: int, axes: Sequence[tuple[int, int]], num_bytes: int
) -> np.ndarray[Any, Any]:
    """Runs of num_bytes in a buffer as the items of an array; axes are (count, stride)."""
    return np.ndarray(
        shape=tuple(count for count, _ in axes),
        dtype=np.dtype((np.void, num_bytes)),
        buffer=view,
        offset=begin,
        strides=tuple(stride for _, stride in axes),
    )
