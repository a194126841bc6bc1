"""Who may drive a run: one numbered record per supervisor life, the highest number in force.

    no record              take epoch 1
    held, not expired      LeaseHeldError, unless the holder is the taker itself
    expired or released    take epoch + 1, by exclusive create: of two takers one wins
    higher epoch appeared  renew raises FencedError, and the old holder must stop

A lease keeps two honest supervisors apart; it is no fence. Clocks differ and processes freeze, so
an old holder may believe in its lease for a while after it was taken over. What it writes then is
refused by number: by the agents (generations), the commit log and the event log (epochs).
Expiry is judged with a margin, so that clocks may differ by that much without harm.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any

from relit_storage.errors import (
    FencedError,
    LeaseHeldError,
    ObjectMissingError,
    StoreUnavailableError,
)
from relit_storage.run.layout import lease_key
from relit_storage.stores.protocol import ObjectStore

PREFIX = "lease/"
MARGIN_S = 2.0  # NTP keeps hosts within milliseconds; two seconds forgive a host without it
TAKE_TRIES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """One epoch's record. Times are Unix seconds by the holder's clock; holder is any string
    that names one supervisor for good, such as its actor id.
    """

    run: str
    epoch: int
    holder: str
    nonce: str
    taken_at_s: float
    renewed_at_s: float
    expires_at_s: float
    released: bool = False
    v: int = 1

    def expires_in_s(self, now: float, margin_s: float = MARGIN_S) -> float:
        """Seconds until another may take over; not positive if one may right now."""
        return -margin_s if self.released else self.expires_at_s + margin_s - now

    def in_force(self, now: float, margin_s: float = MARGIN_S) -> bool:
        """True while another taker must keep off."""
        return self.expires_in_s(now, margin_s) > 0

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> LeaseRecord:
        """Strict reading; ValueError or TypeError if it is no lease record."""
        fields: dict[str, Any] = json.loads(data)
        record = cls(**fields)
        if not isinstance(record.epoch, int) or not isinstance(record.holder, str):
            raise TypeError("epoch or holder has the wrong type")
        return replace(record, expires_at_s=float(record.expires_at_s))


class Lease:
    """A lease that was taken. Used by one thread; every method may block on the store."""

    def __init__(self, store: ObjectStore, record: LeaseRecord, ttl_s: float) -> None:
        self._store = store
        self._record = record
        self._ttl_s = ttl_s

    @classmethod
    def take(cls, store: ObjectStore, run_id: str, holder: str, now: float, ttl_s: float) -> Lease:
        """The next epoch for `holder`; LeaseHeldError while another holds it.

        Safe to repeat after any error: a holder that is in force already gets a newer epoch.
        """
        nonce = secrets.token_hex(16)
        for _ in range(TAKE_TRIES):
            current = read_lease(store)
            if current is not None and current.holder != holder and current.in_force(now):
                raise LeaseHeldError(
                    run=run_id,
                    holder=current.holder,
                    epoch=current.epoch,
                    expires_in_s=current.expires_in_s(now),
                )
            record = LeaseRecord(
                run=run_id,
                epoch=current.epoch + 1 if current else 1,
                holder=holder,
                nonce=nonce,
                taken_at_s=now,
                renewed_at_s=now,
                expires_at_s=now + ttl_s,
            )
            if store.put_if_absent(lease_key(record.epoch), record.to_bytes()):
                return cls(store, record, ttl_s)
        raise StoreUnavailableError(url=store.url, key=PREFIX, cause="too many racing takers")

    @property
    def epoch(self) -> int:
        """The number of this supervisor life; the fencing token of its log records."""
        return self._record.epoch

    @property
    def record(self) -> LeaseRecord:
        """What was last written."""
        return self._record

    def valid(self, now: float) -> bool:
        """False once the lease ran out unrenewed: stop acting before another may start."""
        return not self._record.released and now < self._record.expires_at_s

    def renew(self, now: float) -> None:
        """Prolong by the lease's time. FencedError if a newer epoch exists.

        A StoreError leaves the lease as it was: try again until `valid` is False.
        """
        self._check_newest()
        self._write(replace(self._record, renewed_at_s=now, expires_at_s=now + self._ttl_s))

    def release(self, now: float) -> None:
        """Let the next taker in at once. Nothing happens if one has already taken over."""
        try:
            self._check_newest()
        except FencedError:
            return
        self._write(replace(self._record, renewed_at_s=now, expires_at_s=now, released=True))

    def _check_newest(self) -> None:
        # A takeover between this look and the write that follows does no harm: the write goes to
        # our own epoch's key, and the highest key is in force.
        if self._store.size(lease_key(self.epoch + 1)) is not None:
            raise FencedError(what="lease epoch", ours=self.epoch, newest=self.epoch + 1)

    def _write(self, record: LeaseRecord) -> None:
        self._store.put(lease_key(self.epoch), record.to_bytes())
        self._record = record


def read_lease(store: ObjectStore) -> LeaseRecord | None:
    """The record in force, or None if the run was never driven.

    A record that cannot be read counts as expired: its epoch is known from its key, and whoever
    wrote it is fenced by the next number.
    """
    epochs = [epoch for key in store.list(PREFIX) if (epoch := _epoch_of(key)) is not None]
    if not epochs:
        return None
    newest = max(epochs)
    try:
        record = LeaseRecord.from_bytes(store.get(lease_key(newest)))
        if record.epoch == newest:
            return record
    except (ValueError, TypeError, RecursionError, ObjectMissingError):
        pass
    return LeaseRecord(
        run="",
        epoch=newest,
        holder="",
        nonce="",
        taken_at_s=0.0,
        renewed_at_s=0.0,
        expires_at_s=0.0,
        released=True,
    )


def _epoch_of(key: str) -> int | None:
    name = key.removeprefix(PREFIX).removesuffix(".json")
    return int(name) if name.isdecimal() and key == lease_key(int(name)) else None
