"""What the manager advises a rank, asked for at boundaries and without ever waiting.

One question at a time, every ASK_EVERY_S seconds; an answer is looked at when it is there. A
manager that is away, or that knows nothing yet, has no advice: then what was advised last holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

ASK_EVERY_S = 5.0


class Link(Protocol):
    """The part of ActorLink that is used here."""

    def send(self, method: str, *args: Any) -> Any | None:
        """Call without waiting; a reference, or None."""
        ...

    def answered(self, ref: Any) -> tuple[bool, Any]:
        """Whether a call is over, and its answer; None if it failed."""
        ...


class Adviser:
    """How far saves to disk shall lie apart, for `advise`. Used by rank 0's own thread."""

    def __init__(self, manager: Link, advise: Callable[[float], None]) -> None:
        self._manager = manager
        self._advise = advise
        self._asked: Any = None
        self._asked_s: float | None = None

    def ask(self, now_s: float) -> None:
        """Once for each step; costs nothing but every ASK_EVERY_S seconds, and then some 100 us."""
        if self._asked is not None:
            over, answer = self._manager.answered(self._asked)
            if not over:
                return
            self._asked = None
            if answer:
                self._advise(float(answer))
        if self._asked_s is None or abs(now_s - self._asked_s) >= ASK_EVERY_S:
            self._asked_s = now_s
            self._asked = self._manager.send("spacing")
