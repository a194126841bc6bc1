"""Reading a snapshot while its owner still copies it, so that a write to disk need not wait.

The owner says how far the image is final (`Slot.mark_final`); `reach` waits for that. Nothing that
was read so counts by itself: the last byte is final only once the snapshot is whole and pinned,
and whoever has written a copy looks at the sequence again when it is done. So what a copy holds
that was given up, or that another snapshot overwrote, never gets a record.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from relit_platform.node.slots import Slot, SlotHeader, SlotState

LOOK_EVERY_S = 0.002
PATIENCE_S = 5.0  # without any progress of the copy; other ranks' persists are waiting behind


class GivenUp(Exception):
    """The snapshot will not be whole, or not soon: nothing is lost, and nobody was promised it."""


class Growing:
    """One snapshot that is being copied: `begin` was called, `commit` or another begin follows.

    slot must be in the state WRITING for this step and generation, else GivenUp is raised. alive
    says whether the owner's process is there.
    """

    def __init__(
        self,
        slot: Slot,
        step: int,
        generation: int,
        alive: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.slot = slot
        self._alive = alive
        self._clock = clock
        self._sleep = sleep
        self.sequence = slot.sequence()
        self.header: SlotHeader = slot.info()
        place = self.header.step, self.header.generation
        writing = self.header.state is SlotState.WRITING and self.sequence & 1
        if not writing or place != (step, generation):
            raise GivenUp("the slot holds something else")

    def reach(self, end: int) -> None:
        """Block until image[:end] is final; for the last byte until the snapshot is pinned.

        Raises GivenUp if the slot is given to another snapshot, its owner's process is gone, or the
        copy makes no progress for PATIENCE_S.
        """
        seen, since_s = -1, self._clock()
        while not self._is_final(end):
            now_s, final = self._clock(), self.slot.final_bytes
            if final != seen:
                seen, since_s = final, now_s
            elif now_s - since_s >= PATIENCE_S:
                raise GivenUp(f"no progress at byte {final}")
            if not self._alive():
                raise GivenUp("its process is gone")
            self._sleep(LOOK_EVERY_S)

    def whole(self) -> bool:
        """True if the snapshot that was begun counts: what was read of it is what it holds.

        Raises CorruptShardError if its header fails its checksum.
        """
        header = self.slot.info()
        return header.complete and _facts(header) == _facts(self.header) and self._committed()

    def _is_final(self, end: int) -> bool:
        if self._committed():
            return end < self.header.image_bytes or self.slot.pinned
        if self.slot.sequence() != self.sequence:
            raise GivenUp("another snapshot has begun in its slot")
        return end < self.header.image_bytes and self.slot.final_bytes >= end

    def _committed(self) -> bool:
        return self.slot.sequence() == self.sequence + 1


def _facts(header: SlotHeader) -> tuple[int, ...]:
    return header.step, header.generation, header.rank, header.world
