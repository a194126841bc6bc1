"""What the manager keeps for the supervisor until the supervisor has written it down."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import islice
from typing import Any

from relit_platform.facts import Drained, Fact

MAX_KEPT = 65536
MAX_PER_DRAIN = 4096

Item = tuple[int, Fact | dict[str, Any]]


class Outbox:
    """A bounded queue of facts and rows under one rising number. Not thread-safe.

    Numbers begin at the clock's microseconds, so those of a re-created manager are higher than
    any that its predecessor gave out, and an old `after` never hides new items. Where the clock
    went back in between, `raise_above` does that.
    """

    def __init__(self, now_s: float) -> None:
        self._items: deque[Item] = deque()
        self._unwritten: deque[tuple[int, int]] = deque(maxlen=MAX_KEPT)  # number and step of rows
        self._next = int(now_s * 1_000_000) + 1
        self._handed = 0
        self._dropped = 0

    def add(self, item: Fact | dict[str, Any]) -> None:
        """Queue one; when full the oldest goes and is counted."""
        if not isinstance(item, Fact):
            self._unwritten.append((self._next, int(item["step"])))
        self._items.append((self._next, item))
        self._next += 1
        if len(self._items) > MAX_KEPT:
            number, _ = self._items.popleft()
            self._dropped += number > self._handed

    def raise_above(self, told: int) -> None:
        """A number that was written and that this manager has not given out yet was given out by
        another one: what is here gets higher ones.
        """
        if told < self._next:
            return
        shift = told + 1 - (self._items[0][0] if self._items else self._next)
        self._items = deque((number + shift, item) for number, item in self._items)
        rows = ((number + shift, step) for number, step in self._unwritten)
        self._unwritten = deque(rows, maxlen=MAX_KEPT)
        self._next += shift

    @property
    def first_unwritten_row(self) -> int | None:
        """The lowest step of a row that the supervisor has not written yet."""
        return min((step for _, step in self._unwritten), default=None)

    def drain(self, after: int, status: dict[str, Any], written: int | None = None) -> Drained:
        """Hand out what is numbered above `after`; forget what is numbered up to `written`.

        written: up to here everything is in the run directory (None: up to `after`). What was
        handed out and not written is kept for the next supervisor, if this one dies with it.
        """
        if after >= self._next:
            after = 0  # a number this manager never gave out: the clock went back
        safe = after if written is None else min(written, after)
        while self._unwritten and self._unwritten[0][0] <= safe:
            self._unwritten.popleft()
        while self._items and self._items[0][0] <= safe:
            self._items.popleft()
        first = self._items[0][0] if self._items else self._next
        start = max(0, after - first + 1)
        taken = list(islice(self._items, start, start + MAX_PER_DRAIN))
        self._handed = max(self._handed, taken[-1][0] if taken else after)
        dropped, self._dropped = self._dropped, 0
        return Drained(
            facts=tuple(replace(item, number=n) for n, item in taken if isinstance(item, Fact)),
            rows=tuple(item for _, item in taken if not isinstance(item, Fact)),
            next=taken[-1][0] if taken else after,
            status=status,
            overflow=dropped,
            more=start + len(taken) < len(self._items),
        )
