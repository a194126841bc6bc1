"""The event log and the metric rows of a run: JSONL segments, readable with the cluster gone.

One writer per epoch (the supervisor). Sequence numbers rise strictly over the whole run: a new
epoch goes on where the segments it found end. An older epoch's writer that still lives writes
numbers which the newer one has used as well: readers drop an event whose number is not below the
first of every newer epoch, so a new writer should write its first event at once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from relit_storage.run.layout import event_key, metric_key
from relit_storage.run.segments import (
    MAX_PENDING_BYTES,
    Segment,
    SegmentWriter,
    parse_segment,
    segment_keys,
    to_line,
)
from relit_storage.stores.bulk import get_many
from relit_storage.stores.protocol import ObjectStore

EVENTS = "events/"
METRICS = "metrics/"
VERSION = 1
LOUD = ("warning", "error")


class EventWriter:
    """Gives facts their sequence number and writes them. Thread-safe.

    The first `append` reads the last segment of the run, so it blocks on the store; later ones do
    not. `started_at_s` is when the run was submitted: events carry the seconds since then as `t`.
    """

    def __init__(self, store: ObjectStore, run_id: str, epoch: int, started_at_s: float) -> None:
        self._store = store
        self._run_id = run_id
        self._epoch = epoch
        self._started_at_s = started_at_s
        self._segments = SegmentWriter(store, epoch, EVENTS, event_key)
        self._lock = threading.Lock()
        self._seq: int | None = None
        self._dropped = 0

    def append(self, fact: Mapping[str, Any]) -> dict[str, Any]:
        """The event made of a fact's kind, at_s, src, generation, step, level, data and number.

        Not written before a `flush`. While the store is 16 MiB behind, "info" events are dropped
        (returned with seq 0) and counted in one later event of kind "log.overflow"; warnings and
        errors have as much room again.
        """
        with self._lock:
            if self._seq is None:
                self._seq = _last_seq(self._store)
            if self._dropped and self._segments.num_bytes < MAX_PENDING_BYTES // 2:
                dropped, self._dropped = self._dropped, 0
                self._seq = self._add(_overflow(fact, dropped), self._seq + 1)["seq"]
            event = self._add(fact, self._seq + 1)
            self._seq = max(self._seq, event["seq"])
            return event

    def due(self, now: float) -> bool:
        """Whether to call `flush` now; see SegmentWriter.due. A warning or error is always due."""
        return self._segments.due(now)

    def flush(self, now: float) -> int:
        """Close a segment with all events so far; blocks. See SegmentWriter.flush for errors."""
        return self._segments.flush(now)

    def _add(self, fact: Mapping[str, Any], seq: int) -> dict[str, Any]:
        event = self._event(fact, seq)
        loud = event["level"] in LOUD
        limit = MAX_PENDING_BYTES * (2 if loud else 1)
        if self._segments.add(to_line(event), urgent=loud, limit_bytes=limit):
            return event
        self._dropped += 1
        return event | {"seq": 0}

    def _event(self, fact: Mapping[str, Any], seq: int) -> dict[str, Any]:
        at_s = float(fact["at_s"])
        ts = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="microseconds")
        event = {
            "v": VERSION,
            "seq": seq,
            "ts": ts.replace("+00:00", "Z"),
            "t": round(at_s - self._started_at_s, 3),
            "run": self._run_id,
            "epoch": self._epoch,
            "gen": fact.get("generation", 0),
            "step": fact.get("step"),
            "src": fact["src"],
            "kind": fact["kind"],
            "level": fact.get("level", "info"),
            "data": dict(fact.get("data") or {}),
        }
        # By its sender's number a later writer knows a fact that it is told again.
        return event | {"number": fact["number"]} if fact.get("number") else event


class EventReader:
    """Follows a run's events: each `poll` returns those not returned before. Not thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._seen: set[tuple[int, int]] = set()
        self._first_seq: dict[int, int] = {}
        self._last_seq = 0

    def poll(self) -> list[dict[str, Any]]:
        """New surviving events in order; blocks on one listing and on each new segment."""
        keys = [k for k in segment_keys(self._store, EVENTS, event_key) if k not in self._seen]
        blobs = get_many(self._store, [event_key(*key) for key in keys])
        segments = [
            parse_segment(*key, blob, _is_event) for key, blob in zip(keys, blobs, strict=True)
        ]
        self._seen.update(keys)
        for segment in segments:
            if segment.rows:
                first = min(row["seq"] for row in segment.rows)
                known = self._first_seq.get(segment.epoch, first)
                self._first_seq[segment.epoch] = min(known, first)
        return [event for segment in segments for event in self._surviving(segment)]

    def _surviving(self, segment: Segment) -> list[dict[str, Any]]:
        newer = [first for epoch, first in self._first_seq.items() if epoch > segment.epoch]
        end = min(newer, default=None)
        events = [row for row in segment.rows if end is None or row["seq"] < end]
        if segment.refused:
            taken = {row["seq"] for row in events}
            seq = self._last_seq + 1  # the refused lines had numbers: the first that is missing
            while seq in taken:
                seq += 1
            events.append(_refusal(segment, seq))
            events.sort(key=lambda event: int(event["seq"]))
        self._last_seq = max([self._last_seq, *(event["seq"] for event in events)])
        return events


class RowWriter:
    """Metric rows of committed progress, by the same segments. Thread-safe."""

    def __init__(self, store: ObjectStore, epoch: int) -> None:
        self._segments = SegmentWriter(store, epoch, METRICS, metric_key)

    def append(self, row: Mapping[str, Any]) -> bool:
        """Take a row, which names its step (int); False, and keep it, if the store is far behind.

        Non-finite numbers are written as Python's JSON writes them: NaN, Infinity.
        """
        if not _is_row(row):
            raise TypeError(f"a row's step is an int, not {row.get('step')!r}")
        return self._segments.add(to_line(dict(row)))

    def due(self, now: float) -> bool:
        """Whether to call `flush` now; see SegmentWriter.due."""
        return self._segments.due(now)

    def flush(self, now: float) -> int:
        """Close a segment with all rows so far; blocks. See SegmentWriter.flush for errors."""
        return self._segments.flush(now)


def read_events(store: ObjectStore, since_seq: int = 0) -> list[dict[str, Any]]:
    """All surviving events with a number above `since_seq`, in order.

    A torn segment adds one event of kind "log.refused" and loses nothing else. Reads every
    segment; a follower uses EventReader.
    """
    return [event for event in EventReader(store).poll() if event["seq"] > since_seq]


def read_rows(store: ObjectStore) -> list[dict[str, Any]]:
    """One row per step, by step: of the newest epoch, in it of the newest generation, which has
    done the step again, and of one generation the first that was written.
    """
    keys = segment_keys(store, METRICS, metric_key)
    blobs = get_many(store, [metric_key(*key) for key in keys])
    newest: dict[int, tuple[tuple[int, int], dict[str, Any]]] = {}
    for (epoch, number), blob in zip(keys, blobs, strict=True):
        for row in parse_segment(epoch, number, blob, _is_row).rows:
            step = row["step"]
            age = (epoch, _generation(row))
            if step not in newest or newest[step][0] < age:
                newest[step] = (age, row)
    return [newest[step][1] for step in sorted(newest)]


def _last_seq(store: ObjectStore) -> int:
    refused = 0
    for epoch, number in reversed(segment_keys(store, EVENTS, event_key)):
        blob = store.get(event_key(epoch, number))
        segment = parse_segment(epoch, number, blob, _is_event)
        refused += segment.refused
        if segment.rows:
            return max(int(row["seq"]) for row in segment.rows) + refused
    return refused


def _refusal(segment: Segment, seq: int) -> dict[str, Any]:
    key = event_key(segment.epoch, segment.number)
    return {
        "v": VERSION,
        "seq": seq,
        "ts": "",
        "t": None,
        "run": "",
        "epoch": segment.epoch,
        "gen": 0,
        "step": None,
        "src": "reader",
        "kind": "log.refused",
        "level": "warning",
        "data": {"key": key, "lines": segment.refused, "reason": segment.reason},
    }


def _overflow(fact: Mapping[str, Any], dropped: int) -> dict[str, Any]:
    return {
        "kind": "log.overflow",
        "at_s": fact["at_s"],
        "src": "supervisor",
        "level": "warning",
        "data": {"dropped": dropped},
    }


def _is_event(row: Mapping[str, Any]) -> bool:
    seq = row.get("seq")
    known = isinstance(seq, int) and seq > 0 and isinstance(row.get("kind"), str)
    timed = isinstance(row.get("t"), (int, float, type(None)))
    return known and timed and isinstance(row.get("data"), (dict, type(None)))


def _generation(row: Mapping[str, Any]) -> int:
    found = row.get("generation")
    return found if isinstance(found, int) else 0


def _is_row(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("step"), int)
