"""Bytes to upload, read piece by piece: a part is read once to be signed and once to be sent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Protocol

PIECE_BYTES = 1 << 20  # stays in the processor's cache between reading, hashing and sending


class ByteSource(Protocol):
    """Bytes of a known size, readable from several threads at once."""

    @property
    def num_bytes(self) -> int:
        """How many there are."""
        ...

    def pieces(self, start: int, num_bytes: int) -> Iterator[memoryview]:
        """Those bytes in order; each view is valid only until the next one is asked for."""
        ...


class BufferSource:
    """Bytes in memory, never copied."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._view = memoryview(data).cast("B")

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return self._view.nbytes

    def pieces(self, start: int, num_bytes: int) -> Iterator[memoryview]:
        """Slices of the buffer."""
        for at in range(start, start + num_bytes, PIECE_BYTES):
            yield self._view[at : min(at + PIECE_BYTES, start + num_bytes)]


class FileSource:
    """An open file, read into one small buffer per reader.

    Not mapped: a mapped file that someone truncates ends the process with SIGBUS, here it is an
    OSError. The caller opens and closes `fd`.
    """

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._name = name
        self._num_bytes = os.fstat(fd).st_size

    @property
    def num_bytes(self) -> int:
        """Size of the file when it was opened; what grows later is not uploaded."""
        return self._num_bytes

    def pieces(self, start: int, num_bytes: int) -> Iterator[memoryview]:
        """Pieces of the file; OSError if it shrank."""
        buffer = memoryview(bytearray(min(PIECE_BYTES, num_bytes)))
        end = start + num_bytes
        while start < end:
            got = os.preadv(self._fd, [buffer[: min(PIECE_BYTES, end - start)]], start)
            if got == 0:
                raise FileShrankError(f"{self._name} shrank to {start} bytes while uploaded")
            yield buffer[:got]
            start += got


class FileShrankError(ValueError):
    """A file became shorter while it was uploaded: no fault of the store, so never repeated."""
