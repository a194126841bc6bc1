"""Bytes of an image go where they belong, whatever they come in."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from relit_platform.worker.scatter import Scatter, bytes_of

IMAGE = bytes(range(256)) * 4


@pytest.mark.parametrize("seed", range(20))
def test_every_room_gets_its_bytes_in_pieces_of_any_size(seed: int) -> None:
    dice = random.Random(seed)
    scatter, rooms, at = Scatter(), [], 0
    while at < len(IMAGE) - 80:
        at += dice.choice([0, 0, dice.randrange(30)])
        room = bytearray(dice.randrange(40))
        rooms.append((at, room))
        at += len(room)
    for begin, room in dice.sample(rooms, len(rooms)):
        scatter.add(begin, memoryview(room))
    wanted = sorted(byte for begin, room in rooms for byte in range(begin, begin + len(room)))
    ranges = list(scatter.ranges())
    assert [byte for begin, end in ranges for byte in range(begin, end)] == wanted
    assert all(end < begin for (_, end), (begin, _) in pairwise(ranges))
    cuts = sorted({0, len(IMAGE), *(dice.randrange(len(IMAGE)) for _ in range(9))})
    pieces = list(pairwise(cuts))
    for begin, end in dice.sample(pieces, len(pieces)):
        scatter.take(begin, memoryview(IMAGE)[begin:end])
    assert all(room == IMAGE[begin : begin + len(room)] for begin, room in rooms)


def test_nothing_is_wanted_of_an_empty_one() -> None:
    scatter = Scatter()
    scatter.add(7, memoryview(bytearray()))
    assert list(scatter.ranges()) == []
    scatter.take(0, memoryview(IMAGE))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e5m2, torch.int64])
def test_the_bytes_of_a_tensor_are_its_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 2, dtype=dtype)
    room = bytes_of(tensor)
    assert len(room) == tensor.nbytes
    room[:] = torch.ones(3, 2, dtype=dtype).view(torch.uint8).numpy().tobytes()
    assert torch.equal(tensor.float(), torch.ones(3, 2))
    assert len(bytes_of(torch.tensor(1.0))) == 4
