"""The one thread of a node that takes snapshots from shared memory to disk, in order.

A snapshot is asked for by its rank (`ask`), announced by it while it is still being copied
(`announce`: its first bytes are on disk by the time its last ones are there), or found pinned by
the sweep, when the rank or its message was lost. The slot is unpinned when its bytes are on disk
or given up; the outcome is reported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from relit_platform.errors import UsageError
from relit_platform.facts import ShardFailed
from relit_platform.node.growing import GivenUp, Growing
from relit_platform.node.persist import Writing, persist_growing, persist_slot
from relit_platform.node.slot_pool import PooledSlot, SlotPool
from relit_platform.node.slots import SlotHeader
from relit_platform.node.task_thread import TaskThread
from relit_platform.node.yielding import DiskPace, step_back
from relit_platform.run_config import CheckpointConfig
from relit_storage.errors import StorageError

# All ranks of a node ask at once. Queued is a reference to what is there anyway: never the bound.
PERSISTS_QUEUED = 4096
EARLY = "early"  # beside the task for the same snapshot that its rank asks for

Report = Callable[[object], None]


class Persister:
    """Thread-safe. check(step, generation) raises FencedError for what is over; alive names the
    workers whose processes are there.
    """

    def __init__(
        self,
        node_id: str,
        root: str,
        config: CheckpointConfig,
        slots: SlotPool,
        *,
        check: Callable[[int, int], None],
        alive: Callable[[], frozenset[str]],
        report: Report,
        crashed: Callable[[str, Exception], None],
        clock: Callable[[], float],
    ) -> None:
        self._node_id = node_id
        self._slots = slots
        self._check = check
        self._alive = alive
        self._report = report
        self._clock = clock
        step_aside = functools.partial(step_back, config.save_nice)
        self._thread = TaskThread("persist", PERSISTS_QUEUED, crashed, step_aside)
        self.pace = DiskPace(config.disk_bytes_per_s)
        self._how = Writing(
            root=root,
            node_id=node_id,
            chunk_bytes=config.chunk_bytes,
            clock=clock,
            pace=self.pace.take,
        )
        self._waiting_pins: frozenset[str] = frozenset()

    def start(self) -> None:
        """Begin to work, with what is pinned."""
        self._thread.start()
        for pooled in self._slots.pinned():
            self._queue(pooled)

    def close(self, timeout_s: float) -> None:
        """Finish what is being written, as fast as `pace` lets it: hurry that first. The rest stays
        pinned for the next life.
        """
        self._thread.close(timeout_s)

    def ask(
        self, worker_id: str, path: str, step: int, generation: int, *, last: bool, pin: bool
    ) -> None:
        """See NodeKeeper.persist. pin: of a manager, for a slot whose rank has not pinned it."""
        pooled = self._own(worker_id, path)
        header = pooled.slot.info()
        if header.complete and (header.step, header.generation) == (step, generation):
            if pin:
                pooled.slot.pin()
            elif not header.pinned:
                return  # its bytes are on disk or given up: its rank may use it again any moment
            self._queue(pooled)
            if last:  # after it is queued: the task before it may just be ending the hurry
                self.pace.hurry("last")

    def announce(self, worker_id: str, path: str, step: int, generation: int) -> None:
        """See NodeKeeper.persist_growing."""
        pooled = self._own(worker_id, path)
        task = functools.partial(self._begin_early, pooled, step, generation)
        self._thread.submit((EARLY, path, step, generation), task)

    def busy(self) -> frozenset[str]:
        """Paths of slots that are queued or being written."""
        return frozenset(key[-3] for key in self._thread.pending() if isinstance(key, tuple))

    def sweep(self) -> None:
        """Persist what has been pinned since the last sweep and was never asked for.

        The rank pins first and asks second; when it or its message dies in between, this finds
        the slot, which else would stay pinned for ever.
        """
        queued = self.busy()
        waiting = {p.slot.path: p for p in self._slots.pinned() if p.slot.path not in queued}
        for path in self._waiting_pins & waiting.keys():
            self._queue(waiting[path])
        self._waiting_pins = frozenset(waiting)

    def _own(self, worker_id: str, path: str) -> PooledSlot:
        pooled = self._slots.find(path)
        if pooled is None or pooled.worker_id != worker_id:
            raise UsageError(message=f"{path} is not a slot of worker {worker_id}.")
        return pooled

    def _queue(self, pooled: PooledSlot) -> None:
        header = pooled.slot.info()
        key = (pooled.slot.path, header.step, header.generation)
        if not self._thread.submit(key, functools.partial(self._persist, pooled, header)):
            pooled.slot.unpin()
            self._fail(header, "the persist queue is full")

    def _begin_early(self, pooled: PooledSlot, step: int, generation: int) -> None:
        """Write what is still being copied. An announcement is no promise: if nothing comes of it
        nobody hears of that, and the task that its rank has asked for meanwhile finds it pinned.
        """
        alive = functools.partial(self._is_alive, pooled.worker_id)
        try:
            self._check(step, generation)
            growing = Growing(pooled.slot, step, generation, alive)
            self._report(persist_growing(growing, self._how))
        except (GivenUp, StorageError, OSError):
            return
        pooled.slot.unpin()
        self._calm()

    def _persist(self, pooled: PooledSlot, asked: SlotHeader) -> None:
        """Only while its pin holds the slot for this snapshot; else it was served already."""
        slot, header = pooled.slot, pooled.slot.info()
        same = (header.step, header.generation) == (asked.step, asked.generation)
        if header.complete and header.pinned and same:
            try:
                self._check(header.step, header.generation)
                self._report(persist_slot(slot, self._how))
            except (StorageError, OSError) as error:
                self._fail(header, str(error))
            finally:
                slot.unpin()
        self._calm()

    def _calm(self) -> None:
        if len(self._thread.pending()) == 1:  # this one
            self.pace.calm("last")

    def _is_alive(self, worker_id: str) -> bool:
        return worker_id in self._alive()

    def _fail(self, header: SlotHeader, reason: str) -> None:
        self._report(
            ShardFailed(
                step=header.step,
                generation=header.generation,
                rank=header.rank,
                node_id=self._node_id,
                tier="disk",
                reason=reason,
                at_s=self._clock(),
            )
        )
