"""The checkpoint machine, played event by event, for tests."""

from __future__ import annotations

from typing import Any

from shard_facts import shards, uploaded

from relit_platform.machines.cadence import Cadence
from relit_platform.machines.checkpoint import advance
from relit_platform.machines.checkpoint_state import (
    CheckpointBook,
    CheckpointEvent,
    GenerationFormed,
    Limits,
    Logged,
    Pins,
    Published,
    ReadPins,
)
from relit_storage.checkpoint.retention import Keep

NOWHERE = Cadence()
LIMITS = Limits(
    object=Cadence(every_steps=20), keep_disk=Keep(newest=2), keep_object=Keep(newest=2)
)


class Game:
    """Feeds events and keeps what came out of the last one; tells the pins when asked."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.book = CheckpointBook(limits=limits)
        self.now = 10.0
        self.pins: frozenset[int] = frozenset()
        self.last: list[Any] = []
        self.feed(GenerationFormed(generation=1, start_step=0))

    def feed(self, *events: CheckpointEvent) -> Game:
        for event in events:
            self.book, self.last = advance(self.book, event, self.now)
            if ReadPins() in self.last:
                self.book, more = advance(self.book, Pins(steps=self.pins), self.now)
                self.last += more
        return self

    def persisted(self, step: int, generation: int = 1) -> Game:
        return self.feed(*shards(step, generation))

    def committed(self, step: int, generation: int = 1) -> Game:
        return self.persisted(step, generation).feed(Published(step=step, generation=generation))

    def durable(self, step: int, generation: int = 1) -> Game:
        self.committed(step, generation)
        self.feed(uploaded(step, generation, 0), uploaded(step, generation, 1))
        return self.feed(Logged(step=step, generation=generation))

    def of(self, kind: type) -> list[Any]:
        return [action for action in self.last if isinstance(action, kind)]

    def phase(self, step: int, generation: int = 1) -> str:
        return str(self.book.steps[step, generation].phase)
