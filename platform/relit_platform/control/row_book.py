"""Metric rows by step: the first value wins, and a different one on the same line is an alarm."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from relit_platform.facts import Json, RowBatch
from relit_platform.machines.lineage import Lineage

MAX_STEPS = 65536
RATE_ROWS = 64

Row = dict[str, Json]
Alarm = tuple[str, str, dict[str, Any]]  # kind, level, data


class RowBook:
    """Not thread-safe. newest: the highest step with a row. needed_after: rows up to this step are
    not needed again; after it there is a gap, or nothing yet.
    """

    def __init__(self) -> None:
        self._rows: OrderedDict[int, tuple[int, Json]] = OrderedDict()
        self._untold: set[int] = set()
        self._recent: deque[tuple[float, Row]] = deque(maxlen=RATE_ROWS)
        self.newest = 0
        self.needed_after = 0
        self._again_at = 0  # where rows that a supervisor has go on, after a hole
        self.loss: Json = None
        self.refused_count = 0

    def take(
        self, batch: RowBatch, lineage: Lineage, now_s: float
    ) -> tuple[list[Row], list[Alarm]]:
        """The rows that are new, completed with generation and at_s, and alarms about others."""
        self.needed_after = max(self.needed_after, lineage.first_start)  # there are none before
        fresh: list[Row] = []
        alarms: list[Alarm] = []
        for given in batch.rows:
            row = {"generation": batch.generation, "at_s": now_s, **given}
            if not lineage.on_line(int(row["generation"]), int(row["step"])):
                self.refused_count += 1  # a zombie's, or of a step that was rolled back
                continue
            alarm, new = self._compare(row, lineage)
            if alarm is not None:
                alarms.append(alarm)
            if new:
                self._keep(row)
                fresh.append(row)
        return fresh, alarms

    def resume(self, last_row_step: int, rows_whole_to: int, rows_again_at: int = 0) -> None:
        """A new supervisor has every row up to rows_whole_to, and none after last_row_step: what
        it may have lost is news again. rows_again_at: see RunHistory.
        """
        self.newest = max(self.newest, last_row_step)
        self.needed_after = rows_whole_to
        self._again_at = rows_again_at
        self._untold = {step for step in self._rows if step > rows_whole_to}

    def skip_lost(self, oldest_kept: int) -> Alarm | None:
        """The rank that sends rows has none before this one: what is missing there never comes.

        What is here already is on its way to the supervisor, and not lost.
        """
        if oldest_kept <= self.needed_after + 1:
            return None
        end = min(oldest_kept, self._again_at or oldest_kept)
        missing = [s for s in range(self.needed_after + 1, end) if s not in self._rows]
        self.needed_after = oldest_kept - 1
        self._close_gap()
        if not missing:
            return None
        return "rows.lost", "warning", {"step": missing[0], "before": missing[-1] + 1}

    def rewind(self, start_step: int) -> None:
        """A generation starts here: the rows of later steps are made again."""
        self.needed_after = min(self.needed_after, start_step)
        self._untold.update(step for step in self._rows if step > start_step)

    def rate(self, key: str) -> float | None:
        """`key` summed over the newest rows of one generation, per second; None before two."""
        if len(self._recent) < 2:
            return None
        seconds = self._recent[-1][0] - self._recent[0][0]
        total = sum(float(row.get(key) or 0) for _, row in list(self._recent)[1:])
        return total / seconds if seconds > 0 else None

    def _compare(self, row: Row, lineage: Lineage) -> tuple[Alarm | None, bool]:
        """An alarm or None, and whether the row is news."""
        step, generation = int(row["step"]), int(row["generation"])
        known = self._rows.get(step)
        if known is None:
            return None, True
        before, loss = known
        rolled_back = not lineage.on_line(before, step)
        if _same(loss, row.get("loss")):
            return None, rolled_back or step in self._untold
        data = {
            "step": step,
            "generations": [before, generation],
            "losses": [loss, row.get("loss")],
        }
        if rolled_back:
            return ("row.replaced", "warning", data), True
        return ("row.conflict", "error", data), False

    def _keep(self, row: Row) -> None:
        step = int(row["step"])
        self._untold.discard(step)
        self._rows[step] = (int(row["generation"]), row.get("loss"))
        self._rows.move_to_end(step)
        while len(self._rows) > MAX_STEPS:
            self._rows.popitem(last=False)
        if step >= self.newest:
            self.newest = step
            self.loss = row.get("loss")
        self._close_gap()
        if self._recent and self._recent[-1][1]["generation"] != row["generation"]:
            self._recent.clear()  # downtime is no part of the speed
        self._recent.append((float(row["at_s"]), row))

    def _close_gap(self) -> None:
        step = self.needed_after + 1
        while step in self._rows and step not in self._untold:
            self.needed_after = step
            step += 1


def metric_values(rows: Iterable[Mapping[str, Json]], name: str) -> Iterator[tuple[int, float]]:
    """(step, value) of the rows that hold a number under this name; none without a name."""
    for row in rows:
        value = row.get(name) if name else None
        if isinstance(value, int | float):
            yield int(row["step"]), float(value)


def _same(one: Json, other: Json) -> bool:
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)
