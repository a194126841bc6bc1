"""The one place where a step becomes real in the object tier: a log of numbered slots.

Each record is the exclusive create of the next free slot, so there is no moment between looking
and writing: a writer that was taken over finds its slot taken, reads on, and sees the newer epoch.

    answer to the create       meaning
    created                    ours is in the log
    slot taken                 ours if it carries our nonce (an answer was lost); else read it,
                               decide anew, go on with the next slot
    no answer                  read the slot: ours, free (the same slot again) or another's
    higher epoch in the log    FencedError: a newer supervisor has taken over
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import replace

from relit_storage.checkpoint.log_records import LogRecord, LogView, fold, next_slot
from relit_storage.errors import (
    CommitConflictError,
    FencedError,
    ManifestError,
    ObjectMissingError,
    RetentionError,
    StoreUnavailableError,
)
from relit_storage.run.layout import LOG_PREFIX, log_key
from relit_storage.stores.bulk import get_many
from relit_storage.stores.protocol import ObjectStore

APPEND_TRIES = 64  # slots lost to other writers in one append
BLIND_TRIES = 3  # creates without an answer in one append; each already took the store's deadline

Admit = Callable[[LogView], LogRecord | None]


class CommitLog:
    """The log of one run; `store` is the run's own view. Thread-safe; every method blocks.

    Every append may be repeated after any error: what is in the log already is found and returned.
    Records are immutable, so each instance reads a slot once.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._records: dict[int, LogRecord] = {}
        self._refused: dict[int, str] = {}
        self._listed = False

    def replay(self) -> LogView:
        """The log as it stands now: one listing the first time, then one read per new slot."""
        with self._lock:
            return self._refresh()

    def append_epoch(
        self, epoch: int, *, at_s: float, holder: str = "", nonce: str = ""
    ) -> LogRecord:
        """Take over: from now on nobody with a lower epoch can append.

        FencedError if a higher epoch is in the log. The record that is there if this epoch is.
        """
        record = LogRecord(
            kind="epoch", epoch=epoch, holder=holder, at_s=at_s, nonce=nonce or _nonce()
        )
        return self._append(record, lambda view: self._find("epoch", lambda r: r.epoch == epoch))

    def append_commit(
        self,
        *,
        epoch: int,
        generation: int,
        step: int,
        manifest_key: str,
        manifest_sha256: str,
        manifest_bytes: int,
        at_s: float,
        nonce: str = "",
    ) -> LogRecord:
        """Publish a step whose shards and manifest are in the store and verified.

        ManifestError for a record that readers refuse: a step beyond 64 bits, say.
        FencedError if a newer epoch or generation is in the log. CommitConflictError if the step
        is committed with another manifest by this or a newer generation, or was retired. The
        record that is there if exactly this manifest is committed.
        """
        record = LogRecord(
            kind="commit",
            epoch=epoch,
            generation=generation,
            step=step,
            manifest_key=manifest_key,
            manifest_sha256=manifest_sha256,
            manifest_bytes=manifest_bytes,
            at_s=at_s,
            nonce=nonce or _nonce(),
        )
        return self._append(record, lambda view: _admit_commit(record, view))

    def append_retire(
        self, *, epoch: int, generation: int, step: int, at_s: float, nonce: str = ""
    ) -> LogRecord:
        """Declare a committed step's files deleted; call it before deleting the first one.

        FencedError as for a commit. RetentionError if it is the newest commit, which is never
        given up, or no commit at all.
        """
        record = LogRecord(
            kind="retire",
            epoch=epoch,
            generation=generation,
            step=step,
            at_s=at_s,
            nonce=nonce or _nonce(),
        )
        return self._append(record, lambda view: _admit_retire(record, view))

    def _append(self, record: LogRecord, admit: Admit) -> LogRecord:
        with self._lock:
            blind = 0
            for _ in range(APPEND_TRIES):
                view = self._refresh()
                ours = self._find(record.kind, lambda found: found.nonce == record.nonce)
                if ours is not None:
                    return ours
                if view.epoch > record.epoch:
                    raise FencedError(what="epoch", ours=record.epoch, newest=view.epoch)
                present = admit(view)
                if present is not None:
                    return present
                candidate = replace(record, seq=view.next_seq)
                key, data = log_key(candidate.seq), candidate.to_bytes()
                LogRecord.from_bytes(data, key)  # what no reader would take is not written
                try:
                    if self._store.put_if_absent(key, data):
                        self._records[candidate.seq] = candidate
                        return candidate
                except StoreUnavailableError:
                    blind += 1
                    if blind >= BLIND_TRIES:
                        raise
            cause = f"{APPEND_TRIES} slots in a row went to other writers"
            raise StoreUnavailableError(url=self._store.url, key=LOG_PREFIX, cause=cause)

    def _find(self, kind: str, match: Callable[[LogRecord], bool]) -> LogRecord | None:
        found = (r for r in self._records.values() if r.kind == kind and match(r))
        return next(found, None)

    def _refresh(self) -> LogView:
        if not self._listed:
            self._read_listed()
            self._listed = True
        # Then slot by slot, which also works where a listing lags behind.
        while True:
            seq = self._next_seq()
            try:
                data = self._store.get(log_key(seq))
            except ObjectMissingError:
                return fold(self._records.values(), self._refused.items())
            self._remember(seq, data)

    def _read_listed(self) -> None:
        listed = [seq for key in self._store.list(LOG_PREFIX) if (seq := _seq_of(key))]
        try:
            found = get_many(self._store, [log_key(seq) for seq in listed])
        except ObjectMissingError:  # a name without an object: damage, for no slot is ever deleted
            self._read_one_by_one(listed)
            return
        for seq, data in zip(listed, found, strict=True):
            self._remember(seq, data)

    def _read_one_by_one(self, listed: list[int]) -> None:
        for seq in listed:
            try:
                self._remember(seq, self._store.get(log_key(seq)))
            except ObjectMissingError:
                self._refused[seq] = "is listed, but there is no such object"

    def _remember(self, seq: int, data: bytes) -> None:
        # An unreadable slot is passed over, and said: refusing the log would lose every step.
        try:
            record = LogRecord.from_bytes(data, log_key(seq))
            if record.seq != seq:
                raise ManifestError(file=log_key(seq), reason=f"it says slot {record.seq}")
            self._records[seq] = record
        except ManifestError as error:
            self._refused[seq] = str(error.fields["reason"])

    def _next_seq(self) -> int:
        return next_slot(self._records, self._refused)


def _admit_commit(record: LogRecord, view: LogView) -> LogRecord | None:
    for there in (*view.commits, *view.superseded):
        if there.identity == record.identity and _same_manifest(there, record):
            return there
    if record.generation < view.generation:
        raise FencedError(what="generation", ours=record.generation, newest=view.generation)
    for there in view.commits:
        if there.step == record.step and there.generation >= record.generation:
            raise CommitConflictError(step=record.step, key=there.manifest_key)
    for there in view.retired:
        if there.identity == record.identity:
            raise CommitConflictError(step=record.step, key=f"retired in slot {there.seq}")
    return None


def _admit_retire(record: LogRecord, view: LogView) -> LogRecord | None:
    for there in view.retired:
        if there.identity == record.identity:
            return there
    known = [there.identity for there in (*view.commits, *view.superseded)]
    newest = view.newest
    if record.identity not in known or (newest and newest.identity == record.identity):
        known_step = record.identity in known
        reason = "it is the newest commit" if known_step else "the log has no such commit"
        raise RetentionError(step=record.step, reason=reason)
    return None


def _same_manifest(one: LogRecord, other: LogRecord) -> bool:
    return (one.manifest_key, one.manifest_sha256) == (other.manifest_key, other.manifest_sha256)


def _seq_of(key: str) -> int:
    name = key.removeprefix(LOG_PREFIX).removesuffix(".json")
    return int(name) if name.isdecimal() and key == log_key(int(name)) else 0


def _nonce() -> str:
    return secrets.token_hex(16)
