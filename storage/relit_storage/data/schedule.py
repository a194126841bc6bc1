"""Which positions a step owns: pure arithmetic of rows, global batch and tail policy.

Steps count from 0; step k is the update that follows k completed ones. Tails:

    carry   the stream of epochs is endless: step k owns samples [kB, (k+1)B) of it, so a step may
            cover the end of one epoch and the beginning of the next. Nothing is lost or short.
    short   the last step of an epoch has fewer samples. Nothing is lost.
    drop    an epoch ends with its last full step; the remainder, another one each epoch, is unused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from relit_storage.errors import DataError

Tail = Literal["carry", "short", "drop"]


@dataclass(frozen=True, slots=True)
class StepSpan:
    """Positions [lo, hi) of one epoch."""

    epoch: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The spans of every step. `epochs` and `steps` bound it; with neither it is endless."""

    num_rows: int
    global_batch: int
    tail: Tail = "carry"
    epochs: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        """Refuses sizes under which no step exists. Raises DataError, ValueError."""
        if self.tail not in get_args(Tail):
            raise ValueError(f"tail must be one of {get_args(Tail)}, not {self.tail!r}")
        for name in ("global_batch", "epochs", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.num_rows < 1:
            raise DataError("the data set has no rows.")
        if self.tail == "drop" and self.num_rows < self.global_batch:
            raise DataError(
                f"{self.num_rows} rows give no step of {self.global_batch} under tail 'drop'."
            )

    @property
    def rows_per_epoch(self) -> int:
        """Samples consumed in an epoch: all of them except under "drop"."""
        if self.tail == "drop":
            return self.num_rows // self.global_batch * self.global_batch
        return self.num_rows

    @property
    def num_steps(self) -> int | None:
        """Steps until the end, or None if it is endless. Under carry the very last may be short."""
        if self.epochs is None:
            return self.steps
        if self.tail == "carry":
            by_epochs = -(-self.epochs * self.num_rows // self.global_batch)
        else:
            by_epochs = self.epochs * self._steps_per_epoch
        return by_epochs if self.steps is None else min(by_epochs, self.steps)

    def check(self, step: int) -> None:
        """Raises IndexError unless there is such a step."""
        num_steps = self.num_steps
        if step < 0 or (num_steps is not None and step >= num_steps):
            raise IndexError(f"step {step} is not in [0, {num_steps})")

    def spans(self, step: int) -> tuple[StepSpan, ...]:
        """The positions of `step`, in order; more than one span only under carry."""
        left = self.step_rows(step)
        epoch, lo = self.place(step)
        spans = []
        while left > 0:
            hi = min(lo + left, self.rows_per_epoch)
            spans.append(StepSpan(epoch, lo, hi))
            left, epoch, lo = left - (hi - lo), epoch + 1, 0
        return tuple(spans)

    def step_rows(self, step: int) -> int:
        """Samples of `step`: the global batch, except at the end (carry) or at tails (short)."""
        self.check(step)
        return self.cursor(step + 1) - self.cursor(step)

    def place(self, step: int) -> tuple[int, int]:
        """(epoch, position in it) at which `step` begins; an epoch's end reads as (next, 0)."""
        return divmod(self.cursor(step), self.rows_per_epoch)

    def cursor(self, step: int) -> int:
        """Samples consumed before `step`, over all epochs."""
        if self.tail == "carry":
            rows = step * self.global_batch
            return rows if self.epochs is None else min(rows, self.epochs * self.num_rows)
        epoch, step_of_epoch = divmod(step, self._steps_per_epoch)
        return epoch * self.rows_per_epoch + step_of_epoch * self.global_batch

    @property
    def _steps_per_epoch(self) -> int:
        return -(-self.rows_per_epoch // self.global_batch)
