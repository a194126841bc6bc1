"""Incidents on their way into the run directory: one JSON object per recovery, numbered.

The record itself is made by the pure machine in `relit_platform.machines.incident`; this shell
numbers it over all supervisor lives and writes it, again and again while the store is away.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from relit_platform.facts import Fact
from relit_platform.machines import incident
from relit_storage.run import layout
from relit_storage.stores.protocol import ObjectStore

PREFIX = "incidents/"


class IncidentLog:
    """Used under the pump's lock. `events` are those of earlier supervisors: an incident that one
    of them saw begin is still open here, and one that it closed last is written if it could not.
    """

    def __init__(self, store: ObjectStore, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self._store = store
        self._state = incident.IncidentState()
        self._unwritten: dict[int, dict[str, Any]] = {}
        self._number: int | None = None
        self.last_headline = ""
        events = list(events)
        if events:
            self._replay(events)

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

    def _replay(self, events: Iterable[Mapping[str, Any]]) -> None:
        closed: list[dict[str, Any]] = []
        announced = 0
        for event in events:
            if event["kind"] != "incident.closed":
                self._state, records = incident.advance(self._state, _fact(event))
                closed.extend(records)
                continue
            announced += 1
            self.last_headline = str((event.get("data") or {}).get("headline") or "")
            if len(closed) < announced:  # the end of the run closed it
                self._state, records = incident.finish(self._state, _at_s(event))
                closed.extend(records or [{}])
        for record in closed[self._newest() :]:
            self._record(record)

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
            self._number = max((int(stem) for stem in stems if stem.isdecimal()), default=0)
        return self._number


def _fact(event: Mapping[str, Any]) -> Fact:
    """The fact of which an event was made."""
    return Fact(
        kind=event["kind"],
        at_s=_at_s(event),
        src=str(event.get("src") or ""),
        generation=int(event.get("gen") or 0),
        step=event.get("step"),
        level=event.get("level") or "info",
        data=event.get("data") or {},
    )


def _at_s(event: Mapping[str, Any]) -> float:
    """Unix seconds; 0 for what the reader itself has to say."""
    return datetime.fromisoformat(event["ts"]).timestamp() if event.get("ts") else 0.0
