"""Logs: what a worker wrote is in the store, in order, once, and bounded."""

from pathlib import Path

import pytest

from relit_platform.node import log_shipping
from relit_platform.node.log_shipping import LogShipper, segment_key
from relit_storage.errors import StoreError


class Objects:
    """As much of a store as a shipper uses."""

    url = "memory://logs"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.puts = 0
        self.broken = False

    def put(self, key: str, data: bytes) -> None:
        if self.broken:
            raise StoreError(url=self.url, key=key, cause="injected")
        self.puts += 1
        self.objects[key] = data

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))

    def text(self, worker_id: str) -> bytes:
        return b"".join(self.objects[key] for key in self.list(f"logs/{worker_id}/"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_shipping, "SEGMENT_BYTES", 10)
    monkeypatch.setattr(log_shipping, "MAX_BYTES", 100)


def shipper(folder: Path, store: Objects) -> LogShipper:
    return LogShipper(str(folder), store)  # type: ignore[arg-type]


def test_growing_files_arrive_whole(tmp_path: Path) -> None:
    store = Objects()
    ship = shipper(tmp_path, store).ship
    with (tmp_path / "w0.log").open("ab", buffering=0) as log:
        for number in range(9):
            log.write(b"%d234567\n" % number)
            assert ship() == 0
            assert store.text("w0") == (tmp_path / "w0.log").read_bytes()
    assert len(store.objects) == 8
    puts = store.puts
    assert ship() == 0 and store.puts == puts


def test_a_new_shipper_goes_on(tmp_path: Path) -> None:
    store, log = Objects(), tmp_path / "w0.log"
    log.write_bytes(b"a" * 25)
    shipper(tmp_path, store).ship()
    log.write_bytes(b"a" * 25 + b"b" * 20)
    store.puts = 0
    shipper(tmp_path, store).ship()
    assert store.text("w0") == log.read_bytes()
    assert store.puts == 3  # the last segment that was there, and two new ones


def test_a_failing_store_is_made_up_for_later(tmp_path: Path) -> None:
    store = Objects()
    (tmp_path / "w0.log").write_bytes(b"a" * 25)
    ship = shipper(tmp_path, store).ship
    store.broken = True
    assert ship() == 1 and store.objects == {}
    store.broken = False
    assert ship() == 0 and store.text("w0") == b"a" * 25


def test_a_flood_is_cut_and_said(tmp_path: Path) -> None:
    store = Objects()
    (tmp_path / "w0.log").write_bytes(b"a" * 1000)
    ship = shipper(tmp_path, store).ship
    ship()
    puts = store.puts
    ship()
    assert store.puts == puts == 11
    text = store.text("w0")
    assert text.startswith(b"a" * 100 + b"\n[relit:") and b"cut at 100 bytes" in text


def test_other_files_stay(tmp_path: Path) -> None:
    store = Objects()
    (tmp_path / "notes.txt").write_bytes(b"x")
    (tmp_path / "..log").write_bytes(b"x")
    assert shipper(tmp_path, store).ship() == 1
    assert store.objects == {}
    assert segment_key("w0", 3) == "logs/w0/000003.log"
