"""The commit log: one commit per step, nobody after a newer epoch, whatever the store loses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from faulty_store import FAULTS, Fault, FaultyStore, every_call

from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.checkpoint.log_records import LogRecord, fold
from relit_storage.errors import (
    CommitConflictError,
    FencedError,
    ManifestError,
    RetentionError,
    StoreUnavailableError,
)
from relit_storage.run.layout import log_key, manifest_key
from relit_storage.stores.local import LocalStore
from relit_storage.stores.memory import MemoryStore


def commit(
    log: CommitLog, step: int, *, epoch: int = 1, generation: int = 1, sha: str = "s"
) -> Any:
    return log.append_commit(
        epoch=epoch,
        generation=generation,
        step=step,
        manifest_key=manifest_key(step, generation),
        manifest_sha256=sha,
        manifest_bytes=10,
        at_s=1.0,
    )


def steps(log: CommitLog) -> list[tuple[int, int]]:
    return [record.identity for record in log.replay().commits]


def test_empty_log() -> None:
    view = CommitLog(MemoryStore()).replay()
    assert (view.epoch, view.generation, view.commits, view.next_seq) == (0, 0, (), 1)
    assert view.newest is None


def test_replay_by_another_instance() -> None:
    store = MemoryStore()
    log = CommitLog(store)
    assert log.append_epoch(1, holder="a", at_s=0.5).seq == 1
    first = commit(log, 100)
    commit(log, 200)
    log.append_retire(epoch=1, generation=1, step=100, at_s=2.0)
    view = CommitLog(store).replay()
    assert view == log.replay()
    assert (view.epoch, view.generation, view.next_seq) == (1, 1, 5)
    assert steps(log) == [(200, 1)]
    assert view.newest is not None
    assert view.newest.manifest_key == manifest_key(200, 1)
    assert first.to_bytes() == store.get(log_key(2))
    assert [record.identity for record in view.retired] == [(100, 1)]


@pytest.mark.parametrize(
    "act",
    [
        lambda log: log.append_epoch(1, at_s=2.0),
        lambda log: commit(log, 300, epoch=1),
        lambda log: log.append_retire(epoch=1, generation=1, step=100, at_s=2.0),
    ],
)
def test_older_epoch_is_fenced(act: Callable[[CommitLog], object]) -> None:
    store = MemoryStore()
    zombie = CommitLog(store)
    zombie.append_epoch(1, at_s=0.0)
    commit(zombie, 100)
    commit(zombie, 200)
    CommitLog(store).append_epoch(2, at_s=1.0)
    with pytest.raises(FencedError) as caught:
        act(zombie)
    assert (caught.value.ours, caught.value.newest) == (1, 2)
    assert CommitLog(store).replay().next_seq == 5


def test_zombie_that_looked_before_the_takeover_loses_the_slot() -> None:
    """The takeover lands exactly between the zombie's look and its write."""

    class Ambush(MemoryStore):
        armed = False

        def put_if_absent(self, key: str, data: bytes) -> bool:
            if self.armed:
                self.armed = False
                CommitLog(self).append_epoch(2, at_s=1.0)
            return super().put_if_absent(key, data)

    store = Ambush()
    zombie = CommitLog(store)
    zombie.append_epoch(1, at_s=0.0)
    store.armed = True
    with pytest.raises(FencedError):
        commit(zombie, 100)
    assert steps(CommitLog(store)) == []


def test_one_commit_per_step_and_generation_order() -> None:
    log = CommitLog(MemoryStore())
    first = commit(log, 100, generation=2, sha="x")
    assert commit(log, 100, generation=2, sha="x") == first, "repeating is harmless"
    with pytest.raises(CommitConflictError):
        commit(log, 100, generation=2, sha="y")
    with pytest.raises(FencedError, match="generation 1"):
        commit(log, 200, generation=1)
    commit(log, 100, generation=3, sha="z")
    view = log.replay()
    assert steps(log) == [(100, 3)]
    assert [record.identity for record in view.superseded] == [(100, 2)]


def test_retiring() -> None:
    log = CommitLog(MemoryStore())
    commit(log, 100)
    with pytest.raises(RetentionError, match="newest"):
        log.append_retire(epoch=1, generation=1, step=100, at_s=1.0)
    with pytest.raises(RetentionError, match="no such"):
        log.append_retire(epoch=1, generation=1, step=7, at_s=1.0)
    commit(log, 200)
    gone = log.append_retire(epoch=1, generation=1, step=100, at_s=1.0)
    assert log.append_retire(epoch=1, generation=1, step=100, at_s=9.0) == gone
    with pytest.raises(CommitConflictError, match="retired"):
        commit(log, 100)
    assert steps(log) == [(200, 1)]


def test_superseded_commit_can_be_retired() -> None:
    log = CommitLog(MemoryStore())
    commit(log, 100, generation=1)
    commit(log, 100, generation=2)
    log.append_retire(epoch=1, generation=1, step=100, at_s=1.0)
    assert steps(log) == [(100, 2)]
    assert log.replay().superseded == ()


def test_a_replaced_commit_never_comes_back_when_the_newer_one_is_retired() -> None:
    log = CommitLog(MemoryStore())
    commit(log, 100, generation=1)
    commit(log, 100, generation=2)
    commit(log, 200, generation=2)
    log.append_retire(epoch=1, generation=2, step=100, at_s=1.0)
    assert steps(log) == [(200, 2)], "what generation 1 committed was rolled back"
    assert [record.identity for record in log.replay().superseded] == [(100, 1)]
    log.append_retire(epoch=1, generation=1, step=100, at_s=1.0)
    assert log.replay().superseded == ()


def test_racing_writers_fill_slots_without_a_hole(tmp_path: object) -> None:
    store = LocalStore(str(tmp_path))
    barrier, records = threading.Barrier(8), []

    def run(rank: int) -> None:
        log = CommitLog(store)
        barrier.wait()
        for number in range(4):
            records.append(commit(log, rank * 10 + number))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record.seq for record in records) == list(range(1, 33))
    assert len(CommitLog(store).replay().commits) == 32


@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_failing_once(fault: Fault) -> None:
    """The caller repeats on error; each thing is in the log once, in order, torn slots apart."""

    def scenario(store: FaultyStore) -> None:
        logs = [CommitLog(store)]

        def repeat(act: Callable[[CommitLog], object]) -> None:
            try:
                act(logs[-1])
            except StoreUnavailableError:
                logs.append(CommitLog(store))  # as after a restart
                act(logs[-1])

        repeat(lambda log: log.append_epoch(1, at_s=0.0))
        repeat(lambda log: commit(log, 100))
        repeat(lambda log: commit(log, 200))
        repeat(lambda log: log.append_retire(epoch=1, generation=1, step=100, at_s=1.0))
        view = CommitLog(store.inner).replay()
        slots = [log_key(seq) for seq in range(1, view.next_seq)]
        assert store.inner.list("checkpoints/log/") == slots
        assert len(slots) - len(view.refused) == 4
        assert [record.identity for record in view.commits] == [(200, 1)]

    assert every_call(MemoryStore, scenario, fault) >= 9


def test_a_lost_answer_is_settled_in_the_same_append() -> None:
    store = FaultyStore(MemoryStore(), "lost", nth=3)  # list, get slot 1, create
    assert CommitLog(store).append_epoch(1, at_s=0.0).seq == 1
    assert store.fired
    assert store.inner.list("") == [log_key(1)]


def test_an_unreachable_store_ends_the_append() -> None:
    class Down(MemoryStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            raise StoreUnavailableError(url=self.url, key=key, cause="down")

    with pytest.raises(StoreUnavailableError, match="down"):
        commit(CommitLog(Down()), 1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a log record"),
        (b"[]", "not a log record"),
        (b'{"kind": "commit"}', "not a log record"),
        (b'{"kind": "x", "epoch": 1, "nonce": "n", "at_s": 1, "seq": 1}', "unknown kind"),
        (b'{"kind": "epoch", "epoch": -1, "nonce": "n", "at_s": 1, "seq": 1}', "epoch is -1"),
        (b'{"kind": "epoch", "epoch": 9, "nonce": "n", "at_s": 1, "seq": 4}', "slot 4"),
        (b'{"kind": "epoch", "epoch": 9, "nonce": "n", "at_s": 1, "seq": 1, "v": 2}', "version"),
    ],
)
def test_unreadable_slot_is_passed_over_and_said(data: bytes, reason: str) -> None:
    store = MemoryStore()
    store.put(log_key(1), data)
    log = CommitLog(store)
    commit(log, 100)
    view = log.replay()
    assert [seq for seq, _ in view.refused] == [1]
    assert reason in view.refused[0][1]
    assert view.epoch == 1
    assert steps(log) == [(100, 1)]


def test_a_stray_file_makes_no_hole() -> None:
    """A writer that has listed before the file came, and one that lists after it: one order."""
    store = MemoryStore()
    early = CommitLog(store)
    commit(early, 100)
    for name in (log_key(9), log_key(9).replace("9", "\u00b2"), log_key(10**20)):
        store.put(name, store.get(log_key(1)))
    assert commit(CommitLog(store), 200).seq == 2
    assert commit(early, 300).seq == 3
    for step in range(400, 1100, 100):
        commit(early, step)
    view = CommitLog(store).replay()
    assert [record.step for record in view.commits] == list(range(1000, 0, -100))
    assert [seq for seq, _ in view.refused][:1] == [9]


def test_a_missing_slot_keeps_its_place() -> None:
    store = MemoryStore()
    for step in (100, 200, 300):
        commit(CommitLog(store), step)
    store.delete(log_key(2))
    assert commit(CommitLog(store), 400).seq == 4
    assert steps(CommitLog(store)) == [(400, 1), (300, 1), (100, 1)]


def test_a_flipped_digit_is_no_other_record() -> None:
    """Another epoch, above all: it would shut out the run's own supervisor for ever."""
    store = MemoryStore()
    CommitLog(store).append_epoch(1, holder="a", at_s=0.0)
    data = store.get(log_key(1))
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            store.put(log_key(1), bytes(damaged))
            view = CommitLog(store).replay()
            assert (view.epoch, len(view.refused)) == (0, 1), damaged


def test_a_commit_points_into_its_own_step_only() -> None:
    for key in ("../../x", "/etc/passwd", manifest_key(101, 1), ""):
        record = LogRecord(
            kind="commit", epoch=1, nonce="n", at_s=1.0, generation=1, step=100, manifest_key=key
        )
        with pytest.raises(ManifestError, match="is not the manifest of step 100"):
            LogRecord.from_bytes(record.to_bytes(), "k")


@pytest.mark.parametrize("step", [2**63, 10**30])
def test_what_no_reader_would_take_is_not_written(step: int) -> None:
    log = CommitLog(MemoryStore())
    commit(log, 100)
    with pytest.raises(ManifestError, match="step is"):
        commit(log, step)
    view = log.replay()
    assert [record.step for record in view.commits] == [100] and not view.refused


def test_record_round_trip_is_canonical() -> None:
    record = LogRecord(kind="epoch", epoch=3, nonce="n", at_s=1.5, seq=9, holder="h")
    assert LogRecord.from_bytes(record.to_bytes(), "k") == record
    with pytest.raises(ManifestError, match="slot-key"):
        LogRecord.from_bytes(b"x", "slot-key")


def test_fold_is_independent_of_reading_order() -> None:
    records = [
        LogRecord(kind="commit", epoch=1, nonce=str(seq), at_s=1.0, seq=seq, generation=1, step=seq)
        for seq in range(1, 6)
    ]
    assert fold(records) == fold(reversed(records))
    assert [record.step for record in fold(records).commits] == [5, 4, 3, 2, 1]


def test_a_record_nested_beyond_reading_is_refused() -> None:
    store = MemoryStore()
    store.put(log_key(1), b"[" * 100_000)
    view = CommitLog(store).replay()
    assert (view.commits, len(view.refused)) == ((), 1)
