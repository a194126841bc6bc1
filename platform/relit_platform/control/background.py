"""Slow work of the coordinator, away from its lock: a few threads and a bounded queue."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MAX_WORKERS = 8
MAX_QUEUED = 4096


class Background:
    """Runs work on daemon-like threads. `report` hears of work that raised: our bug, never lost."""

    def __init__(self, report: Callable[[str], None], max_workers: int = MAX_WORKERS) -> None:
        self._report = report
        self._pool = ThreadPoolExecutor(max_workers, thread_name_prefix="manager-work")
        self._lock = threading.Lock()
        self._timers: set[threading.Timer] = set()
        self._queued = 0
        self._closed = False

    def submit(self, work: Callable[[], None], delay_s: float = 0.0) -> None:
        """See BackgroundPort.submit. Silently refuses after close: nobody is left to answer."""
        with self._lock:
            if self._closed:
                return
            if self._queued >= MAX_QUEUED:
                raise OverflowError(f"{MAX_QUEUED} pieces of work are queued already")
            self._queued += 1
            if delay_s > 0:
                timer = threading.Timer(delay_s, self._due)
                timer.args = (timer, work)
                timer.daemon = True
                self._timers.add(timer)
                timer.start()
            else:
                self._pool.submit(self._run, work)

    def close(self) -> None:
        """See BackgroundPort.close."""
        with self._lock:
            self._closed = True
            for timer in self._timers:
                timer.cancel()
            self._timers.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _due(self, timer: threading.Timer, work: Callable[[], None]) -> None:
        with self._lock:
            self._timers.discard(timer)
            if not self._closed:
                self._pool.submit(self._run, work)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # outermost loop of a thread: reported, never swallowed
            self._report(traceback.format_exc(limit=8))
        finally:
            with self._lock:
                self._queued -= 1
