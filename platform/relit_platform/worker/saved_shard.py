"""One saved shard on any tier, read range by range into an image of its size.

Whatever `fill` has put there is what was saved: in the slot nothing changed since the shard was
opened, on disk and in the object tier every chunk was compared with its checksum. So a rank that
needs a tenth of a shard reads and checks a tenth of it; pages of the image that nobody fills cost
no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from relit_platform.facts import RestorePlan, ShardSource, Tier
from relit_platform.node.slots import Slot
from relit_storage.checkpoint.checksum import num_chunks
from relit_storage.checkpoint.durable import read_file
from relit_storage.checkpoint.image import MAX_REASON
from relit_storage.checkpoint.shard import ShardRef, check_chunk, each, read_shard_into
from relit_storage.errors import CorruptShardError
from relit_storage.stores.protocol import ObjectStore

SLOT_TIERS: tuple[Tier, ...] = ("memory", "peer")


class SavedShard(Protocol):
    """Every method may block for its tier, and raises CorruptShardError, OSError or StoreError."""

    num_bytes: int

    def fill(self, image: memoryview, begin: int, end: int) -> None:
        """Make at least image[begin:end] what was saved; image has num_bytes, the same each time.

        What was filled before is not read again.
        """
        ...

    def extras(self) -> bytes:
        """The JSON beside the image; outside of slots its checksum is for the caller."""
        ...

    def close(self) -> None:
        """Let go of what is open."""
        ...


def open_shard(plan: RestorePlan, source: ShardSource, store: ObjectStore | None) -> SavedShard:
    """The shard that a plan names; store is needed for the object tier only.

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
            lambda image, chunks: read_shard_into(path, ref, image, chunks),
            lambda: read_file(source.extras_location, source.extras_bytes),
        )
    if store is None:
        raise ValueError("a plan of the object tier needs the run's store")
    return _ChunkedShard(
        ref,
        path,
        lambda image, chunks: _read_object(store, path, ref, image, chunks),
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
        self._there: set[int] = set()
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

    def fill(self, image: memoryview, begin: int, end: int) -> None:
        if self._ref.checksums:
            self._fill_checked(image, begin, end)
        else:
            image[begin:end] = self._slot.image[begin:end]
        self._slot.check_unchanged(self._sequence)

    def _fill_checked(self, image: memoryview, begin: int, end: int) -> None:
        size = self._ref.chunk_bytes
        for index in range(begin // size, -(-end // size)):
            if index not in self._there:
                first, last = self._ref.chunk_range(index)
                image[first:last] = self._slot.image[first:last]
                check_chunk(self._slot.path, self._ref, index, image[first:last])
                self._there.add(index)

    def extras(self) -> bytes:
        raw = self._slot.read_extras()
        self._slot.check_unchanged(self._sequence)  # image and extras are of one snapshot
        return raw

    def close(self) -> None:
        self._slot.close()


class _ChunkedShard:
    """A file or an object, whose chunks `read` puts into their places and checks."""

    def __init__(
        self,
        ref: ShardRef,
        file: str,
        read: Callable[[memoryview, Sequence[int]], None],
        read_extras: Callable[[], bytes],
    ) -> None:
        self.num_bytes = ref.num_bytes
        self.extras = read_extras
        self._ref = ref
        self._read = read
        self._there: set[int] = set()
        if ref.num_bytes and ref.chunk_bytes < 1:
            _refuse(file, "its chunks have no size")

    def fill(self, image: memoryview, begin: int, end: int) -> None:
        size = max(1, self._ref.chunk_bytes)
        wanted = range(begin // size, -(-end // size))
        missing = [index for index in wanted if index not in self._there]
        if missing or not self._there:  # even an empty file is looked at
            self._read(image, missing)
        self._there.update(missing)

    def close(self) -> None:
        pass  # nothing is kept open between two reads


def _read_object(
    store: ObjectStore, key: str, ref: ShardRef, image: memoryview, chunks: Sequence[int]
) -> None:
    found = store.size(key)
    if found != ref.num_bytes or len(ref.checksums) != num_chunks(ref.num_bytes, ref.chunk_bytes):
        _refuse(key, "is missing" if found is None else f"{found} bytes, not {ref.num_bytes}")

    def read(index: int) -> None:
        begin, end = ref.chunk_range(index)
        chunk = store.get_range(key, begin, end - begin)
        check_chunk(key, ref, index, chunk)
        image[begin:end] = chunk

    each(read, chunks)


def _ref(source: ShardSource) -> ShardRef:
    return ShardRef(
        num_bytes=source.num_bytes, chunk_bytes=source.chunk_bytes, checksums=source.checksums
    )


def _refuse(file: str, reason: str) -> NoReturn:
    raise CorruptShardError(file=file, reason=reason[:MAX_REASON])
