"""Reading a committed step piece by piece, each byte checked before it is handed out.

The chunk is the unit of reads and of checksums, so a reader holds one chunk, whatever the size of
the checkpoint. Tensors come out whole, however many ranks saved them, in one of two ways:

    stream    the bytes of many tensors file by file, each chunk read once, one chunk in memory;
              they come in the order of the files, each with its place in its tensor
    read      one tensor in memory: it, its largest piece, and a chunk of each file it lies in
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NoReturn

from relit_storage.checkpoint.checksum import checksum
from relit_storage.checkpoint.copies import StepCopy
from relit_storage.checkpoint.image import ITEM_BYTES
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.checkpoint.manifest_entries import Piece, ShardEntry, TensorEntry
from relit_storage.checkpoint.pieces import Box, paste, spans
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

KEPT_BYTES = 256 << 20  # of chunks, one of each file: neighbours of a piece are read next


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
        self.shards: Mapping[str, ShardEntry] = {s.file: s for s in self.manifest.shards}
        self._stores: dict[str, ObjectStore] = {}
        self._kept: dict[str, tuple[int, memoryview]] = {}  # a chunk of each file, oldest first

    @cached_property
    def pieces(self) -> Mapping[str, list[tuple[TensorEntry, Piece]]]:
        """What lies in each file, by its name, in the order of the bytes."""
        found: dict[str, list[tuple[TensorEntry, Piece]]] = {file: [] for file in self.shards}
        for tensor in self.manifest.tensors:
            for piece in tensor.pieces:
                found[piece.file].append((tensor, piece))
        for lying in found.values():
            lying.sort(key=lambda both: both[1].byte_range)
        return found

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
        """One chunk of a shard, read and checked."""
        ref = ref_of(shard)
        begin, end = ref.chunk_range(index)
        store = self.store_of(shard.file, shard.num_bytes)
        with refusing(shard.file):
            raw = store.get_range(shard.file, begin, end - begin)
        check_chunk(shard.file, ref, index, raw)
        return memoryview(raw)

    def stream(
        self, tensors: Iterable[TensorEntry]
    ) -> Iterator[tuple[TensorEntry, int, memoryview]]:
        """All bytes of some tensors as (tensor, offset in the dense whole tensor, bytes), in the
        order of the files: each chunk is read once. Bytes are valid until the next.
        """
        wanted = {tensor.name for tensor in tensors}
        for file in self.shards:
            self._kept.clear()
            for tensor, piece in self.pieces[file]:
                if tensor.name in wanted:
                    for offset, block in self._blocks(tensor, piece):
                        yield tensor, offset, block

    def read(self, tensor: TensorEntry) -> bytearray:
        """A whole tensor in memory."""
        item = ITEM_BYTES[tensor.dtype]
        whole = Box.whole(tensor.global_shape)
        dense = bytearray(whole.volume * item)
        for piece in tensor.pieces:
            begin, end = piece.byte_range
            part = dense if piece.box == whole else bytearray(end - begin)
            done = 0
            for block in self._run(piece.file, begin, end - begin):
                part[done : done + len(block)] = block
                done += len(block)
            if part is not dense:
                paste(part, piece.box, dense, whole, item)
        return dense

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

    def _blocks(self, tensor: TensorEntry, piece: Piece) -> Iterator[tuple[int, memoryview]]:
        whole, item = Box.whole(tensor.global_shape), ITEM_BYTES[tensor.dtype]
        begin = piece.byte_range[0]
        for source, target, count in spans(piece.box, whole, item):
            for block in self._run(piece.file, begin + source, count):
                yield target, block
                target += len(block)

    def _run(self, file: str, begin: int, count: int) -> Iterator[memoryview]:
        """`count` bytes of a file from `begin` on, as they are cut by its chunks."""
        shard = self.shards[file]
        if count and shard.chunk_bytes < 1:
            _refuse(file, "its chunks have no size")
        while count:
            index, inside = divmod(begin, shard.chunk_bytes)
            block = self._kept_chunk(shard, index)[inside : inside + count]
            yield block
            begin, count = begin + len(block), count - len(block)

    def _kept_chunk(self, shard: ShardEntry, index: int) -> memoryview:
        """The chunk of a file that was read last need not be read again."""
        found = self._kept.pop(shard.file, None)
        if found is None or found[0] != index:
            self._make_room(shard.chunk_bytes)
            found = (index, self.chunk(shard, index))
        self._kept[shard.file] = found  # the newest of all
        return found[1]

    def _make_room(self, num_bytes: int) -> None:
        held = sum(len(chunk) for _, chunk in self._kept.values())
        while self._kept and held + num_bytes > KEPT_BYTES:
            oldest = next(iter(self._kept))
            held -= len(self._kept.pop(oldest)[1])


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


def in_file_order(tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
    """The order in which `read` of one after the other reads every chunk once, if a chunk of each
    file may be kept; of tensors in many pieces, if all ranks have them in the same order.
    """
    return sorted(tensors, key=lambda t: (t.pieces[0].file, t.pieces[0].byte_range))


def ref_of(shard: ShardEntry) -> ShardRef:
    """What the bytes of a shard must be."""
    return ShardRef(
        num_bytes=shard.num_bytes, chunk_bytes=shard.chunk_bytes, checksums=shard.checksums
    )


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
