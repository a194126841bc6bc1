"""State that ranks hold in pieces, cut as FSDP2 and meshes cut it: splits for `saved_run`.

Uneven on purpose: the last ranks hold less, or nothing at all of a small tensor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from saved_run import Part, Split, Tensors, dealt
from torch import Tensor

from relit_platform.worker.state_tree import dtype_name
from relit_storage.checkpoint.image import TensorSpec
from relit_storage.checkpoint.pieces import Box, Shape

Places = Callable[[Shape], Iterator[tuple[int, Box]]]  # the boxes of a shape, each with its rank


def by_rows(world: int) -> Split:
    """Dimension 0 over all ranks, as torch.chunk does; scalars and empty tensors by rank 0."""

    def places(shape: Shape) -> Iterator[tuple[int, Box]]:
        if not shape or 0 in shape:
            yield 0, Box.whole(shape)
            return
        for rank, (begin, size) in enumerate(chunks(shape[0], world)):
            yield rank, Box((begin, *(0 for _ in shape[1:])), (size, *shape[1:]))

    return lambda tensors: _cut(tensors, world, places)


def by_mesh(rows: int, columns: int) -> Split:
    """Matrices over a mesh, dimension 0 by its rows, 1 by its columns; the rest whole on rank 0."""

    def places(shape: Shape) -> Iterator[tuple[int, Box]]:
        if len(shape) < 2 or 0 in shape:
            yield 0, Box.whole(shape)
            return
        for row, (top, height) in enumerate(chunks(shape[0], rows)):
            for column, (left, width) in enumerate(chunks(shape[1], columns)):
                box = Box((top, left, *(0 for _ in shape[2:])), (height, width, *shape[2:]))
                yield row * columns + column, box

    return lambda tensors: _cut(tensors, rows * columns, places)


def by_chance(world: int, seed: int) -> Split:
    """Boxes from a seed, each on a rank of its own; some tensors whole, on any rank."""

    def split(tensors: Tensors) -> list[list[Part]]:
        rng = random.Random(seed)

        def places(shape: Shape) -> Iterator[tuple[int, Box]]:
            boxes = random_boxes(shape, rng.randint(1, world), rng)
            yield from zip(rng.sample(range(world), len(boxes)), boxes, strict=True)

        return _cut(tensors, world, places)

    return split


def random_boxes(shape: Shape, count: int, rng: random.Random) -> list[Box]:
    """At most `count` boxes that tile a tensor: one of them is cut in two, again and again."""
    boxes = [Box.whole(shape)]
    if 0 in shape:
        return boxes
    for _ in range(4 * count):
        dims = [(at, d) for at, box in enumerate(boxes) for d, n in enumerate(box.shape) if n > 1]
        if len(boxes) >= count or not dims:
            break
        at, dim = rng.choice(dims)
        boxes += _halves(boxes.pop(at), dim, rng)
    rng.shuffle(boxes)
    return boxes


def part_of(tensor: Tensor, box: Box) -> Tensor:
    """What a rank that holds a box holds."""
    ends = zip(box.offsets, box.shape, strict=True)
    return tensor[tuple(slice(begin, begin + size) for begin, size in ends)].contiguous()


def chunks(size: int, parts: int) -> list[tuple[int, int]]:
    """(begin, size) of each part that has anything."""
    step = -(-size // parts)
    return [(begin, min(step, size - begin)) for begin in range(0, size, step)]


def _halves(box: Box, dim: int, rng: random.Random) -> list[Box]:
    begin, size = box.offsets[dim], box.shape[dim]
    first = rng.randint(1, size - 1)
    halves = []
    for start, count in ((begin, first), (begin + first, size - first)):
        offsets, shape = list(box.offsets), list(box.shape)
        offsets[dim], shape[dim] = start, count
        halves.append(Box(tuple(offsets), tuple(shape)))
    return halves


def _cut(tensors: Tensors, world: int, places: Places) -> list[list[Part]]:
    ranks: list[list[Part]] = [[] for _ in range(world)]
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        for rank, box in places(shape):
            spec = TensorSpec(name, dtype_name(tensor), box.shape, shape, box.offsets)
            ranks[rank].append((spec, part_of(tensor, box)))
    return ranks


SPLITS: dict[str, Split] = {
    "whole": dealt,
    "one rank": by_rows(1),
    "3 ranks": by_rows(3),
    "7 ranks": by_rows(7),
    "mesh 2x2": by_mesh(2, 2),
    "mesh 2x3": by_mesh(2, 3),
    "any boxes": by_chance(5, seed=1),
    "other boxes": by_chance(6, seed=2),
}
