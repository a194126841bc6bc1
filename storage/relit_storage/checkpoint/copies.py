"""Where the checkpoints of a run lie: one copy for each committed step and tier.

Read from the run directory (commit log, manifests) and from folders of nodes' disks, without a
cluster. A copy whose manifest is refused is listed too, with the reason: tools name it, nobody
reads from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.checkpoint.log_records import LogRecord, LogView
from relit_storage.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from relit_storage.errors import (
    ManifestError,
    ObjectMissingError,
    StoreError,
    StoreUnavailableError,
)
from relit_storage.run.layout import STEPS_PREFIX, log_key, manifest_key, parse_step_prefix
from relit_storage.stores.bulk import NUM_READERS
from relit_storage.stores.protocol import ObjectStore

_MISSING = "the manifest is missing"

TierName = Literal["disk", "object"]  # nearest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A file that is not what was committed, and why. step is -1 for a slot of the commit log."""

    tier: TierName
    step: int
    generation: int
    file: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    def __str__(self) -> str:
        where = "commit log" if self.step < 0 else f"step {self.step}"
        return f"{self.tier} {where}: {self.file}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCopy:
    """A committed step on one tier. manifest None: it was refused, and problem says why.

    stores hold its files: the run's own view, or one store for each node folder on disk.
    committed_at_s is Unix seconds, by whoever committed it.
    """

    tier: TierName
    step: int
    generation: int
    stores: tuple[ObjectStore, ...] = field(repr=False)
    manifest: Manifest | None
    problem: str = ""
    committed_at_s: float = 0.0

    @property
    def order(self) -> tuple[int, int]:
        """Newer copies compare greater, as in retention."""
        return self.generation, self.step

    @property
    def num_bytes(self) -> int:
        """Size of its shards and extras by the manifest; 0 without one."""
        shards = self.manifest.shards if self.manifest else ()
        return sum(shard.num_bytes + shard.extras_bytes for shard in shards)

    def find(self, key: str) -> tuple[ObjectStore, int] | None:
        """The store that has an object of this copy, and its size; None if none has. StoreError."""
        for store in self.stores:
            size = store.size(key)
            if size is not None:
                return store, size
        return None

    def refusal(self, file: str, reason: str) -> Refusal:
        """One file of this copy, refused."""
        return Refusal(
            tier=self.tier, step=self.step, generation=self.generation, file=file, reason=reason
        )


@dataclass(frozen=True, slots=True)
class Inventory:
    """Copies, newest first and of one step the nearest first; and unreadable slots of the log."""

    copies: tuple[StepCopy, ...]
    log_refusals: tuple[Refusal, ...] = ()


def take_inventory(
    run: ObjectStore, disks: Sequence[ObjectStore] = (), *, step: int | None = None
) -> Inventory:
    """Everything committed of a run, or of one step; `run` is its directory, `disks` node folders.

    Blocks; reads the commit log, and each manifest once. StoreError if a tier cannot be read.
    """
    view = CommitLog(run).replay()
    records = [record for record in view.commits if step in (None, record.step)]
    with ThreadPoolExecutor(NUM_READERS, "relit-manifest") as pool:
        copies = list(pool.map(lambda record: _object_copy(run, record), records))
    copies += _disk_copies(disks, step)
    copies.sort(key=lambda copy: (*copy.order, copy.tier == "disk"), reverse=True)
    return Inventory(tuple(copies), _log_refusals(view))


def refused_slots(run: ObjectStore) -> tuple[Refusal, ...]:
    """Slots of the commit log that cannot be read. Blocks; StoreError."""
    return _log_refusals(CommitLog(run).replay())


def _log_refusals(view: LogView) -> tuple[Refusal, ...]:
    return tuple(
        Refusal(tier="object", step=-1, generation=-1, file=log_key(seq), reason=reason)
        for seq, reason in view.refused
    )


def _object_copy(run: ObjectStore, record: LogRecord) -> StepCopy:
    raw, problem = _read_manifest(run, record.manifest_key, record.manifest_bytes)
    manifest = None
    if raw is not None and hashlib.sha256(raw).hexdigest() != record.manifest_sha256:
        problem = "the manifest is not the one that was committed"
    elif raw is not None:
        manifest, problem = _parsed(raw, record.step, record.generation)
    return StepCopy(
        tier="object",
        step=record.step,
        generation=record.generation,
        stores=(run,),
        manifest=manifest,
        problem=problem,
        committed_at_s=record.at_s,
    )


def _disk_copies(disks: Sequence[ObjectStore], step: int | None) -> Iterable[StepCopy]:
    """One for each manifest: every node has the same bytes, and shards of its own."""
    found: dict[tuple[int, int], dict[bytes | None, str]] = {}
    for disk in disks:
        for place in _places(disk):
            if step not in (None, place[0]):
                continue
            raw, problem = _read_manifest(disk, manifest_key(*place), None)
            if raw is not None or problem != _MISSING:  # without one the step does not exist
                found.setdefault(place, {})[raw] = problem
    for place, raws in found.items():
        for raw, problem in raws.items():
            manifest = None
            if raw is not None:
                manifest, problem = _parsed(raw, *place)
            yield StepCopy(
                tier="disk",
                step=place[0],
                generation=place[1],
                stores=tuple(disks),
                manifest=manifest,
                problem=problem,
                committed_at_s=manifest.created_at_s if manifest else 0.0,
            )


def _read_manifest(store: ObjectStore, key: str, num_bytes: int | None) -> tuple[bytes | None, str]:
    """The bytes, or None and why not; num_bytes is what it must have, if that is known."""
    try:
        size = store.size(key)
        if size is None:
            return None, _MISSING
        if num_bytes is not None and size != num_bytes:
            return None, f"the manifest has {size} bytes, {num_bytes} were committed"
        if size > MAX_MANIFEST_BYTES:
            return None, f"the manifest has {size} bytes, {MAX_MANIFEST_BYTES} is the limit"
        return store.get(key), ""
    except StoreUnavailableError:
        raise
    except ObjectMissingError:
        return None, _MISSING
    except StoreError as error:  # about this object alone: the other steps may be whole
        return None, str(error.fields.get("cause", error))


def _places(disk: ObjectStore) -> set[tuple[int, int]]:
    keys = (parse_step_prefix(key) for key in disk.list(STEPS_PREFIX))
    return {place for place in keys if place is not None}


def _parsed(raw: bytes, step: int, generation: int) -> tuple[Manifest | None, str]:
    key = manifest_key(step, generation)
    try:
        manifest = Manifest.from_bytes(raw, key)
    except ManifestError as error:
        return None, str(error.fields["reason"])
    if (manifest.step, manifest.generation) != (step, generation):
        return None, f"is of step {manifest.step}, generation {manifest.generation}"
    return manifest, ""
