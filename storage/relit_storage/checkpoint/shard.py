"""A shard: a rank's image of one step as a file, written once, checked at every read.

A chunk is the unit of checksums, of reads and of uploads. Nothing is loaded from a shard whose
size or whose chunk does not agree with its `ShardRef`, which the manifest carries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from relit_storage.checkpoint.checksum import checksum, num_chunks
from relit_storage.checkpoint.durable import open_regular, write_file
from relit_storage.errors import CorruptShardError

DIRECT_FROM_BYTES = 4 << 20  # below, the page cache is as good


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRef:
    """What a shard's bytes must be: its size, and the xxh3_128 of every chunk of chunk_bytes."""

    num_bytes: int
    chunk_bytes: int
    checksums: tuple[str, ...]

    def chunk_range(self, index: int) -> tuple[int, int]:
        """First byte of a chunk, and the first byte behind it."""
        begin = index * self.chunk_bytes
        return begin, min(begin + self.chunk_bytes, self.num_bytes)


def write_shard(
    path: str, view: memoryview, chunk_bytes: int, pace: Callable[[int], None] | None = None
) -> ShardRef:
    """Write a buffer as a file, chunk by chunk; durable on return.

    A chunk is hashed in a thread while it is written, which is where the time goes; direct I/O is
    used where it works. The directory must exist; a file already at `path` is replaced at the
    end. pace is called before each chunk with its length, and may block. OSError leaves nothing
    new behind.
    """
    flat = view.cast("B")
    hashes: list[Future[str]] = []
    with ThreadPoolExecutor(1, thread_name_prefix="checksum") as hasher:

        def chunks() -> Iterator[memoryview]:
            for begin in range(0, len(flat), chunk_bytes):
                chunk = flat[begin : begin + chunk_bytes]
                if pace is not None:
                    pace(len(chunk))
                hashes.append(hasher.submit(checksum, chunk))
                yield chunk

        write_file(path, chunks(), direct=len(flat) >= DIRECT_FROM_BYTES)
    checksums = tuple(future.result() for future in hashes)
    return ShardRef(num_bytes=len(flat), chunk_bytes=chunk_bytes, checksums=checksums)


def verify_shard(path: str, ref: ShardRef) -> None:
    """Read a whole shard and check it, in memory of one chunk. Raises CorruptShardError."""
    buffer = memoryview(bytearray(min(ref.chunk_bytes, ref.num_bytes)))
    with opened_shard(path, ref) as fd:
        for index in range(len(ref.checksums)):
            begin, end = ref.chunk_range(index)
            _read_chunk(fd, begin, buffer[: end - begin], path)
            check_chunk(path, ref, index, buffer[: end - begin])


def check_chunk(file: str, ref: ShardRef, index: int, view: bytes | memoryview) -> None:
    """Raise CorruptShardError unless `view` is chunk `index`; for readers of other tiers too."""
    begin, end = ref.chunk_range(index)
    if len(view) != end - begin:
        reason = f"chunk {index} has {len(view)} of {end - begin} bytes"
        raise CorruptShardError(file=file, reason=reason)
    if checksum(view) != ref.checksums[index]:
        raise CorruptShardError(file=file, reason=f"chunk {index} fails its checksum")


@contextmanager
def opened_shard(path: str, ref: ShardRef) -> Iterator[int]:
    """The file's descriptor, after its size was checked. Raises CorruptShardError."""
    if len(ref.checksums) != num_chunks(ref.num_bytes, max(1, ref.chunk_bytes)):
        reason = f"{len(ref.checksums)} checksums for {ref.num_bytes} bytes"
        raise CorruptShardError(file=path, reason=reason)
    try:
        fd = open_regular(path)
    except OSError as error:
        raise CorruptShardError(file=path, reason=f"cannot be opened: {error.strerror}") from error
    try:
        found = os.fstat(fd).st_size
        if found != ref.num_bytes:
            raise CorruptShardError(file=path, reason=f"{found} bytes, expected {ref.num_bytes}")
        yield fd
    finally:
        os.close(fd)


def _read_chunk(fd: int, begin: int, dest: memoryview, path: str) -> None:
    done = 0
    while done < len(dest):
        try:
            count = os.preadv(fd, [dest[done:]], begin + done)
        except OSError as error:
            raise CorruptShardError(file=path, reason=f"read failed: {error.strerror}") from error
        if count == 0:
            raise CorruptShardError(file=path, reason=f"ends at {begin + done}")
        done += count
