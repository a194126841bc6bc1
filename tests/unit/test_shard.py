"""Shards and durable files: whole or absent under any failing call, and damage is always seen."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relit_storage.checkpoint import durable
from relit_storage.checkpoint.checksum import checksum, chunk_checksums
from relit_storage.checkpoint.chunk_reading import read_chunks
from relit_storage.checkpoint.shard import ShardRef, check_chunk, verify_shard, write_shard
from relit_storage.errors import CorruptShardError

CHUNK = 1000
DATA = bytes(range(256)) * 10  # two whole chunks and a short one
IO_CALLS = ("open", "write", "fsync", "rename", "link", "unlink", "mkdir")


class FailingOs:
    """Stands for `os` in one module: the n-th I/O call of it raises, or the disk stays full."""

    def __init__(self, fail_at: int, code: int, forever: bool = False) -> None:
        self.calls, self.fail_at, self.code, self.forever = 0, fail_at, code, forever

    def __getattr__(self, name: str) -> Any:
        real: Callable[..., Any] = getattr(os, name)
        return self._counted(real) if name in IO_CALLS else real

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.fail_at or (self.forever and self.calls > self.fail_at):
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **kwargs)

        return call


def read_into(
    path: str,
    ref: ShardRef,
    dest: bytearray,
    chunks: list[int] | None = None,
    shared: bool = False,
) -> None:
    """The chunks, all by default, each at its place."""

    def take(begin: int, data: memoryview) -> None:
        dest[begin : begin + len(data)] = data

    wanted = range(len(ref.checksums)) if chunks is None else chunks
    read_chunks(path, ref, wanted, take, shared=shared)


@pytest.fixture
def shard(tmp_path: Path) -> tuple[str, ShardRef]:
    path = str(tmp_path / "a.safetensors")
    return path, write_shard(path, memoryview(DATA), CHUNK)


def test_a_shard_reads_back(shard: tuple[str, ShardRef]) -> None:
    path, ref = shard
    dest = bytearray(len(DATA))
    read_into(path, ref, dest)
    verify_shard(path, ref)
    assert dest == DATA and Path(path).read_bytes() == DATA
    assert ref.checksums == chunk_checksums(DATA, CHUNK) and len(ref.checksums) == 3
    assert os.listdir(os.path.dirname(path)) == ["a.safetensors"]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [4 << 20, (4 << 20) + 1, (5 << 20) - 1])
def test_large_shards_are_read_in_threads_by_either_way(
    tmp_path: Path, size: int, shared: bool
) -> None:
    """More chunks than readers, the last one of any length; direct I/O takes whole blocks."""
    path, data = str(tmp_path / "a"), os.urandom(size)
    ref = write_shard(path, memoryview(data), 64 << 10)
    dest = bytearray(size)
    read_into(path, ref, dest, shared=shared)
    assert dest == data
    flipped = bytearray(data)
    flipped[-1] ^= 1
    Path(path).write_bytes(flipped)
    with pytest.raises(CorruptShardError, match=f"chunk {len(ref.checksums) - 1} fails"):
        read_into(path, ref, dest, shared=shared)


@pytest.mark.parametrize("refuse", ["fcntl", "read"])
def test_a_file_system_without_direct_io_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: str
) -> None:
    path, data = str(tmp_path / "a"), os.urandom(4 << 20)
    ref = write_shard(path, memoryview(data), 64 << 10)
    set_flags, preadv = fcntl.fcntl, os.preadv
    refused: list[int] = []

    def fcntl_(fd: int, command: int, flags: int = 0) -> int:
        if refuse == "fcntl" and command == fcntl.F_SETFL and flags & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "no direct I/O")
        return int(set_flags(fd, command, flags))

    def preadv_(fd: int, buffers: list[memoryview], offset: int) -> int:
        if refuse == "read" and set_flags(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "other sizes, please")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(fcntl, "fcntl", fcntl_)
    monkeypatch.setattr(os, "preadv", preadv_)
    dest = bytearray(len(data))
    read_into(path, ref, dest)
    assert dest == data and refused


def test_some_chunks_are_read_and_the_rest_is_left_alone(shard: tuple[str, ShardRef]) -> None:
    path, ref = shard
    dest = bytearray(len(DATA))
    read_into(path, ref, dest, [2])
    assert dest == bytes(2 * CHUNK) + DATA[2 * CHUNK :]
    raw = bytearray(DATA)
    raw[0] ^= 1
    Path(path).write_bytes(raw)
    read_into(path, ref, dest, [1])
    assert dest == bytes(CHUNK) + DATA[CHUNK:]
    with pytest.raises(CorruptShardError, match="chunk 0"):
        read_into(path, ref, dest, [0])
    Path(path).write_bytes(DATA[:-1])
    with pytest.raises(CorruptShardError, match="expected"):
        read_into(path, ref, dest, [])


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_sizes_around_a_chunk(tmp_path: Path, size: int) -> None:
    path = str(tmp_path / "a")
    ref = write_shard(path, memoryview(DATA[:size]), CHUNK)
    dest = bytearray(size)
    read_into(path, ref, dest)
    assert dest == DATA[:size]


def test_every_kind_of_damage_is_seen(shard: tuple[str, ShardRef]) -> None:
    path, ref = shard
    damages = [
        DATA[:-1],
        DATA + b"x",
        b"",
        DATA[:1500] + bytes(len(DATA) - 1500),
        DATA[CHUNK : 2 * CHUNK] + DATA[:CHUNK] + DATA[2 * CHUNK :],
    ]
    for damaged in damages:
        Path(path).write_bytes(damaged)
        with pytest.raises(CorruptShardError):
            verify_shard(path, ref)
        with pytest.raises(CorruptShardError):
            read_into(path, ref, bytearray(len(DATA)))
    os.unlink(path)
    with pytest.raises(CorruptShardError, match="cannot be opened"):
        verify_shard(path, ref)


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    data = DATA[:64]
    ref = write_shard(path, memoryview(data), 16)
    for bit in range(len(data) * 8):
        torn = bytearray(data)
        torn[bit // 8] ^= 1 << bit % 8
        Path(path).write_bytes(torn)
        with pytest.raises(CorruptShardError, match=f"chunk {bit // 128} fails"):
            verify_shard(path, ref)


def test_chunks_of_other_tiers_are_checked(shard: tuple[str, ShardRef]) -> None:
    _, ref = shard
    check_chunk("key", ref, 2, DATA[2000:])
    for wrong in (DATA[2000:-1], DATA[2000:-1] + b"x"):
        with pytest.raises(CorruptShardError, match="key"):
            check_chunk("key", ref, 2, wrong)


def test_a_ref_with_too_few_checksums_is_refused(shard: tuple[str, ShardRef]) -> None:
    path, ref = shard
    short = ShardRef(num_bytes=len(DATA), chunk_bytes=CHUNK, checksums=ref.checksums[:2])
    with pytest.raises(CorruptShardError, match="2 checksums"):
        verify_shard(path, short)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("forever", [False, True])
def test_fail_every_call_of_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, forever: bool
) -> None:
    """Old bytes or new bytes, whole; and once the fault is gone, writing again succeeds."""
    path = tmp_path / "a"
    for fail_at in range(1, 20):
        path.write_bytes(b"old")
        failing = FailingOs(fail_at, code, forever)
        with monkeypatch.context() as patch:
            patch.setattr(durable, "os", failing)
            try:
                write_shard(str(path), memoryview(DATA), CHUNK)
            except OSError:
                pass  # the file must be whole whether the fault was reported or not
        assert path.read_bytes() in (b"old", DATA)
        rubbish = [name for name in os.listdir(tmp_path) if name != "a"]
        assert all(durable.is_temporary(name) for name in rubbish)
        assert forever or not rubbish
        for name in rubbish:
            os.unlink(tmp_path / name)
        write_shard(str(path), memoryview(DATA), CHUNK)
        if failing.calls < fail_at:
            break
    assert fail_at == 9  # open, 3 writes, fsync, rename, open and fsync of the directory


def test_fail_every_call_of_an_exclusive_create(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fail_at in range(1, 20):
        path = str(tmp_path / f"{fail_at}")
        failing = FailingOs(fail_at, errno.EIO)
        with monkeypatch.context() as patch:
            patch.setattr(durable, "os", failing)
            try:
                durable.create_file(path, b"mine")
            except OSError:
                pass
        assert durable.create_file(path, b"mine")
        assert not durable.create_file(path, b"other")
        assert Path(path).read_bytes() == b"mine"
        if failing.calls < fail_at:
            break
    assert not [name for name in os.listdir(tmp_path) if durable.is_temporary(name)]


def test_directories_are_private_and_repeatable(tmp_path: Path) -> None:
    path = str(tmp_path / "a" / "b")
    durable.make_dirs(path)
    durable.make_dirs(path)
    assert os.stat(path).st_mode & 0o777 == 0o700


def test_checksum_is_xxh3_128() -> None:
    assert checksum(b"") == "99aa06d3014798d86001c324468d497f"


def test_who_holds_a_shard_back_is_asked_before_each_chunk(tmp_path: Path) -> None:
    path, asked = tmp_path / "a", list[int]()

    def pace(num_bytes: int) -> None:
        assert not path.exists()
        asked.append(num_bytes)

    write_shard(str(path), memoryview(DATA), CHUNK, pace)
    assert sum(asked) == len(DATA) and asked[0] == CHUNK and len(asked) == 3
    assert path.read_bytes() == DATA
