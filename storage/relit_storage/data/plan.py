"""The samples of a run of steps, in canonical order: the order function applied to a schedule.

Planning many steps at once is what makes a step cheap: 100 ns a sample instead of 5,000.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from relit_storage.data.order import Order, lane_major
from relit_storage.data.permutation import Ints
from relit_storage.data.schedule import Schedule


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Samples of the steps from `first` on; step s owns [starts[s-first], starts[s-first+1]).

    The arrays hold the canonical order: spans of a step one after the other, each lane-major.
    """

    first: int
    starts: list[int]
    blocks: Ints
    rows: Ints
    ids: Ints

    def bounds(self, step: int) -> tuple[int, int]:
        """Where `step` lies in the arrays."""
        return self.starts[step - self.first], self.starts[step - self.first + 1]


def plan_steps(
    schedule: Schedule, order_of: Callable[[int], Order], first: int, end: int
) -> StepPlan:
    """Plan steps [first, end). `order_of(epoch)` is asked once for each epoch they touch."""
    starts = [0]
    by_epoch: dict[int, list[Ints]] = {}
    for step in range(first, end):
        num_rows = 0
        for span in schedule.spans(step):
            order = order_of(span.epoch)
            positions = lane_major(np.arange(span.lo, span.hi, dtype=np.int64), order.lanes)
            by_epoch.setdefault(span.epoch, []).append(positions)
            num_rows += len(positions)
        starts.append(starts[-1] + num_rows)
    # Steps and their spans go up in epochs, so epoch by epoch is step by step.
    parts = [_samples(order_of(epoch), spans) for epoch, spans in by_epoch.items()]
    blocks, rows, ids = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return StepPlan(first, starts, blocks, rows, ids)


def _samples(order: Order, spans: list[Ints]) -> tuple[Ints, Ints, Ints]:
    blocks, rows = order(np.concatenate(spans))
    return blocks, rows, order.ids(blocks, rows)
