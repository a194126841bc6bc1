"""All slot files of a node: who owns them, how much memory they take, and which may go.

The files are the truth: after a restart the pool is rebuilt from their names and headers. Memory
is reserved when a slot is created, so the budget counts files, whatever they hold.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from relit_platform.errors import BudgetError
from relit_platform.facts import SlotInfo
from relit_platform.node.slots import Slot, SlotState, create_slot, slot_file_bytes
from relit_storage.checkpoint.image import parse_header
from relit_storage.errors import CorruptShardError

SUFFIX = ".slot"
COPIES_PER_RANK = 2  # of the node before this one in the ring
Order = tuple[int, int]  # (generation, step): newer is greater


@dataclass(frozen=True, slots=True)
class PooledSlot:
    """A slot file and its owner. The mapping is closed when nobody refers to the slot."""

    worker_id: str
    slot: Slot
    file_bytes: int


class SlotPool:
    """Thread-safe. Slow work (reserving memory) is done outside the lock.

    make_room is told how many bytes the slots will take before they are created: what else lies in
    the same budget has to go by then. reclaim is called when tmpfs itself is full; how many bytes
    it has freed.
    """

    def __init__(
        self,
        folder: str,
        budget_bytes: int,
        make_room: Callable[[int], None] = lambda used_bytes: None,
        reclaim: Callable[[], int] = lambda: 0,
    ) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._make_room = make_room
        self._reclaim = reclaim
        self._lock = threading.Lock()
        self._slots: dict[str, PooledSlot] = {}
        self._reserved_bytes = 0
        self._numbers: dict[str, int] = {}
        self._refusals: list[dict[str, object]] = []

    def adopt(self) -> None:
        """Take over the files that are there; unfinished and damaged ones are removed.

        What is no file at all stays where it is, and is refused with its reason.
        """
        for name in sorted(os.listdir(self._folder)):
            path = os.path.join(self._folder, name)
            worker_id, _, number = name.removesuffix(SUFFIX).rpartition(".")
            try:
                if not name.endswith(SUFFIX) or not number.isdecimal():
                    os.unlink(path)  # a creation that was cut short
                    continue
                pooled = PooledSlot(worker_id, Slot.open(path), os.stat(path).st_size)
            except CorruptShardError as error:
                self._refusals.append(_refusal(path, error))
                os.unlink(path)
                continue
            except OSError as error:
                stranger = CorruptShardError(file=path, reason=error.strerror or str(error))
                self._refusals.append(_refusal(path, stranger))
                continue
            self._slots[path] = pooled
            self._numbers[worker_id] = max(self._numbers.get(worker_id, 0), int(number) + 1)

    def open_for(
        self,
        worker_id: str,
        count: int,
        image_bytes: int,
        extras_capacity: int,
        *,
        alive: frozenset[str],
        busy: frozenset[str],
    ) -> tuple[str, ...]:
        """As `open`, for a worker that is alive; slots of dead ones make room if need be.

        Of each dead worker the two newest snapshots stay, or else the newest one, or else that of
        each rank: without slots of its own their successor could never save, and nothing would
        ever be newer than theirs. A worker that has such slots in use gets more only if that leaves
        room for the copies of another node's ranks, as many as there are here: without those one
        more slot would be of no use. busy: paths that are being persisted. Raises BudgetError.
        """
        wanted = (worker_id, count, image_bytes, extras_capacity)
        if self._in_use(worker_id, image_bytes, extras_capacity):
            ranks = {p.worker_id for p in self._snapshot().values()} & alive
            size = slot_file_bytes(image_bytes, extras_capacity)
            return self.open(*wanted, left_bytes=COPIES_PER_RANK * len(ranks) * size)
        for keep, by_rank in ((2, False), (1, False), (1, True)):
            try:
                return self.open(*wanted)
            except BudgetError:
                self._thin_dead(keep, by_rank, alive, busy)
        return self.open(*wanted)

    def open(
        self,
        worker_id: str,
        count: int,
        image_bytes: int,
        extras_capacity: int,
        left_bytes: int = 0,
    ) -> tuple[str, ...]:
        """`count` EMPTY slots for a worker; blocks about 0.35 s/GiB while memory is reserved.

        Slots that an earlier, repeated call made and nobody used yet are handed out again.
        left_bytes: what of the budget no slot may take. Raises BudgetError if the budget, or the
        tmpfs itself, has no room; then nothing was created.
        """
        size = slot_file_bytes(image_bytes, extras_capacity)
        budget = self._budget_bytes - left_bytes
        with self._lock:
            paths = self._unused(worker_id, image_bytes, extras_capacity)[:count]
            missing = count - len(paths)
            needed = self._used_bytes() + missing * size
            if needed > budget:
                raise BudgetError(
                    what=f"{count} snapshot slots of {worker_id}",
                    needed_bytes=needed,
                    budget_bytes=max(0, budget),
                )
            self._reserved_bytes += missing * size
            number = self._numbers.get(worker_id, 0)
            self._numbers[worker_id] = number + missing
        names = [f"{worker_id}.{number + i}{SUFFIX}" for i in range(missing)]
        try:
            self._make_room(needed)
            geometry = (image_bytes, extras_capacity)
            try:
                paths += self._create(worker_id, names, *geometry)
            except BudgetError as error:
                if not _is_full(error) or not self._reclaim():
                    raise
                paths += self._create(worker_id, names, *geometry)
        finally:
            with self._lock:
                self._reserved_bytes -= missing * size
        return tuple(paths)

    def release(self, paths: Iterable[str]) -> None:
        """Unlink slots; unknown paths are ignored. Who has one mapped keeps its memory."""
        with self._lock:
            for path in paths:
                if self._slots.pop(path, None) is not None:
                    os.unlink(path)

    def find(self, path: str) -> PooledSlot | None:
        """The slot at a path, if it is one of ours."""
        with self._lock:
            return self._slots.get(path)

    def used_bytes(self) -> int:
        """What the slots take, or are about to."""
        with self._lock:
            return self._used_bytes()

    def unsent_cuts(self) -> list[PooledSlot]:
        """The newest whole cut of each worker, alive or not, if it is on no other node yet.

        The oldest first. Reads headers only: cheap enough for many times a second.
        """
        newest: dict[str, tuple[Order, PooledSlot]] = {}
        for pooled in self._snapshot().values():
            try:
                header = pooled.slot.info()
            except CorruptShardError:
                continue  # the inventory says so
            order = (header.generation, header.step)
            known = newest.get(pooled.worker_id)
            if header.complete and pooled.slot.cut and (known is None or known[0] < order):
                newest[pooled.worker_id] = (order, pooled)
        waiting = [found for found in newest.values() if not found[1].slot.sent]
        return [pooled for _, pooled in sorted(waiting, key=lambda found: found[0])]

    def forget_sent(self) -> None:
        """What was on another node is no longer, or that node is no longer the right one."""
        for pooled in self._snapshot().values():
            pooled.slot.mark_sent(0)

    def holding(self, step: int, generation: int, rank: int) -> Slot | None:
        """A COMPLETE slot of this step of a rank, or None."""
        for pooled in self._snapshot().values():
            try:
                header = pooled.slot.info()
            except CorruptShardError:
                continue
            place = (header.step, header.generation, header.rank)
            if header.complete and place == (step, generation, rank):
                return pooled.slot
        return None

    def of_worker(self, worker_id: str) -> tuple[str, ...]:
        """Paths of a worker's slots."""
        return tuple(p for p, s in self._snapshot().items() if s.worker_id == worker_id)

    def pinned(self) -> list[PooledSlot]:
        """COMPLETE slots that wait to be persisted."""
        found = []
        for pooled in self._snapshot().values():
            try:
                info = self._info(pooled, "")
            except CorruptShardError:
                continue  # the inventory says so
            if info is not None and info.pinned:
                found.append(pooled)
        return found

    def infos(self, node_id: str) -> tuple[list[SlotInfo], list[dict[str, object]]]:
        """Every COMPLETE slot, its image header parsed, and what was refused and why."""
        infos, refusals = [], list(self._refusals)
        for pooled in self._snapshot().values():
            before = pooled.slot.sequence()
            try:
                info = self._info(pooled, node_id)
                if info is None:
                    continue
                parse_header(pooled.slot.image, info.image_bytes, info.path)
            except CorruptShardError as error:
                if pooled.slot.sequence() != before:
                    continue  # its owner has begun the next snapshot meanwhile
                step, generation = pooled.slot.claimed_step()
                refusals.append(_refusal(pooled.slot.path, error, step, generation))
                continue
            infos.append(info)
        return infos, refusals

    def newest_whole(self) -> Order | None:
        """The newest step of which this node alone holds every rank."""
        ranks: dict[tuple[int, int, int], set[int]] = {}
        for info in self.infos("")[0]:
            ranks.setdefault((info.generation, info.step, info.world), set()).add(info.rank)
        whole = [(g, s) for (g, s, world), found in ranks.items() if len(found) == world]
        return max(whole, default=None)

    def free_dead(
        self,
        alive: frozenset[str],
        busy: frozenset[str],
        floor: Order | None,
        before: int | None = None,
    ) -> int:
        """Release what dead workers left and no restore can want; answers how many slots.

        That is: what was never completed, and steps older than `floor`, the newest step that is
        whole somewhere nearer or as near. busy: paths that are being persisted. before: only what
        older generations than this one have saved.
        """
        free = []
        for path, pooled in self._snapshot().items():
            if pooled.worker_id in alive or path in busy:
                continue
            try:
                info = self._info(pooled, "")
            except CorruptShardError:
                info = None
            if info is not None and before is not None and info.generation >= before:
                continue
            if info is None or (floor is not None and (info.generation, info.step) < floor):
                free.append(path)
        self.release(free)
        return len(free)

    def _thin_dead(
        self, keep: int, by_rank: bool, alive: frozenset[str], busy: frozenset[str]
    ) -> None:
        """Release snapshots of dead workers but the newest `keep` of each, or of each rank."""
        dead: dict[object, list[tuple[Order, bool, str]]] = {}
        for path, pooled in self._snapshot().items():
            if pooled.worker_id in alive:
                continue
            try:
                info = self._info(pooled, "")
            except CorruptShardError:
                continue  # free_dead takes it
            if info is not None:
                owner = info.rank if by_rank else info.worker_id
                order = (info.generation, info.step)
                dead.setdefault(owner, []).append((order, info.pinned or path in busy, path))
        for found in dead.values():
            older = sorted(found, reverse=True)[keep:]
            self.release(path for _, needed, path in older if not needed)

    def drop_step(self, step: int, generation: int, alive: frozenset[str]) -> None:
        """Release the slots of a step whose owners are dead; the living overwrite their own."""
        infos = self.infos("")[0]
        self.release(
            info.path
            for info in infos
            if (info.step, info.generation) == (step, generation) and info.worker_id not in alive
        )

    def _create(
        self, worker_id: str, names: list[str], image_bytes: int, extras_capacity: int
    ) -> list[str]:
        paths: list[str] = []
        try:
            for name in names:
                path = os.path.join(self._folder, name)
                create_slot(path, image_bytes, extras_capacity)
                paths.append(path)
                pooled = PooledSlot(worker_id, Slot.open(path), os.stat(path).st_size)
                with self._lock:
                    self._slots[path] = pooled
        except OSError as error:
            self.release(paths)
            free = os.statvfs(self._folder)
            raise BudgetError(
                what=f"tmpfs for snapshot slots ({error.strerror})",
                needed_bytes=len(names) * slot_file_bytes(image_bytes, extras_capacity),
                budget_bytes=free.f_bavail * free.f_frsize,
            ) from error
        return paths

    def _in_use(self, worker_id: str, image_bytes: int, extras_capacity: int) -> bool:
        own = [p.slot for p in self._snapshot().values() if p.worker_id == worker_id]
        return any(
            (header.image_bytes, header.extras_capacity) == (image_bytes, extras_capacity)
            and header.state is not SlotState.EMPTY
            for header in (slot.info() for slot in own)
        )

    def _unused(self, worker_id: str, image_bytes: int, extras_capacity: int) -> list[str]:
        found = []
        for path, pooled in self._slots.items():
            if pooled.worker_id != worker_id:
                continue
            header = pooled.slot.info()
            same = (header.image_bytes, header.extras_capacity) == (image_bytes, extras_capacity)
            if same and header.state is SlotState.EMPTY:
                found.append(path)
        return sorted(found)

    def _info(self, pooled: PooledSlot, node_id: str) -> SlotInfo | None:
        header = pooled.slot.info()
        if not header.complete:
            return None
        return SlotInfo(
            path=pooled.slot.path,
            worker_id=pooled.worker_id,
            node_id=node_id,
            generation=header.generation,
            step=header.step,
            rank=header.rank,
            world=header.world,
            image_bytes=header.image_bytes,
            pinned=header.pinned,
        )

    def _snapshot(self) -> dict[str, PooledSlot]:
        with self._lock:
            return dict(self._slots)

    def _used_bytes(self) -> int:
        return sum(pooled.file_bytes for pooled in self._slots.values()) + self._reserved_bytes


def _is_full(error: BudgetError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENOSPC


def _refusal(
    path: str, error: CorruptShardError, step: int = 0, generation: int = 0
) -> dict[str, object]:
    return {
        "tier": "memory",
        "step": step,
        "generation": generation,
        "file": path,
        "reason": str(error),
    }
