"""Reading a committed step piece by piece, each byte checked before it is handed out.

The chunk is the unit of reads and of checksums, so a reader holds one chunk, whatever the size of
the checkpoint; whoever walks the tensors in file order (`in_file_order`) reads each chunk once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from relit_storage.checkpoint.checksum import checksum
from relit_storage.checkpoint.copies import StepCopy
from relit_storage.checkpoint.image import ITEM_BYTES
from relit_storage.checkpoint.manifest import Manifest, Piece, ShardEntry, TensorEntry
from relit_storage.checkpoint.shard import ShardRef, check_chunk
from relit_storage.errors import (
    CorruptShardError,
    ManifestError,
    ObjectMissingError,
    StoreError,
    StoreUnavailableError,
)
from relit_storage.run.layout import manifest_key
from relit_storage.stores.protocol import ObjectStore


class CopyReader:
    """Reads one copy. Not thread-safe; every method blocks for the store.

    CorruptShardError names the first file that is not what was committed; ManifestError if the
    copy has no manifest; StoreUnavailableError says nothing about the checkpoint.
    """

    def __init__(self, copy: StepCopy) -> None:
        if copy.manifest is None:
            key = manifest_key(copy.step, copy.generation)
            raise ManifestError(file=key, reason=copy.problem)
        self.copy = copy
        self.manifest: Manifest = copy.manifest
        self._shards = {shard.file: shard for shard in self.manifest.shards}
        self._stores: dict[str, ObjectStore] = {}
        self._chunk: tuple[str, int, memoryview] = ("", -1, memoryview(b""))

    def extras(self, rank: int) -> dict[str, Any]:
        """A rank's JSON: position, ids, and the structure of the state."""
        shard = self.manifest.shard(rank)
        store = self.store_of(shard.extras_file, shard.extras_bytes)
        with refusing(shard.extras_file):
            raw = store.get_range(shard.extras_file, 0, shard.extras_bytes)
        if checksum(raw) != shard.extras_checksum:
            _refuse(shard.extras_file, "extras fail their checksum")
        return _parsed_extras(raw, shard.extras_file, self.manifest.step)

    def chunk(self, shard: ShardEntry, index: int) -> memoryview:
        """One chunk of a shard, checked. The one read last is kept."""
        if self._chunk[:2] == (shard.file, index):
            return self._chunk[2]
        ref = ref_of(shard)
        begin, end = ref.chunk_range(index)
        store = self.store_of(shard.file, shard.num_bytes)
        with refusing(shard.file):
            raw = store.get_range(shard.file, begin, end - begin)
        check_chunk(shard.file, ref, index, raw)
        self._chunk = (shard.file, index, memoryview(raw))
        return self._chunk[2]

    def blocks(self, tensor: TensorEntry) -> Iterator[tuple[int, memoryview]]:
        """A tensor's bytes as (offset in the dense whole tensor, bytes); valid until the next."""
        for piece in tensor.pieces:
            for source, target, count in runs_of(tensor, piece):
                yield from self._run(piece.file, source, target, count)

    def read(self, tensor: TensorEntry) -> bytearray:
        """A whole tensor in memory."""
        size = math.prod(tensor.global_shape) * ITEM_BYTES[tensor.dtype]
        whole = bytearray(size)
        for offset, block in self.blocks(tensor):
            whole[offset : offset + len(block)] = block
        return whole

    def _run(
        self, file: str, source: int, target: int, count: int
    ) -> Iterator[tuple[int, memoryview]]:
        shard = self._shards[file]
        if count and shard.chunk_bytes < 1:
            _refuse(file, "its chunks have no size")
        while count:
            index, inside = divmod(source, shard.chunk_bytes)
            block = self.chunk(shard, index)[inside : inside + count]
            yield target, block
            source, target, count = source + len(block), target + len(block), count - len(block)

    def store_of(self, file: str, num_bytes: int) -> ObjectStore:
        """The store that has a file of this copy, after its size was looked at."""
        if file not in self._stores:
            with refusing(file):
                found = self.copy.find(file)
            if found is None:
                _refuse(file, "is missing")
            if found[1] != num_bytes:
                _refuse(file, f"{found[1]} bytes, expected {num_bytes}")
            self._stores[file] = found[0]
        return self._stores[file]


@contextlib.contextmanager
def refusing(file: str) -> Iterator[None]:
    """A store's failure about one object becomes a refusal of that file. A store that is not
    available says nothing about the file: StoreUnavailableError goes through.
    """
    try:
        yield
    except StoreUnavailableError:
        raise
    except ObjectMissingError:
        _refuse(file, "is missing")
    except StoreError as error:
        _refuse(file, str(error.fields.get("cause", error)))


def in_file_order(tensors: Sequence[TensorEntry]) -> list[TensorEntry]:
    """The order in which every chunk is read once."""
    return sorted(tensors, key=lambda t: (t.pieces[0].file, t.pieces[0].byte_range))


def ref_of(shard: ShardEntry) -> ShardRef:
    """What the bytes of a shard must be."""
    return ShardRef(
        num_bytes=shard.num_bytes, chunk_bytes=shard.chunk_bytes, checksums=shard.checksums
    )


def runs_of(tensor: TensorEntry, piece: Piece) -> Iterator[tuple[int, int, int]]:
    """A piece as runs without a gap: (offset in its file, in the dense whole tensor, bytes).

    One run for a piece that covers all dimensions but the first.
    """
    item = ITEM_BYTES[tensor.dtype]
    whole, box = tensor.global_shape, piece.shape
    split = len(box)  # dimensions from here on are whole
    while split and box[split - 1] == whole[split - 1]:
        split -= 1
    inner = max(0, split - 1)  # a run spans this dimension's part and all behind it
    count = math.prod(box[inner:]) * item
    if not count:
        return
    strides = [math.prod(whole[d + 1 :]) * item for d in range(len(whole))]
    base = sum(begin * stride for begin, stride in zip(piece.offsets, strides, strict=True))
    source = piece.byte_range[0]
    for place in itertools.product(*(range(size) for size in box[:inner])):
        target = base + sum(at * stride for at, stride in zip(place, strides, strict=False))
        yield source, target, count
        source += count


def _parsed_extras(raw: bytes, file: str, step: int) -> dict[str, Any]:
    try:
        extras = json.loads(raw)
    except (ValueError, RecursionError) as error:
        _refuse(file, f"extras do not parse: {error}")
    if not isinstance(extras, dict):
        _refuse(file, "extras are not a JSON object")
    if extras.get("step", step) != step:
        _refuse(file, f"extras are of step {extras['step']}")
    return extras


def _refuse(file: str, reason: str) -> NoReturn:
    raise CorruptShardError(file=file, reason=reason)
