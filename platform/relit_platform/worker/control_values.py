"""A few float64 values inside a float32 buffer whose elements are summed over the ranks.

Each rank has a place of its own, where the others add zeros: so every rank gets every rank's
values, and adds them up in float64 in the order of ranks. A value travels as four numbers of 16
bits, which float32 holds exactly: whatever the value, infinite or no number, it arrives bit for
bit. Written and read by one NumPy assignment each, because it is done at each step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

CONTROL_VALUES = 8
_PARTS = 4  # float32 values that hold one float64

Values = np.ndarray[Any, np.dtype[np.float64]]


class PackedControl:
    """The control values of `world` ranks in `room`, a float32 tensor in host memory."""

    def __init__(self, room: Tensor, rank: int, world: int) -> None:
        self._places = room.numpy().reshape(world, _PARTS * CONTROL_VALUES)
        self._own = self._places[rank]

    @staticmethod
    def num_values(world: int) -> int:
        """Elements of the buffer that `world` ranks need."""
        return world * _PARTS * CONTROL_VALUES

    def write(self, values: Values) -> None:
        """Put this rank's values into the buffer, before the collective."""
        self._places.fill(0.0)
        self._own[:] = values.view(np.uint16)

    def read(self, values: Values) -> None:
        """Take the sum over ranks out of the buffer, after the collective."""
        by_rank = self._places.astype(np.uint16).view(np.float64)
        np.add.reduce(by_rank, axis=0, out=values)
