"""Incidents on their way into the run directory: one JSON object per recovery, numbered.

The record itself is made by the pure machine in `relit_platform.machines.incident`; this shell
numbers it over all supervisor lives and writes it, again and again while the store is away.
"""

from __future__ import annotations

import json
from typing import Any

from relit_platform.facts import Fact
from relit_platform.machines import incident
from relit_storage.run import layout
from relit_storage.stores.protocol import ObjectStore

PREFIX = "incidents/"


class IncidentLog:
    """Used under the pump's lock. The first `add` that closes an incident blocks on one listing."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._state = incident.IncidentState()
        self._unwritten: dict[int, dict[str, Any]] = {}
        self._number: int | None = None
        self.last_headline = ""

    @property
    def count(self) -> int:
        """Incidents of the whole run that are closed."""
        return self._newest()

    def add(self, fact: Fact) -> list[dict[str, Any]]:
        """Feed one fact; returns the records of incidents that it closed, numbered."""
        self._state, closed = incident.advance(self._state, fact)
        return [self._record(record) for record in closed]

    def finish(self, now: float) -> list[dict[str, Any]]:
        """The run is over: close what is still open as never recovered."""
        self._state, closed = incident.finish(self._state, now)
        return [self._record(record) for record in closed]

    def flush(self) -> None:
        """Write what is not written yet; raises StoreError and keeps it."""
        for number, record in sorted(self._unwritten.items()):
            self._store.put(
                layout.incident_key(number), json.dumps(record, sort_keys=True).encode()
            )
            del self._unwritten[number]

    def _record(self, record: dict[str, Any]) -> dict[str, Any]:
        number = self._newest() + 1
        self._number = number
        headline = str(record.get("headline", ""))
        numbered = {**record, "id": number, "headline": headline.replace("{id}", str(number))}
        self._unwritten[number] = numbered
        self.last_headline = numbered["headline"]
        return numbered

    def _newest(self) -> int:
        if self._number is None:
            stems = [
                key.removeprefix(PREFIX).removesuffix(".json") for key in self._store.list(PREFIX)
            ]
            self._number = max((int(stem) for stem in stems if stem.isdigit()), default=0)
        return self._number
