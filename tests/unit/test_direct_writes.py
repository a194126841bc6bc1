"""Direct I/O is a matter of speed alone: whatever it refuses, the file holds the same bytes."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relit_storage.checkpoint import durable
from relit_storage.checkpoint.checksum import chunk_checksums
from relit_storage.checkpoint.durable import BLOCK_BYTES, write_file
from relit_storage.checkpoint.shard import DIRECT_FROM_BYTES, verify_shard, write_shard

Write = Callable[[int, Any], int]


def mapping(size: int) -> memoryview:
    """A page-aligned buffer of pseudo-random bytes, as a slot's image is."""
    view = memoryview(mmap.mmap(-1, size + BLOCK_BYTES))[:size]
    view[:] = (bytes(range(251)) * (size // 251 + 1))[:size]
    return view


@pytest.mark.parametrize("begin", [0, 1, 512])
@pytest.mark.parametrize("tail", [0, 1, BLOCK_BYTES - 1])
@pytest.mark.parametrize("part_bytes", [2 * BLOCK_BYTES, 5000])
def test_alignment_changes_no_byte(tmp_path: Path, begin: int, tail: int, part_bytes: int) -> None:
    data = mapping(begin + 6 * BLOCK_BYTES + tail)[begin:]
    parts = [data[at : at + part_bytes] for at in range(0, len(data), part_bytes)]
    write_file(str(tmp_path / "file"), parts, direct=True)
    assert (tmp_path / "file").read_bytes() == data


class Refusing:
    """Stands for `os`: direct I/O ends at `limit` bytes a call, or is refused by one of these."""

    def __init__(self, refuses: str, limit: int = 1 << 30) -> None:
        self.refuses, self.limit, self.sizes = refuses, limit, [0]

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if self.refuses == "open" and flags & os.O_DIRECT:
            os.close(os.open(path, flags & ~os.O_DIRECT, mode))
            raise OSError(errno.EINVAL, "no direct I/O")
        return os.open(path, flags & ~os.O_DIRECT, mode)

    def write(self, fd: int, data: memoryview) -> int:
        if self.refuses == "write" and not self.sizes[-1]:
            self.sizes.append(1)
            raise OSError(errno.EINVAL, "not aligned")
        self.sizes.append(os.write(fd, data[: self.limit]))
        return self.sizes[-1]


@pytest.mark.parametrize("limit", [1 << 30, 3 * BLOCK_BYTES, 1000])
@pytest.mark.parametrize("refuses", ["", "open", "write"])
def test_a_refusal_or_a_short_write_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str, limit: int
) -> None:
    data = mapping(10 * BLOCK_BYTES + 7)
    monkeypatch.setattr(durable, "os", Refusing(refuses, limit))
    write_file(str(tmp_path / "file"), [data], direct=True)
    assert (tmp_path / "file").read_bytes() == data
    assert os.listdir(tmp_path) == ["file"]


def test_another_error_of_a_write_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="full"):
        write_file(str(tmp_path / "file"), [mapping(BLOCK_BYTES)], direct=True)
    assert os.listdir(tmp_path) == []


def test_a_large_shard_goes_by_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []
    real = os.open

    def noted(path: Any, mode: int, *rest: Any, **more: Any) -> int:
        flags.append(mode)
        return real(path, mode & ~os.O_DIRECT, *rest, **more)

    monkeypatch.setattr(os, "open", noted)
    data = mapping(DIRECT_FROM_BYTES + 5)
    ref = write_shard(str(tmp_path / "shard"), data, 1 << 20)
    assert flags[0] & os.O_DIRECT
    assert ref.checksums == chunk_checksums(data, 1 << 20)
    verify_shard(str(tmp_path / "shard"), ref)
