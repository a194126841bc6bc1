"""Writing an image whose tensors come one after the other, hashed on the way.

For tensors that lie in no slot: those of a checkpoint that is imported. Memory holds one block,
whatever the size of the image.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import xxhash

from relit_storage.checkpoint.image import ImageLayout, TensorSpec
from relit_storage.checkpoint.shard import ShardRef

Blocks = Callable[[TensorSpec], Iterable[memoryview]]
OnBytes = Callable[[int], None]


class ChunkHasher:
    """The checksum of every chunk of a stream that comes in blocks of any size."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._hash = xxhash.xxh3_128()
        self._room = chunk_bytes  # bytes that the present chunk still takes
        self._done: list[str] = []

    def update(self, block: memoryview) -> None:
        """The next bytes of the stream."""
        while block:
            part = block[: self._room]
            self._hash.update(part)
            self._room -= len(part)
            block = block[len(part) :]
            if not self._room:
                self._close()

    def finish(self) -> tuple[str, ...]:
        """The checksums, as `chunk_checksums` gives them of the whole stream. Call it once."""
        if self._room < self._chunk_bytes:
            self._close()
        return tuple(self._done)

    def _close(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash = xxhash.xxh3_128()
        self._room = self._chunk_bytes


def write_image(
    path: str,
    layout: ImageLayout,
    blocks: Blocks,
    chunk_bytes: int,
    on_bytes: OnBytes = lambda count: None,
) -> ShardRef:
    """Write a new file, not synced: it is read once, by an upload. Blocks for all of it.

    blocks gives a tensor's bytes in order; each block is used before the next is asked for.
    on_bytes hears of tensors' bytes. ValueError if a tensor has another number of bytes than its
    spec says, OSError if the disk fails; the caller removes the file then.
    """
    hasher = ChunkHasher(chunk_bytes)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _append(fd, hasher, memoryview(layout.header))
        for spec in layout.specs:
            left = spec.num_bytes
            for block in blocks(spec):
                left -= len(block)
                _append(fd, hasher, block)
                on_bytes(len(block))
            if left:
                raise ValueError(f"tensor {spec.name!r} has {-left} bytes more than its shape")
    finally:
        os.close(fd)
    return ShardRef(
        num_bytes=layout.total_bytes, chunk_bytes=chunk_bytes, checksums=hasher.finish()
    )


def _append(fd: int, hasher: ChunkHasher, block: memoryview) -> None:
    hasher.update(block)
    while block:
        block = block[os.write(fd, block) :]
