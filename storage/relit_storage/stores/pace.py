"""A cap on bytes a second, so that uploads leave the network, and saves the disk, to training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """Shared by all that it shall hold back together; thread-safe. `bytes_per_s` None means no cap.

    A bucket of tokens that holds those of one piece: a piece goes at once when the one before it
    has been paid for. sleep may return early, where somebody must not wait any longer.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_s = 0.0  # when the bytes let through so far have been paid for

    def take(self, num_bytes: int) -> None:
        """Block until `num_bytes` may go; call it before each piece."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            now = self._clock()
            start = max(now, self._free_s)
            self._free_s = start + num_bytes / self.bytes_per_s
        if start > now:
            self._sleep(start - now)
