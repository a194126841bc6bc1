"""The contract of ObjectStore, the same tests over every ground, and what is special to each."""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_store import FaultyStore
from moto.s3.models import S3Backend

from relit_storage.errors import (
    ObjectMissingError,
    StoreError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from relit_storage.stores import local
from relit_storage.stores.local import LocalStore
from relit_storage.stores.memory import MemoryStore
from relit_storage.stores.opening import open_store, probe
from relit_storage.stores.prefixed import PrefixedStore
from relit_storage.stores.protocol import ObjectStore

GROUNDS = ["local", "memory", "s3", "s3-fsspec", "prefixed"]


@pytest.fixture(params=GROUNDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return LocalStore(str(tmp_path / "store"))
    if request.param == "memory":
        return MemoryStore("contract")
    if request.param == "prefixed":
        return PrefixedStore(LocalStore(str(tmp_path / "store")), "exp/run-1")
    endpoint = request.getfixturevalue("s3_endpoint")
    backend = "fsspec" if request.param == "s3-fsspec" else "obstore"
    options = f"endpoint_url={endpoint}&backend={backend}"
    return open_store(f"s3://relit/{uuid.uuid4().hex}?{options}", deadline_s=30)


def race(num_racers: int, act: Callable[[int], bool]) -> list[int]:
    """The numbers of the racers whose act was True; all start together."""
    barrier, wins = threading.Barrier(num_racers), []

    def run(rank: int) -> None:
        barrier.wait()
        if act(rank):
            wins.append(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wins


def test_put_replaces_and_get_returns_all(store: ObjectStore) -> None:
    for data in (b"first", b"", b"\x00\xff" * 5000):
        store.put("a/b.bin", data)
        assert store.get("a/b.bin") == data
        assert store.size("a/b.bin") == len(data)


def test_missing_objects(store: ObjectStore) -> None:
    for read in (store.get, lambda key: store.get_range(key, 0, 4)):
        with pytest.raises(ObjectMissingError) as caught:
            read("no/such")
        assert caught.value.key == "no/such" or caught.value.key.endswith("/no/such")
    assert store.size("no/such") is None
    assert store.list("no/") == []
    store.delete("no/such")


@pytest.mark.parametrize(
    ("start", "count", "expected"),
    [(0, 4, b"0123"), (3, 3, b"345"), (8, 9, b"89"), (10, 4, b""), (50, 4, b""), (2, 0, b"")],
)
def test_ranges(store: ObjectStore, start: int, count: int, expected: bytes) -> None:
    store.put("range", b"0123456789")
    assert store.get_range("range", start, count) == expected


def test_list_sees_every_write_and_delete_at_once(store: ObjectStore) -> None:
    for key in ("x/2", "x/10", "x/y/1", "xx/1", "w"):
        store.put(key, b"1")
        assert key in store.list("")
    assert store.list("x/") == ["x/10", "x/2", "x/y/1"]
    assert store.list("x") == ["x/10", "x/2", "x/y/1", "xx/1"]
    assert store.list("x/y/") == ["x/y/1"]
    store.delete("x/y/1")
    assert store.list("x/") == ["x/10", "x/2"]


def test_create_once_and_again_with_our_own_bytes(store: ObjectStore) -> None:
    assert store.put_if_absent("slot/1", b"ours, nonce 1")
    assert store.put_if_absent("slot/1", b"ours, nonce 1"), "a repeated call after a lost answer"
    assert not store.put_if_absent("slot/1", b"theirs, nonce 2")
    assert store.get("slot/1") == b"ours, nonce 1"


@pytest.mark.parametrize("round_no", range(2))
def test_sixteen_racers_one_winner(store: ObjectStore, round_no: int) -> None:
    key = f"race/{round_no}"
    wins = race(16, lambda rank: store.put_if_absent(key, b"racer %d" % rank))
    assert len(wins) == 1
    assert store.get(key) == b"racer %d" % wins[0]


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_one_winner_however_slow_the_test_server_is(
    s3_endpoint: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """moto looks and writes then, and threads may wait in between: that is no answer of a store."""
    real = S3Backend.put_object

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02)
        return real(*args, **kwargs)

    monkeypatch.setattr(S3Backend, "put_object", slowly)
    options = f"endpoint_url={s3_endpoint}&backend={backend}"
    store = open_store(f"s3://relit/{uuid.uuid4().hex}?{options}", deadline_s=30)
    assert len(race(16, lambda rank: store.put_if_absent("race", b"racer %d" % rank))) == 1


def test_put_file(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "big.bin"
    source.write_bytes(os.urandom(1 << 20) * 33)  # more than two 16 MiB parts
    store.put_file("steps/big", str(source))
    assert store.size("steps/big") == 33 << 20
    assert (
        store.get_range("steps/big", (16 << 20) - 5, 10)
        == source.read_bytes()[(16 << 20) - 5 : (16 << 20) + 5]
    )
    with pytest.raises(StoreError):
        store.put_file("steps/none", str(tmp_path / "absent"))
    assert store.size("steps/none") is None


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/./b", "a\0b", "k" * 1025])
def test_illegal_keys_are_refused(store: ObjectStore, key: str) -> None:
    for call in (store.get, store.size, store.delete, lambda k: store.put(k, b"")):
        with pytest.raises(StoreError):
            call(key)


def test_probe_accepts_and_cleans_up(store: ObjectStore) -> None:
    found = probe(store)
    assert found.missing == ()
    assert found.latency_s > 0
    assert store.list("") == []


class _LooksFirst(MemoryStore):
    """A store that ignores the condition, as some S3 look-alikes do."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


def test_probe_refuses_a_store_that_ignores_the_condition() -> None:
    with pytest.raises(UnsupportedStoreError) as caught:
        probe(_LooksFirst())
    assert "create_once" in str(caught.value)
    assert probe(_LooksFirst(), strict=False).missing[:2] == ("create_once", "one_winner")


class _Lagging(MemoryStore):
    """A store that shows a write or a delete one call late, in what it reads or lists."""

    def __init__(self, late: str) -> None:
        super().__init__()
        self.late = late
        self.before: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> None:
        self.before = dict(self._objects)
        super().put(key, data)

    def delete(self, key: str) -> None:
        self.before = dict(self._objects)
        super().delete(key)

    def get(self, key: str) -> bytes:
        return self.before.get(key, super().get(key)) if self.late == "read" else super().get(key)

    def list(self, prefix: str) -> list[str]:
        if self.late == "list":
            return sorted(key for key in self.before if key.startswith(prefix))
        return super().list(prefix)


@pytest.mark.parametrize(
    ("late", "guarantee"), [("read", "read_after_write"), ("list", "list_after_write")]
)
def test_probe_refuses_a_store_that_lags(late: str, guarantee: str) -> None:
    assert probe(_Lagging(late), strict=False).missing == (guarantee,)


# ---- the local ground


def _io_calls(patch: pytest.MonkeyPatch, nth: int) -> list[str]:
    """Count LocalStore's system calls; the nth raises EIO."""
    calls: list[str] = []

    def wrap(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == nth:
                raise OSError(errno.EIO, f"injected into {name}")
            return real(*args, **kwargs)

        return call

    for name in ("mkdir", "write", "fsync", "link", "replace", "copy_file_range"):
        patch.setattr(os, name, wrap(name))
    return calls


@pytest.mark.parametrize("verb", ["put", "put_if_absent", "put_file"])
def test_local_fails_at_every_io_call(verb: str, tmp_path: Path) -> None:
    """Whatever call fails: the object is old or new and whole, and a repeat succeeds."""
    source = tmp_path / "source"
    source.write_bytes(b"new content")
    for nth in range(1, 40):
        store = LocalStore(str(tmp_path / f"{verb}-{nth}"))
        argument: Any = str(source) if verb == "put_file" else b"new content"
        with pytest.MonkeyPatch.context() as patch:
            calls = _io_calls(patch, nth)
            try:
                getattr(store, verb)("a/b/key", argument)
                failed = False
            except StoreError:
                failed = True
        assert store.size("a/b/key") in (None, 11)
        assert [p for p in Path(store.root).rglob(".tmp/*") if p.is_file()] == []
        assert getattr(store, verb)("a/b/key", argument) in (None, True)
        assert store.get("a/b/key") == b"new content"
        if not failed:
            assert nth > len(calls) > 3
            return
    raise AssertionError("no end")


def test_local_write_keeps_the_old_object_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(str(tmp_path))
    store.put("key", b"old")

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match="No space left"):
        store.put("key", b"new")
    assert store.get("key") == b"old"


def test_local_unfinished_files_are_hidden_and_swept_when_stale(tmp_path: Path) -> None:
    tmp = tmp_path / ".tmp"
    tmp.mkdir()
    for name, age_s in (("fresh", 0), ("stale", 2 * local.STALE_TMP_S)):
        (tmp / name).write_bytes(b"half")
        os.utime(tmp / name, (os.stat(tmp / name).st_mtime - age_s,) * 2)
    store = LocalStore(str(tmp_path))
    assert store.list("") == []
    store.put("key", b"1")
    assert [path.name for path in tmp.iterdir()] == ["fresh"]
    with pytest.raises(StoreError):
        store.get(".tmp/fresh")


def test_local_delete_removes_empty_folders_while_others_write(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))

    def churn(rank: int) -> bool:
        for number in range(60):
            store.put(f"steps/x/{rank}-{number}", b"1")
            store.delete(f"steps/x/{rank}-{number}")
        return True

    assert len(race(4, churn)) == 4
    assert store.list("") == []
    assert not (tmp_path / "steps").exists()


def test_local_names_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="in the way"):
        LocalStore(str(tmp_path / "file")).put("key", b"")
    store = LocalStore(str(tmp_path))
    with pytest.raises(StoreError):
        store.put("file/below", b"")
    assert store.size("file/below") is None


def test_local_copies_across_file_systems(tmp_path: Path) -> None:
    source = Path("/dev/shm") / f"relit-test-{uuid.uuid4().hex}"
    source.write_bytes(b"x" * 100_000)
    try:
        store = LocalStore(str(tmp_path))
        store.put_file("key", str(source))
    finally:
        source.unlink()
    assert store.get("key") == b"x" * 100_000


def test_faulty_store_does_what_it_says() -> None:
    for fault, left in (("fail", None), ("lost", 4), ("torn", 2)):
        store = FaultyStore(MemoryStore(), fault, nth=2)  # type: ignore[arg-type]
        store.put("a", b"1")
        with pytest.raises(StoreUnavailableError, match="injected"):
            store.put("b", b"1234")
        assert store.size("b") == left
        assert store.fired
