"""How long to keep asking a store that does not answer: a deadline, and full jitter between tries.

Without jitter all ranks of a run come back to a throttled store in the same instant.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Bounds for the tries of one call: `deadline_s` in all, pauses of up to `cap_s`.

    clock, sleep and uniform are seams for tests; the defaults are the real ones.
    """

    deadline_s: float = 60.0
    base_s: float = 0.2
    cap_s: float = 5.0
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    uniform: Callable[[float, float], float] = field(default=random.uniform, repr=False)

    def start(self, extra_s: float = 0.0) -> Tries:
        """Begin one call; `extra_s` is added for calls whose work grows with their bytes."""
        return Tries(self, self.clock() + self.deadline_s + extra_s)

    def pause_s(self, tries: int) -> float:
        """The pause after try number `tries` (1, 2, ...): uniform in [0, base * 2^(tries-1)]."""
        return self.uniform(0.0, min(self.cap_s, self.base_s * 2 ** min(tries - 1, 30)))


class Tries:
    """The tries of one call. Not thread-safe; lives in one call's frame."""

    def __init__(self, backoff: Backoff, end_s: float) -> None:
        self._backoff = backoff
        self._end_s = end_s
        self._count = 0

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least a little, so that a first try can happen."""
        return max(0.05, self._end_s - self._backoff.clock())

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return self._backoff.clock() >= self._end_s

    def same_deadline(self) -> Tries:
        """Tries for a part of this call, counted on their own, with the same deadline."""
        return Tries(self._backoff, self._end_s)

    def again(self) -> bool:
        """Sleep before the next try; False, without sleeping, if the deadline would pass."""
        self._count += 1
        pause_s = self._backoff.pause_s(self._count)
        if self._backoff.clock() + pause_s >= self._end_s:
            return False
        self._backoff.sleep(pause_s)
        return True
