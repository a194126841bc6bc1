"""When the disk tier is due, decided by every rank for itself and by all of them alike.

Only rank 0's clock and rank 0's measurement count. They travel with the sum of the gradients, so
whoever has completed a step has the same numbers for it; the rest (when the last save was, and
what was best) is part of the state: it lies beside each snapshot and comes with each broadcast.
A step that was abandoned decides nothing, and is decided anew when it is done again.

With `disk_auto` the manager finds how far saves shall lie apart and tells rank 0, which votes for
it; with that step it is in force on all ranks, and part of the state like the rest. Where a manager
or a rank 0 is new and knows nothing there is no vote, and what is in force stays.

A step is measured by the loop's body, after its gradients were summed: what rank 0 has found of
step s travels with step s + 1. If it is the best so far, it is step s that is persisted, whose
snapshot is still there. If rank 0's process dies in between, so does the measurement, and that
step is not kept for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from relit_platform.machines.cadence import Cadence, on_metric
from relit_platform.machines.policies import disk_cadence
from relit_platform.run_config import CheckpointConfig

# Rank 0's clock, 1.0 if it has measured the step before, what it measured, and the spacing in
# seconds that the manager advises, 0.0 for none.
NUM_VOTES = 4


class Due(NamedTuple):
    """this: the step that is complete now goes to disk. before: the step before it does."""

    this: bool
    before: bool


@dataclass(frozen=True, slots=True)
class Marks:
    """What the ranks share: the last save's time by rank 0's clock (0: none yet), the best
    measurement, and the seconds between two saves that `auto` has found (0: not yet).
    """

    at_s: float = 0.0
    best: float | None = None
    every_s: float = 0.0

    @classmethod
    def of(cls, data: Any) -> Marks:
        """From the JSON beside a snapshot; one that does not say it begins anew."""
        known = data if isinstance(data, Mapping) else {}
        at_s, every_s = _number(known.get("at_s")), _number(known.get("every_s"))
        return cls(
            at_s=at_s or 0.0, best=_number(known.get("best")), every_s=max(0.0, every_s or 0.0)
        )


class Pace:
    """One per rank, driven by its own thread. clock gives Unix seconds; only rank 0's is used."""

    def __init__(self, config: CheckpointConfig, clock: Callable[[], float] = time.time) -> None:
        self._cadence: Cadence = disk_cadence(config)
        self._metric = config.metric if self._cadence.on_metric else ""
        self._clock = clock
        self._marks = Marks()
        self._measured: float | None = None
        self._auto = config.disk_auto
        self._advised_s = 0.0
        self._votes = bool(self._auto or self._cadence.every_s or self._metric)

    def votes(self, rank: int) -> tuple[float, ...]:
        """This rank's part of what is summed with the next step; nothing where steps decide."""
        if not self._votes:
            return ()
        if rank != 0:
            self._advised_s = 0.0  # it was rank 0 once; that is no advice any more
            return (0.0,) * NUM_VOTES
        measured = self._measured is not None
        return (self._clock(), float(measured), self._measured or 0.0, self._advised_s)

    def decide(self, step: int, agreed: Sequence[float]) -> Due:
        """Whether the step that all have completed goes to disk, and the one before it.

        agreed: the sums of all ranks' votes. Call once for each step, before its snapshot.
        """
        now_s, measured, value, every_s = agreed if self._votes else (0.0,) * NUM_VOTES
        self._measured = None
        marks = self._marks
        if not marks.at_s or now_s < marks.at_s:  # the first step, or another machine's clock
            marks = replace(marks, at_s=now_s)
        if every_s > 0:
            marks = replace(marks, every_s=every_s)
        this = self._in_force(marks).due(step, step - 1, now_s, marks.at_s).due
        if this:
            marks = replace(marks, at_s=now_s)
        before = bool(measured) and on_metric(value, marks.best, self._cadence.mode).due
        if before:
            marks = replace(marks, best=value)
        self._marks = marks
        return Due(this, before)

    def measure(self, logged: Mapping[str, Any]) -> None:
        """What the loop has logged of the step that is complete; it is voted on with the next."""
        value = _number(logged.get(self._metric)) if self._metric else None
        if value is not None:
            self._measured = value

    def advise(self, every_s: float) -> None:
        """Rank 0: what the manager has found; voted for from the next step on."""
        self._advised_s = every_s if self._auto and math.isfinite(every_s) else 0.0

    def marks(self) -> dict[str, Any]:
        """What goes beside a snapshot and with a broadcast; plain JSON."""
        return asdict(self._marks)

    def adopt(self, marks: Any, row: Mapping[str, Any]) -> None:
        """Go on from a state that was restored or received; row: its step's metric row."""
        self._marks = Marks.of(marks)
        self._measured = None
        self.measure(row)

    def _in_force(self, marks: Marks) -> Cadence:
        """What the configuration says, until `auto` has found something better."""
        found = self._auto and marks.every_s > 0
        return Cadence(every_s=marks.every_s) if found else self._cadence


def _number(value: Any) -> float | None:
    finite = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if finite else None
