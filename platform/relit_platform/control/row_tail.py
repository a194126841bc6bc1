"""Up to which step the run directory has every metric row.

The newest row alone does not tell: those that a dead manager took with it are missing before it
until their rank sends them again. Whoever takes the newest for the last that is needed lets the
ranks forget the missing ones.
"""

from __future__ import annotations

from relit_platform.machines.lineage import Lineage

MAX_BEYOND = 65536  # rows after a hole; more of them are sent again when it is closed


class RowTail:
    """A fold over formed generations and written rows. Not thread-safe.

    whole_to: every row up to this step is written, and of the present line.
    """

    def __init__(self) -> None:
        self.whole_to = 0
        self._lineage = Lineage()
        self._beyond: set[int] = set()

    def formed(self, generation: int, start_step: int) -> None:
        """A generation starts: rows of later steps are made again. There are none before the
        lowest start, for a run can begin at another one's step.
        """
        self._lineage = self._lineage.started(generation, start_step)
        self.whole_to = max(min(self.whole_to, start_step), self._lineage.first_start)
        self._beyond = {step for step in self._beyond if step <= start_step}

    def wrote(self, generation: int, step: int) -> None:
        """A row is in the run directory; the same one again changes nothing."""
        if step <= self.whole_to or not self._lineage.on_line(generation, step):
            return
        if len(self._beyond) < MAX_BEYOND or step == self.whole_to + 1:
            self._beyond.add(step)
        self._close()

    def lost(self, step: int) -> None:
        """Nobody has the missing rows up to this one any more: they are not waited for."""
        self.whole_to = max(self.whole_to, step)
        self._beyond = {other for other in self._beyond if other > step}
        self._close()

    @property
    def next_whole(self) -> int:
        """The first step after the hole of which there is a row; 0 without a hole."""
        return min(self._beyond, default=0)

    def _close(self) -> None:
        while self.whole_to + 1 in self._beyond:
            self.whole_to += 1
            self._beyond.discard(self.whole_to)
