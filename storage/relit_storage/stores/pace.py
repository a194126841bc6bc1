"""A cap on the bytes a store sends in a second, so that uploads leave the network to training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """Shared by all uploads of one store; thread-safe. `bytes_per_s` None means no cap."""

    def __init__(
        self,
        bytes_per_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_s = 0.0  # when the bytes let through so far have been paid for

    def take(self, num_bytes: int) -> None:
        """Block until `num_bytes` may be sent; call it before sending each piece."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            now = self._clock()
            start = max(now, self._free_s)
            self._free_s = start + num_bytes / self.bytes_per_s
        if start > now:
            self._sleep(start - now)
