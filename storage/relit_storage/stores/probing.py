"""Does this store keep the promises that commits rest on? Asked at submit and by the doctor.

Some S3 look-alikes ignore the condition of a conditional write, or let several racing writers
win; on such a store two supervisors could both commit. It is refused, never trusted.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass

from relit_storage.errors import StoreError, UnsupportedStoreError
from relit_storage.stores.prefixed import PrefixedStore
from relit_storage.stores.protocol import ObjectStore

NUM_RACERS = 8
RACE_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantees:
    """What `probe` saw. latency_s is the median of its small writes.

    create_once: a second create of a key is refused. one_winner: of racing creates one wins.
    read_after_write: a read gives the bytes written last, exactly, and nothing after a delete.
    range_read: byte ranges are right. list_after_write: a listing shows a write, and a delete, at
    once.
    """

    create_once: bool
    one_winner: bool
    read_after_write: bool
    range_read: bool
    list_after_write: bool
    latency_s: float

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the guarantees that this store does not give."""
        names = ("create_once", "one_winner", "read_after_write", "range_read", "list_after_write")
        return tuple(name for name in names if not getattr(self, name))


def probe(store: ObjectStore, *, strict: bool = True) -> Guarantees:
    """Try the guarantees out, in about 60 small calls below a key of its own; blocks.

    UnsupportedStoreError if one is missing, unless strict is False (the doctor shows the list);
    StoreError if the store cannot be used at all. What it wrote is deleted again.
    """
    room = PrefixedStore(store, f"probe-{secrets.token_hex(8)}")
    seconds: list[float] = []
    try:
        found = Guarantees(
            create_once=_creates_once(room, seconds),
            one_winner=all(_race(room, number) == 1 for number in range(RACE_ROUNDS)),
            read_after_write=_reads_writes(room, seconds),
            range_read=_reads_ranges(room, seconds),
            list_after_write=_lists_writes(room, seconds),
            latency_s=sorted(seconds)[len(seconds) // 2],
        )
    finally:
        _clean(room)
    if strict and found.missing:
        raise UnsupportedStoreError(url=store.url, guarantee=", ".join(found.missing))
    return found


def _creates_once(room: ObjectStore, seconds: list[float]) -> bool:
    began = time.monotonic()
    first = room.put_if_absent("once", b"first")
    seconds.append(time.monotonic() - began)
    return first and not room.put_if_absent("once", b"second") and room.get("once") == b"first"


def _race(room: ObjectStore, number: int) -> int:
    barrier = threading.Barrier(NUM_RACERS)
    wins: list[bytes] = []
    errors: list[Exception] = []

    def racer(own: bytes) -> None:
        barrier.wait()
        try:
            if room.put_if_absent(f"race-{number}", own):
                wins.append(own)
        except StoreError as error:  # carried to the thread that asked
            errors.append(error)

    threads = [
        threading.Thread(target=racer, args=(b"racer-%d" % rank,)) for rank in range(NUM_RACERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return len(wins) if room.get(f"race-{number}") in wins else 0


def _reads_writes(room: ObjectStore, seconds: list[float]) -> bool:
    """A cache on the way shows old bytes; a store that knows no checksum trailers keeps them."""
    for data in (b"first " * 1000, b"", b"second, shorter"):
        began = time.monotonic()
        room.put("read", data)
        seconds.append(time.monotonic() - began)
        if room.get("read") != data or room.size("read") != len(data):
            return False
    room.delete("read")
    return room.size("read") is None


def _reads_ranges(room: ObjectStore, seconds: list[float]) -> bool:
    began = time.monotonic()
    room.put("range", bytes(range(256)))
    seconds.append(time.monotonic() - began)
    tail = room.get_range("range", 250, 100)
    return room.get_range("range", 3, 5) == bytes(range(3, 8)) and tail == bytes(range(250, 256))


def _lists_writes(room: ObjectStore, seconds: list[float]) -> bool:
    for name in ("list/a", "list/b", "list/c"):
        began = time.monotonic()
        room.put(name, b"x")
        seconds.append(time.monotonic() - began)
        if name not in room.list("list/"):
            return False
    room.delete("list/b")
    return room.list("list/") == ["list/a", "list/c"]


def _clean(room: ObjectStore) -> None:
    try:
        for key in room.list(""):
            room.delete(key)
    except StoreError:
        pass  # the error that brought us here says more; a few bytes stay behind
