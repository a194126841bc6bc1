"""Where the bytes of a saved image belong: each range of it has room of its own somewhere.

A restore reads an image once, chunk by chunk, and copies every chunk straight into the tensors
that it is for. There is no image in between, so there is no second copy and no memory for one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Room = NDArray[np.uint8]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a dense tensor in row-major order, writable; on the CPU."""
    flat: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return flat


class Scatter:
    """Disjoint ranges of one image with room for each. `add` all of them, then `take`."""

    def __init__(self) -> None:
        self._rooms: list[tuple[int, int, _Room]] = []
        self._begins: list[int] = []

    def add(self, begin: int, room: memoryview) -> None:
        """The bytes of the image from `begin` on, as many as room has, go into room."""
        if len(room):
            self._rooms.append((begin, begin + len(room), np.frombuffer(room, dtype=np.uint8)))

    def ranges(self) -> Iterator[tuple[int, int]]:
        """What is wanted, ascending, as (begin, end); those that touch are one."""
        self._rooms.sort(key=lambda room: room[0])
        self._begins = [begin for begin, _, _ in self._rooms]
        first = last = 0
        for begin, end, _ in self._rooms:
            if begin > last:
                if last > first:
                    yield first, last
                first = begin
            last = max(last, end)
        if last > first:
            yield first, last

    def take(self, begin: int, data: memoryview) -> None:
        """Copy what is wanted of image[begin : begin + len(data)]; after `ranges`.

        Called from several threads at once, each with bytes of its own. Releases the GIL.
        """
        found = np.frombuffer(data, dtype=np.uint8)
        end = begin + len(found)
        at = max(0, bisect_right(self._begins, begin) - 1)
        for first, last, room in self._rooms[at:]:
            if first >= end:
                return
            low, high = max(first, begin), min(last, end)
            if low < high:
                np.copyto(room[low - first : high - first], found[low - begin : high - begin])
