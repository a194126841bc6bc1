"""Facts on their way to the manager: in order, kept while it is away, never without bound."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

CAPACITY = 2000
RETRY_FIRST_S = 0.05
RETRY_MAX_S = 1.0


class Outbox:
    """`put` never blocks; one thread delivers.

    deliver(fact) returns when the fact has arrived, and raises if it may not have: it is then
    tried again, so a fact may arrive twice. When the outbox is full the oldest fact is lost and
    counted: the manager learns the same from the next inventory.
    """

    def __init__(self, deliver: Callable[[object], None]) -> None:
        self._deliver = deliver
        self._wake = threading.Condition()
        self._facts: deque[object] = deque()
        self._closing = False
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to deliver."""
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, fact: object) -> None:
        """Queue a fact."""
        with self._wake:
            if len(self._facts) >= CAPACITY:
                self._facts.popleft()
                self._dropped += 1
            self._facts.append(fact)
            self._wake.notify()

    @property
    def dropped(self) -> int:
        """How many facts were lost because the manager was away for too long."""
        return self._dropped

    def close(self, timeout_s: float) -> None:
        """Deliver what is queued, as long as that works, then end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        pause_s = RETRY_FIRST_S
        while True:
            with self._wake:
                while not self._facts and not self._closing:
                    self._wake.wait()
                if not self._facts:
                    return
                fact = self._facts[0]
            try:
                self._deliver(fact)
            except Exception:  # whatever the transport raises, the fact has to arrive
                if self._wait(pause_s):
                    return
                pause_s = min(RETRY_MAX_S, pause_s * 2)
                continue
            pause_s = RETRY_FIRST_S
            with self._wake:
                if self._facts and self._facts[0] is fact:
                    self._facts.popleft()

    def _wait(self, pause_s: float) -> bool:
        with self._wake:
            return self._wake.wait_for(lambda: self._closing, pause_s)
