"""The manifest of a step: published last, and without it the step does not exist.

Canonical JSON (sorted keys, no spaces), so that equal manifests are equal bytes on every node and
one sha256 names them:

    v, run_id, epoch, step, generation, world, created_at_s
    tensors   name, dtype, global_shape, pieces [file, rank, offsets, shape, byte_range in file]
    shards    rank, node_id, file, num_bytes, chunk_bytes, checksums, extras_file, extras_bytes,
              extras_checksum
    cursor    position in the data          ids    of config, code and data set

In this version each tensor is one whole piece in exactly one shard; the format already allows
pieces. `from_bytes` accepts nothing that `to_bytes` would not have written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from relit_storage.checkpoint.checksum import num_chunks
from relit_storage.checkpoint.image import MAX_REASON, TensorSpec
from relit_storage.checkpoint.manifest_schema import check_types
from relit_storage.errors import ManifestError
from relit_storage.run.layout import extras_key, shard_key

VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20  # a quarter of a million tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor: its place in the whole tensor, and its bytes [from, to) in a file."""

    file: str
    rank: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    byte_range: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of the whole job, wherever its pieces lie."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A rank's files; names are relative to the root of any tier."""

    rank: int
    node_id: str
    file: str
    num_bytes: int
    chunk_bytes: int
    checksums: tuple[str, ...]
    extras_file: str
    extras_bytes: int
    extras_checksum: str


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

        Raises ManifestError if they are of several steps, or do not cover it exactly.
        """
        found = sorted(shards, key=lambda shard: shard["rank"])
        moments = {(s["step"], s["generation"], s["world"]) for s in found}
        if len(moments) != 1:
            raise ManifestError(file="manifest", reason=f"shards of several steps: {moments}")
        step, generation, world = moments.pop()
        tensors = [_whole_tensor(entry, shard) for shard in found for entry in shard["tensors"]]
        names = [f.name for f in dataclasses.fields(ShardEntry)]
        manifest = cls(
            run_id=run_id,
            epoch=epoch,
            step=step,
            generation=generation,
            world=world,
            tensors=tuple(sorted(tensors, key=lambda tensor: tensor.name)),
            shards=tuple(_shard_entry({name: shard[name] for name in names}) for shard in found),
            cursor=cursor,
            ids=dict(ids),
            created_at_s=created_at_s,
        )
        manifest.check_coverage()
        return manifest

    def to_bytes(self) -> bytes:
        """Canonical JSON. ValueError if the cursor holds NaN or infinity."""
        return _canonical(dataclasses.asdict(self))

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

        That is: the ranks are 0 to world-1; each tensor is one whole piece; in each file the
        pieces follow each other without hole or overlap up to the end of the file.
        """
        ranks = [shard.rank for shard in self.shards]
        if len(ranks) != self.world or ranks != list(range(len(ranks))):
            _refuse(file, f"shards of ranks {ranks} in world {self.world}")
        for shard in self.shards:
            self._check_names(shard, file)
            if len(shard.checksums) != num_chunks(shard.num_bytes, max(1, shard.chunk_bytes)):
                _refuse(file, f"{shard.file} has {len(shard.checksums)} checksums")
        names = [tensor.name for tensor in self.tensors]
        if names != sorted(set(names)):
            _refuse(file, "a tensor appears twice, or tensors are not in order")
        for tensor in self.tensors:
            _check_piece(tensor, file)
        self._check_tiling(file)

    def _check_names(self, shard: ShardEntry, file: str) -> None:
        """Names are derived, never free: a manifest cannot point outside its own step."""
        place = self.step, self.generation, shard.rank
        if (shard.file, shard.extras_file) != (shard_key(*place), extras_key(*place)):
            _refuse(file, f"{shard.file!r} and {shard.extras_file!r} are not names of this step")

    def _check_tiling(self, file: str) -> None:
        pieces: dict[tuple[str, int], list[tuple[int, int]]] = {
            (shard.file, shard.rank): [] for shard in self.shards
        }
        for tensor in self.tensors:
            piece = tensor.pieces[0]
            if (piece.file, piece.rank) not in pieces:
                _refuse(file, f"tensor {tensor.name!r} lies in an unknown shard {piece.file}")
            pieces[piece.file, piece.rank].append(piece.byte_range)
        for shard in self.shards:
            ranges = sorted(pieces[shard.file, shard.rank])
            ends = [*(begin for begin, _ in ranges[1:]), shard.num_bytes]
            if ranges and [end for _, end in ranges] != ends:
                _refuse(file, f"tensors do not tile {shard.file}")


def _check_piece(tensor: TensorEntry, file: str) -> None:
    if len(tensor.pieces) != 1:
        _refuse(file, f"tensor {tensor.name!r} has {len(tensor.pieces)} pieces")
    piece = tensor.pieces[0]
    if piece.shape != tensor.global_shape or piece.offsets != (0,) * len(piece.shape):
        _refuse(file, f"tensor {tensor.name!r} is not covered by its piece")
    begin, end = piece.byte_range
    spec = TensorSpec(tensor.name, tensor.dtype, tensor.global_shape)
    if spec.fault:
        _refuse(file, f"tensor {tensor.name!r} {spec.fault}")
    expected = spec.num_bytes
    if begin < 0 or end - begin != expected:
        _refuse(file, f"tensor {tensor.name!r} takes {end - begin} bytes, its shape {expected}")


def _whole_tensor(entry: Mapping[str, Any], shard: Mapping[str, Any]) -> TensorEntry:
    shape = tuple(entry["shape"])
    begin, end = entry["byte_range"]
    piece = Piece(
        file=shard["file"],
        rank=shard["rank"],
        offsets=(0,) * len(shape),
        shape=shape,
        byte_range=(begin, end),
    )
    return TensorEntry(
        name=entry["name"], dtype=entry["dtype"], global_shape=shape, pieces=(piece,)
    )


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


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def _refuse(file: str, reason: str, cause: Exception | None = None) -> NoReturn:
    raise ManifestError(file=file, reason=reason[:MAX_REASON]) from cause
