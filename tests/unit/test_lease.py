"""Two supervisors and one run: at most one drives it, whatever the store does to its calls."""

from __future__ import annotations

import threading

import pytest
from faulty_store import FAULTS, Fault, FaultyStore, every_call

from relit_storage.errors import FencedError, LeaseHeldError, StoreError, StoreUnavailableError
from relit_storage.run.layout import lease_key
from relit_storage.run.lease import MARGIN_S, Lease, LeaseRecord, read_lease
from relit_storage.stores.local import LocalStore
from relit_storage.stores.memory import MemoryStore

TTL_S = 15.0


def take(store: object, holder: str, now: float) -> Lease:
    return Lease.take(store, "run-1", holder, now, TTL_S)  # type: ignore[arg-type]


def test_epochs_count_supervisor_lives() -> None:
    store = MemoryStore()
    assert read_lease(store) is None
    assert take(store, "a", 100.0).epoch == 1
    assert take(store, "a", 101.0).epoch == 2, "the same holder, re-created, takes at once"
    record = read_lease(store)
    assert record is not None
    assert (record.run, record.epoch, record.holder) == ("run-1", 2, "a")


@pytest.mark.parametrize(
    ("now", "allowed"),
    [
        (100.0, False),
        (100.0 + TTL_S, False),
        (99.99 + TTL_S + MARGIN_S, False),  # our clock may run ahead of the holder's
        (100.0 + TTL_S + MARGIN_S, True),
        (50.0, False),  # our clock is far behind: the lease looks young, keep off
    ],
)
def test_another_takes_only_after_expiry_and_margin(now: float, allowed: bool) -> None:
    store = MemoryStore()
    take(store, "a", 100.0)
    if allowed:
        assert take(store, "b", now).epoch == 2
        return
    with pytest.raises(LeaseHeldError) as caught:
        take(store, "b", now)
    assert caught.value.holder == "a"
    assert caught.value.expires_in_s > 0


def test_renewing_keeps_others_away_and_release_lets_them_in() -> None:
    store = MemoryStore()
    lease = take(store, "a", 100.0)
    lease.renew(110.0)
    with pytest.raises(LeaseHeldError):
        take(store, "b", 120.0)
    lease.release(121.0)
    assert not lease.valid(121.0)
    assert take(store, "b", 121.0).epoch == 2


def test_old_holder_is_fenced_and_changes_nothing() -> None:
    store = MemoryStore()
    old = take(store, "a", 100.0)
    assert not old.valid(100.0 + TTL_S), "it must stop before another may start"
    new = take(store, "b", 200.0)
    with pytest.raises(FencedError) as caught:
        old.renew(201.0)
    assert (caught.value.ours, caught.value.newest) == (1, 2)
    old.release(202.0)
    assert read_lease(store) == new.record


def test_late_renewal_after_the_takeover_does_no_harm() -> None:
    """The old holder looked before the takeover and writes after it: its own epoch's key."""
    store = MemoryStore()
    old = take(store, "a", 100.0)
    new = take(store, "b", 200.0)
    store.put(lease_key(1), old.record.to_bytes())
    assert read_lease(store) == new.record


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"epoch": 7}', b'{"v": 1}'])
def test_unreadable_record_counts_as_expired(garbage: bytes) -> None:
    store = MemoryStore()
    store.put(lease_key(7), garbage)
    store.put("lease/notes.txt", b"someone else's file")
    assert take(store, "b", 0.0).epoch == 8


def test_record_survives_the_round_trip() -> None:
    record = take(MemoryStore(), "a", 1.5).record
    assert LeaseRecord.from_bytes(record.to_bytes()) == record


def test_sixteen_takers_one_winner_per_epoch(tmp_path: object) -> None:
    store = LocalStore(str(tmp_path))
    barrier, won, held = threading.Barrier(16), [], []

    def run(rank: int) -> None:
        barrier.wait()
        try:
            won.append(take(store, f"holder-{rank}", 100.0).epoch)
        except LeaseHeldError:
            held.append(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (won, len(held)) == ([1], 15)


def _repeat(act: object) -> None:
    """What a caller does: try again after an unavailable store."""
    try:
        act()  # type: ignore[operator]
    except StoreUnavailableError:
        act()  # type: ignore[operator]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_failing_once(fault: Fault) -> None:
    """Take, renew, release by one; then another takes: epochs rise, one holder at a time."""

    def scenario(store: FaultyStore) -> None:
        leases: list[Lease] = []
        _repeat(lambda: leases.append(take(store, "a", 100.0)))
        first = leases[-1]
        _repeat(lambda: first.renew(105.0))
        assert first.valid(105.0)
        with pytest.raises((LeaseHeldError, StoreError)):
            take(store.inner, "b", 106.0)
        _repeat(lambda: first.release(107.0))
        _repeat(lambda: leases.append(take(store, "b", 107.0)))
        assert leases[-1].epoch > first.epoch
        record = read_lease(store.inner)
        assert record is not None
        assert record.holder == "b"

    assert every_call(MemoryStore, scenario, fault) >= 8


def test_take_gives_up_loudly_when_it_always_loses() -> None:
    class Busy(MemoryStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            return False

    with pytest.raises(StoreUnavailableError, match="racing"):
        take(Busy(), "a", 0.0)


def test_a_record_nested_beyond_reading_counts_as_expired() -> None:
    store = MemoryStore()
    store.put(lease_key(3), b"[" * 100_000)
    found = read_lease(store)
    assert found is not None
    assert (found.epoch, found.released) == (3, True)
