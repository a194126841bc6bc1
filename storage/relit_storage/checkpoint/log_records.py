"""The records of the commit log and what they add up to: pure, no store, no clock.

epoch    a supervisor life begins: whoever holds a lower number may not append any more
commit   a step's manifest is published in the object tier: from here on it exists
retire   the files of a committed step are about to be deleted

Each record carries the checksum of its other fields: a flipped digit must not make another epoch,
which would shut out the run's own supervisor for ever. Records of before there was one have none.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from relit_storage.checkpoint.checksum import checksum
from relit_storage.checkpoint.image import MAX_REASON
from relit_storage.checkpoint.manifest import MAX_MANIFEST_BYTES
from relit_storage.checkpoint.manifest_schema import MAX_NUMBER
from relit_storage.errors import ManifestError
from relit_storage.run.layout import manifest_key

Kind = Literal["epoch", "commit", "retire"]
VERSION = 1
_INTS = ("seq", "epoch", "generation", "step", "manifest_bytes")
_TEXTS = ("manifest_key", "manifest_sha256", "nonce", "holder")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One slot. nonce names the append that wrote it; at_s is Unix seconds by the writer's clock.

    step and the manifest fields mean something in commit and retire records only.
    """

    kind: Kind
    epoch: int
    nonce: str
    at_s: float
    seq: int = 0
    generation: int = 0
    step: int = 0
    manifest_key: str = ""
    manifest_sha256: str = ""
    manifest_bytes: int = 0
    holder: str = ""
    v: int = VERSION

    @property
    def identity(self) -> tuple[int, int]:
        """(step, generation): what a commit and its retirement are about."""
        return (self.step, self.generation)

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        fields = asdict(self)
        return _canonical({**fields, "check": checksum(_canonical(fields))})

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> LogRecord:
        """Strict reading; ManifestError that names `key`."""
        try:
            fields: dict[str, Any] = json.loads(data)
            check = fields.pop("check", None)
            record = cls(**fields)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            reason = f"not a log record: {error}"[:MAX_REASON]
            raise ManifestError(file=key, reason=reason) from error
        for reason in _faults(record):
            raise ManifestError(file=key, reason=reason[:MAX_REASON])
        if check is not None and check != checksum(_canonical(asdict(record))):
            raise ManifestError(file=key, reason="fails its checksum")
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """What the log says as a whole.

    epoch and generation are the highest of all records. commits are the steps that exist, the
    newest record first, one per step. superseded are commits that a later generation committed
    again, still not retired: their files may be deleted after a retirement. refused lists slots
    that could not be read as (seq, reason).
    """

    epoch: int = 0
    generation: int = 0
    commits: tuple[LogRecord, ...] = ()
    superseded: tuple[LogRecord, ...] = ()
    retired: tuple[LogRecord, ...] = ()
    refused: tuple[tuple[int, str], ...] = ()
    next_seq: int = 1

    @property
    def newest(self) -> LogRecord | None:
        """The newest commit, or None."""
        return self.commits[0] if self.commits else None


def fold(records: Iterable[LogRecord], refused: Iterable[tuple[int, str]] = ()) -> LogView:
    """The view of all slots read so far; `records` may come in any order."""
    ordered = sorted(records, key=lambda record: record.seq)
    bad = tuple(sorted(refused))
    commits = [record for record in ordered if record.kind == "commit"]
    retired = {record.identity: record for record in ordered if record.kind == "retire"}
    # The last commit of a step speaks for it, retired or not: an older one never comes back.
    last = {record.step: record for record in commits}
    left = [record for record in commits if record.identity not in retired]
    in_force = [record for record in left if last[record.step] is record]
    identities = {record.identity for record in in_force}
    return LogView(
        epoch=max((record.epoch for record in ordered), default=0),
        generation=max((record.generation for record in commits), default=0),
        commits=tuple(reversed(in_force)),
        superseded=tuple(record for record in left if record.identity not in identities),
        retired=tuple(retired.values()),
        refused=bad,
        next_seq=next_slot([record.seq for record in ordered], [seq for seq, _ in bad]),
    )


def next_slot(seqs: Collection[int], refused: Collection[int]) -> int:
    """The slot to read or write next: behind the last record, and not one that was refused.

    A refused slot far behind the last record is a stray file: going on behind it would leave a
    hole, at which a writer that has not seen the file would go on.
    """
    slot = max(seqs, default=0) + 1
    while slot in refused:
        slot += 1
    return slot


def _faults(record: LogRecord) -> Iterable[str]:
    if record.v != VERSION:
        yield f"version {record.v!r} is not {VERSION}"
    if record.kind not in get_args(Kind):
        yield f"unknown kind {record.kind!r}"
    for name in _INTS:
        value = getattr(record, name)
        if type(value) is not int or not 0 <= value <= MAX_NUMBER:
            yield f"{name} is {value!r}, not a count"
    for name in _TEXTS:
        if not isinstance(getattr(record, name), str):
            yield f"{name} is not text"
    if type(record.at_s) not in (int, float) or not abs(record.at_s) <= MAX_NUMBER:
        yield "at_s is not a number"
    if record.kind == "commit":
        yield from _commit_faults(record)


def _commit_faults(record: LogRecord) -> Iterable[str]:
    """A commit cannot point outside its own step, nor at more than a reader would read."""
    if record.manifest_key != manifest_key(*record.identity):
        yield f"{record.manifest_key!r} is not the manifest of step {record.step}"
    if record.manifest_bytes > MAX_MANIFEST_BYTES:
        yield f"a manifest of {record.manifest_bytes} bytes"


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
