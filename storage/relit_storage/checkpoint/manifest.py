"""The manifest of a step: published last, and without it the step does not exist.

Canonical JSON (sorted keys, no spaces), so that equal manifests are equal bytes on every node and
one sha256 names them:

    v, run_id, epoch, step, generation, world, created_at_s
    tensors   name, dtype, global_shape, pieces [file, rank, offsets, shape, byte_range in file]
    shards    rank, node_id, file, num_bytes, chunk_bytes, checksums, extras_file, extras_bytes,
              extras_checksum
    cursor    position in the data          ids    of config, code and data set

A tensor that every rank has is one piece, saved by one of them; a sharded one is a piece of each
rank that has some of it. `from_bytes` accepts nothing that `to_bytes` would not have written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from relit_storage.checkpoint.coverage import shards_fault, tensors_fault
from relit_storage.checkpoint.image import MAX_REASON
from relit_storage.checkpoint.manifest_entries import Piece, ShardEntry, TensorEntry
from relit_storage.checkpoint.manifest_schema import MAX_NUMBER, check_types
from relit_storage.errors import ManifestError

VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20  # a quarter of a million pieces
_Found = tuple[Mapping[str, Any], Piece]  # a tensor as an agent acknowledged it, and where it lies


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything needed to read one step at any world size."""

    run_id: str
    epoch: int
    step: int
    generation: int
    world: int
    tensors: tuple[TensorEntry, ...]
    shards: tuple[ShardEntry, ...]
    cursor: Any
    ids: Mapping[str, str]
    created_at_s: float
    v: int = field(default=VERSION)

    @classmethod
    def from_shards(
        cls,
        shards: Iterable[Mapping[str, Any]],
        *,
        run_id: str,
        epoch: int,
        cursor: Any,
        ids: Mapping[str, str],
        created_at_s: float,
    ) -> Manifest:
        """The manifest of a step from what its agents acknowledged: facts.ShardPersisted as maps.

        Raises ManifestError if they are of several steps, do not cover it exactly, or make a
        manifest that no reader would take: a commit that cannot be read back is worse than none.
        """
        found = sorted(shards, key=lambda shard: shard["rank"])
        moments = {(s["step"], s["generation"], s["world"]) for s in found}
        if len(moments) != 1:
            raise ManifestError(file="manifest", reason=f"shards of several steps: {moments}")
        step, generation, world = moments.pop()
        names = [f.name for f in dataclasses.fields(ShardEntry)]
        manifest = cls(
            run_id=run_id,
            epoch=epoch,
            step=step,
            generation=generation,
            world=world,
            tensors=_collected(found),
            shards=tuple(_shard_entry({name: shard[name] for name in names}) for shard in found),
            cursor=cursor,
            ids=dict(ids),
            created_at_s=created_at_s,
        )
        manifest.check_coverage()
        if max(step, generation, epoch) > MAX_NUMBER:
            _refuse("manifest", f"step {step} of generation {generation} is beyond 64 bits")
        size = len(manifest.to_bytes())
        if size > MAX_MANIFEST_BYTES:
            _refuse("manifest", f"has {size} bytes, {MAX_MANIFEST_BYTES} is the limit")
        return manifest

    def to_bytes(self) -> bytes:
        """Canonical JSON. ValueError if the cursor holds NaN or infinity."""
        text = json.dumps(
            self, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_fields_of
        )
        return text.encode()

    @property
    def sha256(self) -> str:
        """Hex digest of `to_bytes()`."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes, file: str = "manifest") -> Manifest:
        """Parse and check everything. Raises ManifestError naming `file` and the reason."""
        if len(data) > MAX_MANIFEST_BYTES:
            _refuse(file, f"has {len(data)} bytes, {MAX_MANIFEST_BYTES} is the limit")
        try:
            loaded = json.loads(data.decode())
            check_types(loaded)
            manifest = _manifest(loaded)
            same = manifest.to_bytes() == data
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            _refuse(file, f"does not parse: {error}", error)
        if not same:
            raise ManifestError(file=file, reason="is not in canonical form")
        manifest.check_coverage(file)
        return manifest

    def shard(self, rank: int) -> ShardEntry:
        """The files of a rank. KeyError if there is none."""
        for shard in self.shards:
            if shard.rank == rank:
                return shard
        raise KeyError(rank)

    def check_coverage(self, file: str = "manifest") -> None:
        """Raise ManifestError unless every byte of every tensor is there exactly once.

        That is: the ranks are 0 to world-1; the pieces of each tensor tile it, disjoint boxes
        without a hole; in each file the pieces follow each other up to the end of the file.
        """
        fault = shards_fault(self.step, self.generation, self.world, self.shards)
        fault = fault or tensors_fault(self.tensors, self.shards)
        if fault:
            _refuse(file, fault)


def _collected(shards: Sequence[Mapping[str, Any]]) -> tuple[TensorEntry, ...]:
    """The tensors of shards that are in order of rank: the pieces of equal names are one's."""
    found: dict[str, list[_Found]] = {}
    for shard in shards:
        for entry in shard["tensors"]:
            found.setdefault(entry["name"], []).append((entry, _piece(entry, shard)))
    return tuple(_tensor(name, found[name]) for name in sorted(found))


def _tensor(name: str, found: Sequence[_Found]) -> TensorEntry:
    kinds = {(entry["dtype"], _global_shape(entry)) for entry, _ in found}
    if len(kinds) != 1:
        raise ManifestError(file="manifest", reason=f"tensor {name!r} is of several kinds: {kinds}")
    dtype, shape = kinds.pop()
    pieces = tuple(piece for _, piece in found)
    return TensorEntry(name=name, dtype=dtype, global_shape=shape, pieces=pieces)


def _piece(entry: Mapping[str, Any], shard: Mapping[str, Any]) -> Piece:
    begin, end = entry["byte_range"]
    shape = tuple(entry["shape"])
    return Piece(
        file=shard["file"],
        rank=shard["rank"],
        offsets=tuple(entry.get("offsets", (0,) * len(shape))),
        shape=shape,
        byte_range=(begin, end),
    )


def _global_shape(entry: Mapping[str, Any]) -> tuple[int, ...]:
    """A whole tensor's entry has neither its global shape nor offsets."""
    if ("global_shape" in entry) != ("offsets" in entry):
        reason = f"tensor {entry['name']!r} has one of global shape and offsets without the other"
        raise ManifestError(file="manifest", reason=reason)
    return tuple(entry.get("global_shape", entry["shape"]))


def _manifest(data: dict[str, Any]) -> Manifest:
    if data["v"] != VERSION:
        raise ValueError(f"version {data['v']}; this release reads {VERSION}")
    data = dict(data)
    data["tensors"] = tuple(_tensor_entry(entry) for entry in data["tensors"])
    data["shards"] = tuple(_shard_entry(entry) for entry in data["shards"])
    return Manifest(**data)


def _tensor_entry(data: dict[str, Any]) -> TensorEntry:
    pieces = tuple(Piece(**_tuples(piece)) for piece in data["pieces"])
    return TensorEntry(**{**_tuples(data), "pieces": pieces})


def _shard_entry(data: dict[str, Any]) -> ShardEntry:
    return ShardEntry(**_tuples(data))


def _tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}


_FIELDS: Mapping[type, tuple[str, ...]] = {
    kind: tuple(f.name for f in dataclasses.fields(kind))
    for kind in (Manifest, TensorEntry, Piece, ShardEntry)
}


def _fields_of(value: Any) -> dict[str, Any]:
    """For the JSON encoder: `dataclasses.asdict` would copy every number first."""
    names = _FIELDS.get(type(value))
    if names is None:
        raise TypeError(f"{type(value).__name__} is not JSON")
    return {name: getattr(value, name) for name in names}


def _refuse(file: str, reason: str, cause: Exception | None = None) -> NoReturn:
    raise ManifestError(file=file, reason=reason[:MAX_REASON]) from cause
