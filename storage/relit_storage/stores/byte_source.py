"""Bytes to upload, piece by piece: a part is read once to be signed and once to be sent.

A file is sent as spans of it, so that the second reading can be the kernel's own (file_sending).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

READ_BYTES = 256 << 10  # stays in the processor's cache between reading and hashing
PIECE_BYTES = 1 << 20  # is paced and has one timeout as a whole


class ByteSource(Protocol):
    """Bytes of a known size, readable from several threads at once."""

    @property
    def num_bytes(self) -> int:
        """How many there are."""
        ...

    def pieces(self, start: int, num_bytes: int) -> Iterator[memoryview]:
        """Those bytes in order; each view is valid only until the next one is asked for."""
        ...

    def sendable(self, start: int, num_bytes: int) -> Iterator[memoryview | FileSpan]:
        """Those bytes in order and in pieces of up to PIECE_BYTES, for the body of a request."""
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
        for at, count in _cut(start, num_bytes):
            yield self._view[at : at + count]

    def sendable(self, start: int, num_bytes: int) -> Iterator[memoryview]:
        """The same slices."""
        return self.pieces(start, num_bytes)


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
        """Pieces of the file; FileShrankError if it shrank."""
        return iter(FileSpan(self._fd, self._name, start, num_bytes))

    def sendable(self, start: int, num_bytes: int) -> Iterator[FileSpan]:
        """Spans of the file, unread."""
        for at, count in _cut(start, num_bytes):
            yield FileSpan(self._fd, self._name, at, count)


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes of an open file that nobody has read yet; iterating reads them into one buffer.

    To a connection that does not know it, it is an iterable of bytes, which http.client sends too.
    """

    fd: int
    name: str
    start: int
    num_bytes: int

    def __len__(self) -> int:
        return self.num_bytes

    def __iter__(self) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(READ_BYTES, self.num_bytes)))
        at, end = self.start, self.start + self.num_bytes
        while at < end:
            got = os.preadv(self.fd, [buffer[: min(READ_BYTES, end - at)]], at)
            if got == 0:
                raise self.shrank(at)
            yield buffer[:got]
            at += got

    def shrank(self, at: int) -> FileShrankError:
        """The error to raise when nothing is left to read at byte `at`."""
        return FileShrankError(f"{self.name} shrank to {at} bytes while uploaded")


class FileShrankError(ValueError):
    """A file became shorter while it was uploaded: no fault of the store, so never repeated."""


def _cut(start: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    for at in range(start, start + num_bytes, PIECE_BYTES):
        yield at, min(PIECE_BYTES, start + num_bytes - at)
