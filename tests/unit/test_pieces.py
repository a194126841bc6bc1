"""Boxes of tensors: what tiles, what does not and why, and where one lies in another."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cut_state import random_boxes
from hypothesis import given
from hypothesis import strategies as st

from relit_storage.checkpoint import pieces
from relit_storage.checkpoint.pieces import MAX_CUT_DIMS, Box, Shape, boxes_tile, paste, spans

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)
SEEDS = st.integers(0, 2**32 - 1)


def slices(box: Box) -> tuple[slice, ...]:
    ends = zip(box.offsets, box.shape, strict=True)
    return tuple(slice(begin, begin + size) for begin, size in ends)


def dense(shape: Shape) -> npt.NDArray[Any]:
    return np.arange(int(np.prod(shape)), dtype="<i4").reshape(shape)


def some_box(shape: Shape, rng: random.Random) -> Box:
    begins = tuple(rng.randrange(size) for size in shape)
    sizes = tuple(rng.randint(1, n - at) for n, at in zip(shape, begins, strict=True))
    return Box(begins, sizes)


def grid(rows: int, columns: int) -> list[Box]:
    return [Box((row, 2 * column), (1, 2)) for row in range(rows) for column in range(columns)]


PINWHEEL = [  # no straight cut goes through it
    Box((0, 0), (1, 2)),
    Box((0, 2), (2, 1)),
    Box((2, 1), (1, 2)),
    Box((1, 0), (2, 1)),
    Box((1, 1), (1, 1)),
]
CUBES = [
    Box(tuple(at >> dim & 1 for dim in range(MAX_CUT_DIMS)), (1,) * MAX_CUT_DIMS)
    for at in range(2**MAX_CUT_DIMS)
]
TILED: list[tuple[Shape, list[Box]]] = [
    ((), [Box((), ())]),
    ((0,), [Box((0,), (0,))]),
    ((3, 0), [Box((0, 0), (3, 0))]),
    ((5,), [Box((0,), (5,))]),
    ((5,), [Box((3,), (2,)), Box((0,), (3,))]),
    ((2, 4), grid(2, 2)),
    ((3, 3), PINWHEEL),
    ((2,) * MAX_CUT_DIMS, CUBES),
    ((2,) * 40, [Box.whole((2,) * 40)]),
    ((300, 600), grid(300, 300)),  # ninety thousand
]


@pytest.mark.parametrize(("shape", "boxes"), TILED, ids=lambda value: str(value)[:40])
def test_what_tiles(shape: Shape, boxes: list[Box]) -> None:
    assert boxes_tile(shape, boxes) is None


NOT_TILED: list[tuple[Shape, list[Box], str]] = [
    ((), [], "not covered: its 0 pieces"),
    ((0,), [], "not covered"),
    ((5,), [], "hold 0 of 5"),
    ((), [Box((), ()), Box((), ())], "overlap"),
    ((0,), [Box((0,), (0,)), Box((0,), (0,))], "overlap"),
    ((5,), [Box((0,), (3,))], "hold 3 of 5"),
    ((5,), [Box((0,), (3,)), Box((2,), (3,))], "hold 6 elements of 5"),
    ((5,), [Box((0,), (5,)), Box((0,), (5,))], "overlap"),
    ((6,), [Box((0,), (3,)), Box((1,), (3,))], "and a hole"),
    ((2, 4), [*grid(2, 2)[:3], Box((0, 1), (1, 2))], "and a hole"),
    ((3, 3), [*PINWHEEL[:4], Box((0, 0), (1, 1))], "and a hole"),
    ((5,), [Box((0,), (5,)), Box((2,), (0,))], "empty piece"),
    ((0,), [Box((0,), (1,))], "beyond"),
    ((5,), [Box((-1,), (6,))], "beyond"),
    ((5,), [Box((1,), (5,))], "beyond"),
    ((5,), [Box((0,), (-5,))], "empty piece"),
    ((5,), [Box((0, 0), (5,))], "2 offsets and 1 sizes in 1 dimensions"),
    ((5,), [Box((0,), (5, 1))], "1 offsets and 2 sizes"),
    ((5, 1), [Box((0,), (5,))], "in 2 dimensions"),
    ((-1,), [Box((0,), (-1,))], "has the shape"),
    ((5,), [Box((10**4000,), (10**4000,))], "beyond"),
    ((2,) * 7, [Box((0,) * 7, (1,) * 7)] * 128, "7 dimensions, 6 is the limit"),
]


@pytest.mark.parametrize(("shape", "boxes", "reason"), NOT_TILED, ids=lambda value: str(value)[:40])
def test_what_does_not_tile_and_why(shape: Shape, boxes: list[Box], reason: str) -> None:
    found = boxes_tile(shape, boxes)
    assert found is not None and reason in found


@given(SHAPES, st.integers(1, 12), SEEDS)
def test_random_cuts_tile_and_nothing_near_them_does(shape: Shape, count: int, seed: int) -> None:
    rng = random.Random(seed)
    boxes = random_boxes(shape, count, rng)
    assert boxes_tile(shape, boxes) is None
    assert boxes_tile(shape, boxes[1:])
    assert boxes_tile(shape, [*boxes, rng.choice(boxes)])
    if shape:
        at, dim = rng.randrange(len(boxes)), rng.randrange(len(shape))
        for box in moved(boxes[at], dim):
            assert boxes_tile(shape, [*boxes[:at], box, *boxes[at + 1 :]])


def moved(box: Box, dim: int) -> list[Box]:
    """The box with one number changed by one."""

    def with_one(numbers: Shape, change: int) -> Shape:
        return (*numbers[:dim], numbers[dim] + change, *numbers[dim + 1 :])

    changes = ((-1, 0), (1, 0), (0, -1), (0, 1))
    return [Box(with_one(box.offsets, a), with_one(box.shape, b)) for a, b in changes]


@given(st.lists(st.integers(1, 3), max_size=3).map(tuple), st.integers(1, 6), SEEDS)
def test_any_boxes_are_judged_as_by_counting(shape: Shape, count: int, seed: int) -> None:
    rng = random.Random(seed)
    boxes = [some_box(shape, rng) for _ in range(count)]
    if rng.random() < 0.5:  # boxes of the right volume that may lie anywhere
        sizes = [box.shape for box in random_boxes(shape, count, rng)]
        boxes = [Box(some_box(shape, rng).offsets, size) for size in sizes]
    inside = not any(box.fault_in(shape) for box in boxes)
    counted = np.zeros(shape, dtype=int)
    for box in boxes:
        counted[slices(box)] += 1
    assert (boxes_tile(shape, boxes) is None) is (inside and bool((counted == 1).all()))


@given(SHAPES, st.sampled_from([1, 2, 4, 8]), SEEDS)
def test_shared_bytes_are_where_numpy_finds_them(shape: Shape, itemsize: int, seed: int) -> None:
    rng = random.Random(seed)
    whole = rng.randbytes(int(np.prod(shape)) * itemsize)
    items = np.frombuffer(whole, dtype=f"V{itemsize}").reshape(shape)
    source, wanted = some_box(shape, rng), some_box(shape, rng)
    data = items[slices(source)].tobytes()
    into = bytearray(wanted.volume * itemsize)
    expected = np.frombuffer(bytes(into), dtype=f"V{itemsize}").reshape(wanted.shape).copy()
    both = source.overlap(wanted)
    if both is not None:
        begins = zip(both.offsets, wanted.offsets, strict=True)
        place = Box(tuple(a - b for a, b in begins), both.shape)
        expected[slices(place)] = items[slices(both)]
    by_runs, last = bytearray(len(into)), (-1, -1)
    for at, to, count in spans(source, wanted, itemsize):
        assert (at, to) > last and count > 0
        by_runs[to : to + count] = data[at : at + count]
        last = (at, to)
    copied = paste(data, source, into, wanted, itemsize)
    assert bytes(into) == bytes(by_runs) == expected.tobytes()
    assert copied == (both.volume * itemsize if both else 0)


@given(SHAPES, st.integers(1, 12), SEEDS)
def test_cut_and_pasted_is_the_original(shape: Shape, count: int, seed: int) -> None:
    rng = random.Random(seed)
    original = dense(shape)
    whole, again = Box.whole(shape), bytearray(original.nbytes)
    cut = [(box, original[slices(box)].tobytes()) for box in random_boxes(shape, count, rng)]
    for box, data in cut:
        paste(data, box, again, whole, 4)
    assert bytes(again) == original.tobytes()
    for wanted in random_boxes(shape, count, rng):  # and cut anew, for another world
        part = bytearray(wanted.volume * 4)
        for box, data in cut:
            paste(data, box, memoryview(part), wanted, 4)
        assert bytes(part) == original[slices(wanted)].tobytes()


RUNS: list[tuple[Shape, Box, int]] = [
    ((), Box((), ()), 1),
    ((5,), Box((2,), (3,)), 1),
    ((4, 6), Box((1, 0), (2, 6)), 1),
    ((4, 6), Box((1, 2), (2, 3)), 2),
    ((4, 6), Box((1, 2), (1, 3)), 1),
    ((3, 4, 5), Box((1, 1, 0), (2, 2, 5)), 2),
    ((3, 4, 5), Box((0, 2, 3), (3, 1, 2)), 3),
    ((3, 1, 5), Box((0, 0, 0), (2, 1, 5)), 1),
    ((3, 0), Box((0, 0), (3, 0)), 0),
]


@pytest.mark.parametrize(("shape", "box", "count"), RUNS)
def test_a_box_is_as_few_runs_as_can_be(shape: Shape, box: Box, count: int) -> None:
    assert len(list(spans(box, Box.whole(shape), 4))) == count


BIG: list[tuple[Shape, Box, int]] = [
    ((4, 50_000), Box((1, 10_000), (3, 30_000)), 16),
    ((2,) * 18, Box((0, 1) * 9, (2, 1) * 9), 16),
    ((2,) * 18, Box((0, 1) * 9, (2, 1) * 9), 2),
]


@pytest.mark.parametrize(("shape", "box", "numpy_axes"), BIG)
def test_long_rows_and_many_dimensions_are_pasted_too(
    shape: Shape, box: Box, numpy_axes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_NUMPY_AXES", numpy_axes)
    original, into = dense(shape), bytearray(box.volume * 4)
    assert paste(original.tobytes(), Box.whole(shape), into, box, 4) == len(into)
    assert bytes(into) == original[slices(box)].tobytes()


def test_buffers_of_another_size_are_refused() -> None:
    box, whole = Box((1,), (2,)), Box.whole((4,))
    for data, into in ((bytes(7), bytearray(16)), (bytes(8), bytearray(15))):
        with pytest.raises(ValueError, match="bytes for a box"):
            paste(data, box, into, whole, 4)
