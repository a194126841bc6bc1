"""Signs of life and orders through shared memory: a page per worker, and one page per node.

The worker writes its heartbeat page at each phase of a step, without a system call; the agent
reads it without disturbing the worker, also after the worker's death. The control page goes the
other way: the agent writes it, all workers of the node read it at every boundary.
"""

from __future__ import annotations

import mmap
import os
import time
from enum import IntEnum

from relit_platform.facts import Heartbeat
from relit_storage.errors import CorruptShardError

PAGE_BYTES = 4096
HEARTBEAT_MAGIC = int.from_bytes(b"RELITHB1", "little")
CONTROL_MAGIC = int.from_bytes(b"RELITCP1", "little")
READ_TRIES = 100  # a beat takes microseconds; a writer that died inside one is read as it is

_MAGIC, _SEQUENCE, _PID, _RANK, _GENERATION, _STEP, _PHASE, _AT_NS = range(8)
_STOP, _DRAIN, _PEERED = 1, 2, 3


class Phase(IntEnum):
    """What a worker is doing."""

    start = 0
    join = 1
    restore = 2
    data = 3
    forward = 4
    backward = 5
    sync = 6
    update = 7
    snapshot = 8
    wait = 9
    done = 10


class HeartbeatPage:
    """One worker's page. Created by the agent, written by the worker, read by the agent."""

    def __init__(self, path: str, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self._words = memoryview(mapping).cast("Q")

    @classmethod
    def create(cls, path: str, pid: int) -> HeartbeatPage:
        """Create the page, or take over the one that is there; phase start."""
        page = cls(path, _create_page(path, HEARTBEAT_MAGIC))
        page._words[_PID] = pid
        if page._words[_AT_NS] == 0:
            page._words[_AT_NS] = time.time_ns()
        return page

    @classmethod
    def open(cls, path: str) -> HeartbeatPage:
        """Map an existing page. Raises CorruptShardError if the file is not one."""
        return cls(path, _open_page(path, HEARTBEAT_MAGIC))

    def beat(
        self, *, rank: int, generation: int, step: int, phase: str, at_ns: int | None = None
    ) -> None:
        """Write a sign of life; about a microsecond. phase is a name of `Phase`, else KeyError.

        step counts completed steps. at_ns is Unix time, by default now.
        """
        words = self._words
        words[_SEQUENCE] |= 1  # odd: in the middle of a beat
        words[_RANK], words[_GENERATION], words[_STEP] = rank, generation, step
        words[_PHASE] = Phase[phase]
        words[_AT_NS] = time.time_ns() if at_ns is None else at_ns
        words[_SEQUENCE] += 1

    def read(self, worker_id: str) -> Heartbeat:
        """The last sign of life, never a mix of two (but of a worker killed inside a beat)."""
        words = self._words
        for _ in range(READ_TRIES):
            before = words[_SEQUENCE]
            seen = words.tolist()
            if not before & 1 and words[_SEQUENCE] == before:
                break
        known = seen[_PHASE] in Phase.__members__.values()
        return Heartbeat(
            worker_id=worker_id,
            pid=seen[_PID],
            rank=seen[_RANK],
            generation=seen[_GENERATION],
            step=seen[_STEP],
            phase=Phase(seen[_PHASE]).name if known else "unknown",
            at_s=seen[_AT_NS] / 1e9,
        )

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._words.release()
        self._mapping.close()


class ControlPage:
    """A node's orders to all of its workers. Created and written by the agent only."""

    def __init__(self, path: str, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self._words = memoryview(mapping).cast("Q")

    @classmethod
    def create(cls, path: str) -> ControlPage:
        """Create the page, or take over the one that is there with its orders."""
        return cls(path, _create_page(path, CONTROL_MAGIC))

    @classmethod
    def open(cls, path: str) -> ControlPage:
        """Map an existing page. Raises CorruptShardError if the file is not one."""
        return cls(path, _open_page(path, CONTROL_MAGIC))

    @property
    def stop_requested(self) -> int:
        """0, or the number of the stop command to obey at the next boundary."""
        return self._words[_STOP]

    def set_stop(self, number: int) -> None:
        """Ask all workers of the node to stop at the next boundary; 0 takes it back."""
        self._words[_STOP] = number

    @property
    def draining(self) -> bool:
        """True once this node is going away."""
        return self._words[_DRAIN] != 0

    def set_draining(self, draining: bool) -> None:
        """Tell all workers of the node that it is going away."""
        self._words[_DRAIN] = int(draining)

    @property
    def peered(self) -> bool:
        """True while this node's agent gives snapshots to another node."""
        return self._words[_PEERED] != 0

    def set_peered(self, peered: bool) -> None:
        """Tell all workers of the node whether to mark snapshots for another node."""
        self._words[_PEERED] = int(peered)

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._words.release()
        self._mapping.close()


def _create_page(path: str, magic: int) -> mmap.mmap:
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, PAGE_BYTES)
        mapping = mmap.mmap(fd, PAGE_BYTES)
    finally:
        os.close(fd)
    memoryview(mapping).cast("Q")[_MAGIC] = magic
    return mapping


def _open_page(path: str, magic: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != PAGE_BYTES:
            raise CorruptShardError(file=path, reason="not a page of relit")
        mapping = mmap.mmap(fd, PAGE_BYTES)
    finally:
        os.close(fd)
    if memoryview(mapping).cast("Q")[_MAGIC] != magic:
        raise CorruptShardError(file=path, reason="not a page of this kind")
    return mapping
