"""The surviving line of history: which checkpoints belong to it.

Each generation starts at a step. A generation that starts below what an older one had reached
cuts those steps off: they are done again. A checkpoint (generation, step) is on the surviving
line if and only if no later generation started below its step.

Only entries that can still cut something are kept: a generation that started at or above the
start of a later one is implied by it. Start steps are therefore strictly rising.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class Lineage:
    """(generation, start step) of the generations that matter, oldest first."""

    entries: tuple[tuple[int, int], ...] = ()

    def started(self, generation: int, step: int) -> Lineage:
        """The line after `generation` started at `step`; the same entry twice changes nothing."""
        later = tuple(e for e in self.entries if e[0] > generation)
        if any(start <= step for _, start in later):
            return self
        kept = tuple(e for e in self.entries if e[0] < generation and e[1] < step)
        return Lineage((*kept, (generation, step), *later)[-MAX_ENTRIES:])

    def merged(self, entries: Iterable[tuple[int, int]]) -> Lineage:
        """The line with what somebody else remembers of it."""
        line = self
        for generation, step in entries:
            line = line.started(generation, step)
        return line

    def on_line(self, generation: int, step: int) -> bool:
        """True if the state after `step`, written by `generation`, is still history."""
        return all(step <= start for later, start in self.entries if later > generation)

    def cut_by(self, generation: int, step: int) -> tuple[int, int] | None:
        """The first later (generation, start step) that cut this checkpoint off, or None."""
        for later, start in self.entries:
            if later > generation and step > start:
                return (later, start)
        return None

    @property
    def first_start(self) -> int:
        """The lowest step at which a generation started; 0 when there was none."""
        return self.entries[0][1] if self.entries else 0

    @property
    def newest_start(self) -> int:
        """Where the newest generation started; 0 when there was none."""
        return self.entries[-1][1] if self.entries else 0

    @property
    def newest_generation(self) -> int:
        """The newest generation that has started; 0 when there was none."""
        return self.entries[-1][0] if self.entries else 0
