"""What an agent does for training's sake: its saving threads step back, and write only so fast.

Both hold for threads that persist and upload. Those that watch processes and heartbeats keep their
priority, for a failure has to be noticed at once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from relit_storage.stores.pace import Pace

LOWEST = 19  # niceness beyond which there is nothing


def step_back(nice: int) -> bool:
    """Lower the CPU priority of the calling thread by `nice` steps; True if it is lower, or 0.

    Linux keeps the niceness of each thread, and `setpriority` with a thread's own id changes that
    thread alone; threads that it starts inherit it, and so does the priority of its I/O, where the
    scheduler of the disk knows one. Counted from where the process is: Ray starts workers, agents
    among them, at niceness 15, so four steps are left there. Without privilege there is no way
    back, which nothing here needs. Never raises: a priority that cannot be had is no error.
    """
    if nice <= 0:
        return True
    try:
        thread = threading.get_native_id()
        present = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(LOWEST, present + nice))
        return os.getpriority(os.PRIO_PROCESS, thread) > present
    except OSError:
        return False


class DiskPace:
    """The cap on what persisting writes, which anything urgent lifts. Thread-safe.

    bytes_per_s 0 means no cap. Urgent is what a process waits for that ends: the last save of all,
    a stop that was asked for, the agent's own end.
    """

    def __init__(
        self,
        bytes_per_s: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._urgent: set[str] = set()
        self._lock = threading.Lock()
        self._hurry = threading.Event()
        self._pace = Pace(bytes_per_s or None, clock=clock, sleep=sleep or self._hurry.wait)

    def take(self, num_bytes: int) -> None:
        """Block until `num_bytes` may be written, or something has become urgent."""
        if not self._hurry.is_set():
            self._pace.take(num_bytes)

    def hurry(self, reason: str) -> None:
        """From now on there is no cap; who waits for it goes on at once."""
        with self._lock:
            self._urgent.add(reason)
            self._hurry.set()

    def calm(self, reason: str) -> None:
        """This is not urgent any more; the cap holds again when nothing is."""
        with self._lock:
            self._urgent.discard(reason)
            if not self._urgent:
                self._hurry.clear()
