"""One saved shard on any tier, read range by range to where its bytes belong.

Whatever is handed on is what was saved: in the slot nothing changed since the shard was opened,
on disk and in the object tier every chunk was compared with its checksum. So a rank that needs a
tenth of a shard reads and checks a tenth of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, Protocol

from relit_platform.facts import RestorePlan, ShardSource, Tier
from relit_platform.node.slots import Slot
from relit_platform.worker.scatter import Scatter
from relit_storage.checkpoint.checksum import num_chunks
from relit_storage.checkpoint.chunk_reading import Take, each, read_chunks, readers_for
from relit_storage.checkpoint.durable import read_file
from relit_storage.checkpoint.image import MAX_REASON
from relit_storage.checkpoint.shard import ShardRef, check_chunk
from relit_storage.errors import CorruptShardError
from relit_storage.stores.protocol import ObjectStore

SLOT_TIERS: tuple[Tier, ...] = ("memory", "peer")
BLOCK_BYTES = 16 << 20  # of a slot that are copied at a time


class SavedShard(Protocol):
    """Every method may block for its tier, and raises CorruptShardError, OSError or StoreError."""

    num_bytes: int

    def head(self, num_bytes: int) -> bytes:
        """The beginning of the image: at least so many of its bytes, all if it has fewer."""
        ...

    def read(self, scatter: Scatter) -> None:
        """Put what is wanted of the image into its places. They hold garbage after an error."""
        ...

    def extras(self) -> bytes:
        """The JSON beside the image; outside of slots its checksum is for the caller."""
        ...

    def close(self) -> None:
        """Let go of what is open."""
        ...


def open_shard(
    plan: RestorePlan, source: ShardSource, store: ObjectStore | None, shared: bool
) -> SavedShard:
    """The shard that a plan names; store is needed for the object tier only. shared: other ranks
    of this node read it, too.

    Raises CorruptShardError for a slot that no longer holds the planned step, OSError if it is
    gone, ValueError without the store that is needed.
    """
    if source.tier in SLOT_TIERS or not source.extras_location:
        return _SlotShard(plan, source)  # whatever the tier: an agent has fetched it into a slot
    ref, path = _ref(source), source.location
    if source.tier == "disk":
        return _ChunkedShard(
            ref,
            path,
            lambda chunks, take: read_chunks(path, ref, chunks, take, shared=shared),
            lambda: read_file(source.extras_location, source.extras_bytes),
        )
    if store is None:
        raise ValueError("a plan of the object tier needs the run's store")
    return _ChunkedShard(
        ref,
        path,
        lambda chunks, take: _read_object(store, path, ref, chunks, take),
        # One byte more than there should be, so that a longer object is not taken for the right
        # one.
        lambda: store.get_range(source.extras_location, 0, source.extras_bytes + 1),
    )


class _SlotShard:
    """A slot of shared memory, at the moment it was opened.

    One that came from another node has checksums, and what is read of it is compared with them.
    """

    def __init__(self, plan: RestorePlan, source: ShardSource) -> None:
        self._slot = Slot.open(source.location)
        self._ref = _ref(source)
        self._sequence = self._slot.sequence()
        try:
            info = self._slot.info()
            found = (info.step, info.generation, info.rank, info.world)
            if not info.complete or found != (plan.step, plan.generation, source.rank, plan.world):
                held = f"slot holds step {info.step} of generation {info.generation}"
                _refuse(source.location, held)
            if source.checksums and info.image_bytes != source.num_bytes:
                _refuse(source.location, f"{info.image_bytes} bytes, not {source.num_bytes}")
        except CorruptShardError:
            self._slot.close()
            raise
        self.num_bytes = info.image_bytes

    def head(self, num_bytes: int) -> bytes:
        raw = bytes(self._slot.image[:num_bytes])
        if self._ref.checksums:
            for index in _chunks_in(self._ref, [(0, len(raw))]):
                self._check(index)
        self._slot.check_unchanged(self._sequence)
        return raw

    def read(self, scatter: Scatter) -> None:
        wanted = list(scatter.ranges())
        if self._ref.checksums:

            def one(index: int) -> None:
                begin, end = self._ref.chunk_range(index)
                self._slot.prepare(begin, end)
                self._check(index)
                scatter.take(begin, self._slot.image[begin:end])

            each(one, _chunks_in(self._ref, wanted))
        else:

            def block(begin: int) -> None:
                for first, last in wanted:
                    low, high = max(first, begin), min(last, begin + BLOCK_BYTES)
                    if low < high:
                        self._slot.prepare(low, high)
                        scatter.take(low, self._slot.image[low:high])

            each(block, range(0, self.num_bytes, BLOCK_BYTES))
        self._slot.check_unchanged(self._sequence)

    def extras(self) -> bytes:
        raw = self._slot.read_extras()
        self._slot.check_unchanged(self._sequence)  # image and extras are of one snapshot
        return raw

    def close(self) -> None:
        self._slot.close()

    def _check(self, index: int) -> None:
        begin, end = self._ref.chunk_range(index)
        check_chunk(self._slot.path, self._ref, index, self._slot.image[begin:end])


class _ChunkedShard:
    """A file or an object, whose checked chunks `read` hands on."""

    def __init__(
        self,
        ref: ShardRef,
        file: str,
        read: Callable[[Sequence[int], Take], None],
        read_extras: Callable[[], bytes],
    ) -> None:
        self.num_bytes = ref.num_bytes
        self.extras = read_extras
        self._ref = ref
        self._read = read
        self._head: dict[int, bytes] = {}  # chunks that were read for the header, by number
        if ref.num_bytes and ref.chunk_bytes < 1:
            _refuse(file, "its chunks have no size")

    def head(self, num_bytes: int) -> bytes:
        wanted = _chunks_in(self._ref, [(0, min(num_bytes, self.num_bytes))])
        missing = [index for index in wanted if index not in self._head]
        if missing or not wanted:  # even an empty file is looked at

            def keep(begin: int, data: memoryview) -> None:
                self._head[begin // self._ref.chunk_bytes] = bytes(data)

            self._read(missing, keep)
        return b"".join(self._head[index] for index in wanted)

    def read(self, scatter: Scatter) -> None:
        wanted = _chunks_in(self._ref, scatter.ranges())
        for index in wanted:
            if index in self._head:
                scatter.take(self._ref.chunk_range(index)[0], memoryview(self._head[index]))
        missing = [index for index in wanted if index not in self._head]
        if missing:
            self._read(missing, scatter.take)

    def close(self) -> None:
        self._head.clear()  # nothing else is kept open between two reads


def _chunks_in(ref: ShardRef, ranges: Iterable[tuple[int, int]]) -> list[int]:
    """The numbers of the chunks that ranges of bytes lie in, ascending."""
    size = max(1, ref.chunk_bytes)
    found = (range(begin // size, -(-end // size)) for begin, end in ranges)
    return sorted({index for chunks in found for index in chunks})


def _read_object(
    store: ObjectStore, key: str, ref: ShardRef, chunks: Sequence[int], take: Take
) -> None:
    found = store.size(key)
    chunk_bytes = max(1, ref.chunk_bytes)
    if found != ref.num_bytes or len(ref.checksums) != num_chunks(ref.num_bytes, chunk_bytes):
        _refuse(key, "is missing" if found is None else f"{found} bytes, not {ref.num_bytes}")

    def read(index: int) -> None:
        begin, end = ref.chunk_range(index)
        chunk = store.get_range(key, begin, end - begin)
        check_chunk(key, ref, index, chunk)
        take(begin, memoryview(chunk))

    each(read, chunks, readers_for(ref.chunk_bytes))


def _ref(source: ShardSource) -> ShardRef:
    return ShardRef(
        num_bytes=source.num_bytes, chunk_bytes=source.chunk_bytes, checksums=source.checksums
    )


def _refuse(file: str, reason: str) -> NoReturn:
    raise CorruptShardError(file=file, reason=reason[:MAX_REASON])
