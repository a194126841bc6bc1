"""Chunks of a shard on their way from a tier to their places: read, checked, handed on.

    read_chunks(path, ref, chunks, take)

READERS chunks are under way at a time, each in a buffer of its own that is used again for a later
one: while one waits for the disk another is hashed and a third copied to where it belongs. So a
shard of any size goes through the memory of a few chunks, and what is copied lies in the caches.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from relit_storage.checkpoint.durable import BLOCK_BYTES
from relit_storage.checkpoint.shard import DIRECT_FROM_BYTES, ShardRef, check_chunk, opened_shard
from relit_storage.errors import CorruptShardError

READERS = 4  # of chunks of 16 MiB, say: enough to keep a disk, or a connection to a store, busy
BUFFERS_BYTES = 256 << 20  # for larger chunks there are fewer readers
HUGE_BYTES = 2 << 20

Take = Callable[[int, memoryview], None]  # (first byte in the shard, its checked bytes)


def read_chunks(
    path: str, ref: ShardRef, chunks: Iterable[int], take: Take, *, shared: bool = False
) -> None:
    """Read these chunks of a file, check each, and call `take` with it.

    take is called in several threads at once, in any order, and must not keep the bytes. Blocks
    until all are taken. By direct I/O where it works, unless shared: other processes of this
    machine read the same file now, and the page cache saves them the disk. Raises
    CorruptShardError, also for a missing file; other chunks may have been taken by then.
    """
    with opened_shard(path, ref) as fd:
        wanted = list(chunks)
        readers = min(len(wanted), readers_for(ref.chunk_bytes))
        aligned = ref.num_bytes >= DIRECT_FROM_BYTES and ref.chunk_bytes % BLOCK_BYTES == 0
        if aligned and not shared:
            _set_direct(fd, True)
        buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(readers):
            buffers.put(_buffer(min(ref.chunk_bytes, ref.num_bytes)))

        def read(index: int) -> None:
            begin, end = ref.chunk_range(index)
            buffer = buffers.get()
            try:
                _read(fd, begin, end - begin, buffer, path)
                check_chunk(path, ref, index, buffer[: end - begin])
                take(begin, buffer[: end - begin])
            finally:
                buffers.put(buffer)

        each(read, wanted, readers)


def readers_for(chunk_bytes: int) -> int:
    """How many chunks of this size may be in memory at a time."""
    return max(1, min(READERS, BUFFERS_BYTES // max(1, chunk_bytes)))


def each(read: Callable[[int], None], chunks: Iterable[int], readers: int = READERS) -> None:
    """Call `read` for every chunk, some at a time. The first error is raised; no more are
    begun after one, and none runs any more on return.
    """
    wanted = list(chunks)
    if len(wanted) < 2:
        for index in wanted:
            read(index)
        return
    with ThreadPoolExecutor(min(readers, len(wanted)), thread_name_prefix="chunks") as pool:
        futures = [pool.submit(read, index) for index in wanted]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _buffer(num_bytes: int) -> memoryview:
    """Memory for a chunk, in whole blocks, and in huge pages where the kernel gives some.

    A disk takes a request in a limited number of pieces: of scattered small pages that is a fifth
    less than it can give (docs/log.md).
    """
    size = max(1, -(-num_bytes // BLOCK_BYTES)) * BLOCK_BYTES
    mapping = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without
    first = -np.frombuffer(mapping, dtype=np.uint8).ctypes.data % HUGE_BYTES
    return memoryview(mapping)[first : first + size]


def _set_direct(fd: int, direct: bool) -> None:
    """A file system without direct I/O refuses; then it stays as it is."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    except OSError:
        if not direct:
            raise


def _read(fd: int, begin: int, num_bytes: int, buffer: memoryview, path: str) -> None:
    """Fill buffer[:num_bytes], and what is left of its last block if the file has that, too."""
    room = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
    done = 0
    while done < num_bytes:
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT  # before: another may change it
        try:
            count = os.preadv(fd, [buffer[done:room]], begin + done)
        except OSError as error:
            if error.errno == errno.EINVAL and direct:
                _set_direct(fd, False)  # for all readers: this file system wants other sizes
                continue
            raise CorruptShardError(file=path, reason=f"read failed: {error.strerror}") from error
        if count == 0:
            raise CorruptShardError(file=path, reason=f"ends at {begin + done}")
        done += count
