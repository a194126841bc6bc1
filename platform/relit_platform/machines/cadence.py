"""When a tier is due, pure: policies that are given steps and times and answer (due, reason).

    every_steps    at each multiple of k, or the first step after one that was passed over
    every_seconds  t seconds after the last save
    exponential    spacing that begins small and grows by a factor up to a cap
    on_metric      the step whose evaluation improved on all before it
    hybrid         steps or seconds, whichever comes first: `Cadence.due` joins what is set

Nothing here asks for the time. On the ranks, `now_s` is rank 0's clock as it came with the sum
of the gradients, and `last_step`, `last_s` and `best` are part of the state that they share: so
all of them decide the same, at the boundary that all of them have completed. `auto`, the spacing
that measured costs and failures ask for, is in auto_spacing.py; to the ranks it is every_seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Mode = Literal["min", "max"]


class Decision(NamedTuple):
    """Whether to save, and why (not), for events and people."""

    due: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """What one tier was asked for; parts that are 0 or False say nothing.

    first_steps: exponential: the first save at this step, then with a spacing that grows by
    `growth` up to every_steps (0: for ever). on_metric is decided where a metric is known.
    """

    every_steps: int = 0
    every_s: float = 0.0
    first_steps: int = 0
    growth: float = 2.0
    on_metric: bool = False
    mode: Mode = "min"

    @property
    def on(self) -> bool:
        """False: this tier is turned off."""
        return bool(self.every_steps or self.every_s or self.first_steps or self.on_metric)

    def due(self, step: int, last_step: int, now_s: float, last_s: float) -> Decision:
        """Steps or seconds, whichever comes first. last_step and last_s: of the last save, or
        the step before this one where each step is asked about.
        """
        if self.first_steps:
            found = exponential(step, last_step, self.first_steps, self.growth, self.every_steps)
        else:
            found = every_steps(step, last_step, self.every_steps)
        if not found.due and self.every_s:
            by_time = every_seconds(now_s, last_s, self.every_s)
            return by_time if by_time.due or not self.every_steps else found
        return found


def every_steps(step: int, last_step: int, every: int) -> Decision:
    """Due at the first step at or after each multiple of `every`; 0 is never."""
    if every <= 0:
        return Decision(False, "not by steps")
    if step // every > last_step // every:
        return Decision(True, f"step {step // every * every} is a multiple of {every}")
    return Decision(False, f"step {(step // every + 1) * every} is next")


def every_seconds(now_s: float, last_s: float, every_s: float) -> Decision:
    """Due once `every_s` seconds have passed. A clock that went back says nothing: not due."""
    if every_s <= 0:
        return Decision(False, "not by time")
    passed_s = now_s - last_s
    if passed_s >= every_s:
        return Decision(True, f"{passed_s:.1f} s since the last save, every {every_s:g} s")
    return Decision(False, f"{passed_s:.1f} s of {every_s:g} s have passed")


def exponential(step: int, last_step: int, first: int, growth: float, cap: int) -> Decision:
    """Due at `first`, then with a spacing that grows by `growth` (rounded up, at least by one
    step) until it is `cap`; a cap of 0 lets it grow for ever.
    """
    if first <= 0:
        return Decision(False, "not exponential")
    (count, point), (before, _) = (
        _points(step, first, growth, cap),
        _points(last_step, first, growth, cap),
    )
    if count > before:
        return Decision(True, f"save {count} of a spacing that grows by {growth:g}: step {point}")
    return Decision(False, f"{count} saves so far, the last due at step {point}")


def _points(step: int, first: int, growth: float, cap: int) -> tuple[int, int]:
    """How many saves are due up to this step, and the step of the last one."""
    count, point, spacing = 0, 0, min(first, cap) if cap else first
    while point + spacing <= step:
        if spacing == cap:  # regular from here on
            more = (step - point) // cap
            return count + more, point + more * cap
        count, point = count + 1, point + spacing
        spacing = max(spacing + 1, math.ceil(spacing * growth))
        spacing = min(spacing, cap) if cap else spacing
    return count, point


def on_metric(value: float | None, best: float | None, mode: Mode) -> Decision:
    """Due when the value is better than the best so far; the first is. Only finite ones count."""
    if value is None or not math.isfinite(value):
        return Decision(False, "no number was measured")
    if best is None:
        return Decision(True, f"the first measurement, {value:g}")
    if value > best if mode == "max" else value < best:
        return Decision(True, f"{value:g} is better than {best:g}")
    return Decision(False, f"{value:g} is no better than {best:g}")
