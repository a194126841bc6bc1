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
        """A generation starts: rows of later steps are made again. The first says where rows
        begin: a run can start from another one's step.
        """
        if generation == 1:
            self.whole_to = start_step
        self._lineage = self._lineage.started(generation, start_step)
        if start_step < self.whole_to:
            self.whole_to = start_step
        self._beyond = {step for step in self._beyond if step <= start_step}

    def wrote(self, generation: int, step: int) -> None:
        """A row is in the run directory; the same one again changes nothing."""
        if step <= self.whole_to or not self._lineage.on_line(generation, step):
            return
        if len(self._beyond) < MAX_BEYOND or step == self.whole_to + 1:
            self._beyond.add(step)
        while self.whole_to + 1 in self._beyond:
            self.whole_to += 1
            self._beyond.discard(self.whole_to)
