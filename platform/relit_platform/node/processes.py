"""Worker processes seen from outside: noticed when they end, killed when they are fenced.

A process is named by pid and start time (clock ticks since boot, /proc/<pid>/stat), because pids
are used again. A pidfd is opened first and the start time compared after, so that the descriptor
is known to mean the right process; from then on it never means another one. Zombies count as
ended: they run no code.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """A process that cannot be mistaken for a later one of the same pid."""

    pid: int
    start_ticks: int


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(b")")[2].split()[19])


def kill_and_wait(pid: int, ticks: int, timeout_s: float) -> bool:
    """SIGKILL a process and wait for its end: True if it is gone, or was gone before.

    Never signals another process that got the same pid. False after timeout_s: it is stuck in
    the kernel and may still write.
    """
    fd = _open_pidfd(ProcessKey(pid, ticks))
    if fd is None:
        return True
    try:
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        except ProcessLookupError:
            return True
        return bool(_ended([fd], timeout_s))
    finally:
        os.close(fd)


class ProcessWatch:
    """Notices the end of processes, also of those that are no children of ours."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fds: dict[ProcessKey, int] = {}
        self._gone: list[ProcessKey] = []

    def add(self, key: ProcessKey) -> None:
        """Watch a process; one that is gone already is reported by the next poll. Repeatable."""
        with self._lock:
            if key in self._fds or key in self._gone:
                return
            fd = _open_pidfd(key)
            if fd is None:
                self._gone.append(key)
            else:
                self._fds[key] = fd

    def poll(self, wait_s: float = 0.0) -> list[ProcessKey]:
        """Those that ended since the last poll; waits up to wait_s for the first one.

        One thread polls. A process added during the wait is looked at in the next poll.
        """
        with self._lock:
            gone, self._gone = self._gone, []
            fds = dict(self._fds)
        ended = _ended(list(fds.values()), 0.0 if gone else wait_s)
        found = gone + [key for key, fd in fds.items() if fd in ended]
        with self._lock:
            for key in found:
                fd = self._fds.pop(key, -1)
                if fd >= 0:
                    os.close(fd)
        return found

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()


def _open_pidfd(key: ProcessKey) -> int | None:
    try:
        fd = os.pidfd_open(key.pid)
    except ProcessLookupError:
        return None
    if start_ticks(key.pid) != key.start_ticks:
        os.close(fd)
        return None
    return fd


def _ended(fds: list[int], timeout_s: float) -> set[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(timeout_s * 1000)}
