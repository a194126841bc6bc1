"""A tool's lease is renewed beside its work, and a lost one is heard of at the next look."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from relit import driving as module
from relit.driving import driving, renewing
from relit.reading import RunReader
from relit_storage.errors import FencedError, StoreUnavailableError
from relit_storage.run.held_lease import THREAD
from relit_storage.run.lease import Lease, read_lease
from relit_storage.stores.memory import MemoryStore


class LeaseStore(MemoryStore):
    """Says when a lease is renewed; while it is away, none can be."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed, self.refused = threading.Event(), threading.Event()
        self.away = False

    def put(self, key: str, data: bytes) -> None:
        """A lease is taken by another verb, so that this one renews or releases it."""
        if "lease/" in key and self.away:
            self.refused.set()
            raise StoreUnavailableError(url=self.url, key=key, cause="away")
        super().put(key, data)
        if "lease/" in key:
            self.renewed.set()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> LeaseStore:
    monkeypatch.setattr(module, "LEASE_S", 0.04)
    return LeaseStore()


@pytest.fixture
def reader(store: LeaseStore) -> Iterator[RunReader]:
    yield RunReader(store, "default/r")
    assert renewers() == [], "the thread ends with the work"


def renewers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def overtake(reader: RunReader) -> None:
    """A supervisor whose clock is ahead of ours."""
    Lease.take(reader.store, "r", "someone", time.time() + 99.0, 60.0)


def test_a_lease_is_renewed_while_the_work_is_silent(store: LeaseStore, reader: RunReader) -> None:
    with driving(reader, "import"):
        for _ in range(3):
            store.renewed.clear()
            assert store.renewed.wait(30.0)
    lease = read_lease(reader.store)
    assert lease is not None and lease.released


def test_a_store_that_comes_back_is_tried_again(store: LeaseStore, reader: RunReader) -> None:
    with driving(reader, "import") as held:
        store.away = True
        assert store.refused.wait(30.0)
        store.away = False
        store.renewed.clear()
        assert store.renewed.wait(30.0)
        held.confirm()


def test_a_lease_that_the_thread_finds_lost_ends_the_work(reader: RunReader) -> None:
    with driving(reader, "import") as held:
        overtake(reader)
        for thread in renewers():
            thread.join(30.0)
        for look in (held.renew, held.confirm, lambda: renewing(held, lambda count: None)(1)):
            with pytest.raises(FencedError, match="lease epoch 1 is over"):
                look()


def test_what_is_done_once_only_is_confirmed_first(
    reader: RunReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_S", 60.0)
    with driving(reader, "import") as held:
        overtake(reader)
        held.renew()  # not due, so it looks at nothing
        for look in (held.confirm, held.renew):
            with pytest.raises(FencedError, match="lease epoch 1 is over"):
                look()


@pytest.mark.parametrize("fails", [False, True])
def test_a_release_that_fails_hides_nothing(
    store: LeaseStore, reader: RunReader, fails: bool
) -> None:
    with contextlib.ExitStack() as stack:
        if fails:
            stack.enter_context(pytest.raises(KeyError, match="the first error"))
        stack.enter_context(driving(reader, "rm"))
        store.away = True
        if fails:
            raise KeyError("the first error")
    assert store.refused.is_set()
