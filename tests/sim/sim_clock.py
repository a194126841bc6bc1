"""The one clock and the one source of chance: a seed decides everything that happens."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable


class Clock:
    """Virtual seconds. `after` queues a call; `run` makes them in order until none is left."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1_000_000.0
        self.trace: deque[str] = deque(maxlen=400)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._count, call))

    def between(self, low: float, high: float) -> float:
        return self.rng.uniform(low, high)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def say(self, text: str) -> None:
        self.trace.append(f"{self.now - 1_000_000.0:9.3f}  {text}")

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """True if `until` came true within `limit_s`."""
        end = self.now + limit_s
        while self._queue and not until():
            at, _, call = heapq.heappop(self._queue)
            if at > end:
                return False
            self.now = max(self.now, at)
            call()
        return until()
