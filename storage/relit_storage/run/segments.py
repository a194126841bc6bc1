"""Append-only lines on stores that cannot append: closed segments, one writer per epoch.

A segment is a JSONL object named by epoch and number, created exclusively and never changed.
Once its write was tried its bytes stay the same until the store has confirmed them, for an answer
may be lost: sending other bytes under the same name would lose whichever came second.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from relit_storage.errors import FencedError, StoreError
from relit_storage.stores.protocol import ObjectStore

CLOSE_AFTER_S = 2.0
CLOSE_AT_BYTES = 256 << 10
MAX_PENDING_BYTES = 16 << 20  # what a store may be behind before lines are refused
RETRY_S = (1.0, 30.0)  # first and longest pause after a failed write

KeyOf = Callable[[int, int], str]
Valid = Callable[[dict[str, Any]], bool]


class SegmentWriter:
    """Collects lines and writes them as segments of one epoch. Thread-safe.

    `key_of(epoch, number)` names a segment, `folder` is the prefix of all of them.
    """

    def __init__(self, store: ObjectStore, epoch: int, folder: str, key_of: KeyOf) -> None:
        self._store = store
        self._epoch = epoch
        self._folder = folder
        self._key_of = key_of
        self._lock = threading.Lock()  # guards the lines
        self._write_lock = threading.Lock()  # one segment at a time
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._urgent = False
        self._waiting_since_s: float | None = None
        self._closing: bytes | None = None
        self._number: int | None = None
        self._failures = 0
        self._retry_at_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of lines that no segment holds yet."""
        with self._lock:
            return self._num_bytes + len(self._closing or b"")

    def add(self, line: bytes, *, urgent: bool = False, limit_bytes: int | None = None) -> bool:
        """Take one line, without its newline; False if the store is too far behind."""
        limit = MAX_PENDING_BYTES if limit_bytes is None else limit_bytes
        with self._lock:
            if self._num_bytes + len(self._closing or b"") + len(line) > limit:
                return False
            self._lines.append(line + b"\n")
            self._num_bytes += len(line) + 1
            self._urgent = self._urgent or urgent
            return True

    def due(self, now: float) -> bool:
        """Whether `flush` should be called; ask often, this never blocks.

        True when an urgent line waits, 256 KiB are full, or lines wait since 2 s (counted from the
        first question after they came), unless a failed write is being given a pause.
        """
        with self._lock:
            if not self._lines and self._closing is None:
                self._waiting_since_s = None
                return False
            if self._waiting_since_s is None:
                self._waiting_since_s = now
            if now < self._retry_at_s:
                return False
            waited = now - self._waiting_since_s
            full = self._num_bytes >= CLOSE_AT_BYTES
            return self._urgent or full or self._closing is not None or waited >= CLOSE_AFTER_S

    def flush(self, now: float) -> int:
        """Write all lines; the number of segments written. Blocks on the store.

        StoreError: nothing is lost, call again when `due` says so. FencedError: another writer
        uses this epoch.
        """
        written = 0
        with self._write_lock:
            while (data := self._close()) is not None:
                self._write(data, now)
                written += 1
        return written

    def _close(self) -> bytes | None:
        with self._lock:
            if self._closing is None and self._lines:
                self._closing = b"".join(self._lines)
                self._lines, self._num_bytes, self._urgent = [], 0, False
                self._waiting_since_s = None
            return self._closing

    def _write(self, data: bytes, now: float) -> None:
        try:
            if self._number is None:
                self._number = self._next_number()
            ours = self._store.put_if_absent(self._key_of(self._epoch, self._number), data)
        except StoreError:
            self._failures += 1
            pause_s = min(RETRY_S[1], RETRY_S[0] * 2.0 ** min(self._failures - 1, 16))
            self._retry_at_s = now + pause_s
            raise
        if not ours:
            what = f"{self._folder} writer of epoch"
            raise FencedError(what=what, ours=self._epoch, newest="another writer of this epoch")
        with self._lock:
            self._closing = None
        self._number += 1
        self._failures, self._retry_at_s = 0, 0.0

    def _next_number(self) -> int:
        keys = segment_keys(self._store, self._folder, self._key_of)
        return max((number for epoch, number in keys if epoch == self._epoch), default=-1) + 1


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment read back: its good lines, how many were refused, and why the first was."""

    epoch: int
    number: int
    rows: tuple[dict[str, Any], ...]
    refused: int = 0
    reason: str = ""


def segment_keys(store: ObjectStore, folder: str, key_of: KeyOf) -> list[tuple[int, int]]:
    """(epoch, number) of every segment, in order; foreign names are left out."""
    return sorted(found for key in store.list(folder) if (found := _parse(key, folder, key_of)))


def parse_segment(epoch: int, number: int, data: bytes, valid: Valid) -> Segment:
    """The lines of a segment; a torn or not `valid` line is counted, the others are kept."""
    rows: list[dict[str, Any]] = []
    reasons: list[str] = []
    for place, line in enumerate(data.split(b"\n")):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not valid(row):
                raise ValueError("not a line of this log")
            rows.append(row)
        except (ValueError, RecursionError) as error:
            reasons.append(f"line {place + 1}: {error}")
    return Segment(epoch, number, tuple(rows), len(reasons), reasons[0] if reasons else "")


def to_line(row: dict[str, Any]) -> bytes:
    """One JSON line. What JSON does not know becomes its repr: an event must not fail a run."""
    return json.dumps(row, separators=(",", ":"), default=repr).encode()


def _parse(key: str, folder: str, key_of: KeyOf) -> tuple[int, int] | None:
    epoch, dash, number = key.removeprefix(folder).removesuffix(".jsonl").partition("-")
    if not (dash and epoch.isdecimal() and number.isdecimal()):
        return None
    found = (int(epoch), int(number))
    return found if key_of(*found) == key else None
