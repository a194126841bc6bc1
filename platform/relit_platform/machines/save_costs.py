"""What saves cost the loop, from the times at which its steps ended. Pure; seconds throughout.

A save delays the step that follows its boundary (the copy), and may slow down those after it until
it counts (processor, disk and network are shared). So a step is compared with plain ones, during
which nothing was under way. Of one save

    cost = (first step - plain step) + number of the others * (one of the others - plain step)

each taken as a median over all saves, so that an evaluation or a pause of the machine among the
steps is no cost of saving. A difference below zero is noise, and counts as nothing.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """A step and when it ended, by the clock of rank 0."""

    step: int
    generation: int
    at_s: float


class Span(NamedTuple):
    """From one moment to another, by one clock: a step, or a save until it counts."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


class Sample(NamedTuple):
    """The steps during one save: the first, the median of the others, and how many of these. Of a
    save that was over with the first step, 0 others.
    """

    first_s: float
    other_s: float
    others: float


def ends_of(rows: Iterable[Mapping[str, Any]]) -> list[Ended]:
    """The part of metric rows that counts here."""
    return [
        Ended(int(row["step"]), int(row.get("generation") or 0), float(row.get("at_s") or 0))
        for row in rows
    ]


def steps_of(ends: Sequence[Ended]) -> list[Span]:
    """The steps between two that follow each other in one generation."""
    return [
        Span(one.at_s, other.at_s)
        for one, other in itertools.pairwise(ends)
        if (one.step + 1, one.generation) == other[:2] and one.at_s < other.at_s
    ]


def apart(steps: Sequence[Span], busy: Iterable[Span]) -> list[Span]:
    """The steps with none of `busy` under way at any moment of them."""
    merged: list[Span] = []
    for span in sorted(busy):
        if merged and span.begin_s <= merged[-1].end_s:
            last = merged.pop()
            merged.append(Span(last.begin_s, max(last.end_s, span.end_s)))
        else:
            merged.append(span)
    begins = [span.begin_s for span in merged]

    def free(step: Span) -> bool:
        before = bisect_left(begins, step.end_s)
        return before == 0 or merged[before - 1].end_s <= step.begin_s

    return [step for step in steps if free(step)]


def sample(steps: Sequence[Span], save: Span) -> Sample | None:
    """What one save did to the steps that it met, in order of time; None if none is known."""
    first = bisect_right(steps, save.begin_s, key=lambda step: step.end_s)
    behind = bisect_left(steps, save.end_s, key=lambda step: step.begin_s)
    during = [step.seconds for step in steps[first:behind]]
    if not during:
        return None
    if len(during) == 1:
        return Sample(during[0], 0.0, 0.0)
    other_s = statistics.median(during[1:])
    # By time and not by count: of a long save not all steps may be known any more.
    return Sample(during[0], other_s, max(1.0, (save.seconds - during[0]) / other_s))


def plain_step_s(steps: Sequence[Span], busy: Sequence[Span]) -> float | None:
    """A step with none of `busy` under way; None without steps. If there is always one, the
    steps that are disturbed least speak for it.
    """
    if not steps:
        return None
    plain = [step.seconds for step in apart(steps, busy)]
    if plain:
        return statistics.median(plain)
    return sorted(step.seconds for step in steps)[len(steps) // 4]


def cost_s(samples: Sequence[Sample], step_s: float) -> float | None:
    """What one save costs the loop, by all samples together; None without any."""
    if not samples:
        return None
    copy_s = max(0.0, statistics.median(s.first_s for s in samples) - step_s)
    others = [s for s in samples if s.others]
    if not others:
        return copy_s
    each_s = max(0.0, statistics.median(s.other_s for s in others) - step_s)
    return copy_s + each_s * statistics.median(s.others for s in samples)
