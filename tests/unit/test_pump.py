"""The pump between manager and run directory: a supervisor that was taken over writes no more."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from coordinator_harness import make_config

from relit_platform.control import outbox
from relit_platform.control import pump as module
from relit_platform.control.outbox import Outbox
from relit_platform.control.pump import Pump
from relit_platform.facts import Drained, Fact
from relit_storage.errors import FencedError
from relit_storage.run import event_log, layout, segments
from relit_storage.run.event_log import read_events, read_rows
from relit_storage.run.lease import Lease, read_lease
from relit_storage.stores.memory import MemoryStore

TTL_S = 30.0


@dataclass
class Manager:
    """A manager of some epoch that has one fact and one row to tell."""

    epoch: int = 1
    steps: tuple[int, ...] = (1,)
    calls: list[str] = field(default_factory=list)
    drained: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def link(self) -> Manager:
        return self

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(method)
        self.drained += [args] if method == "drain" else []
        fact = Fact(kind="told", at_s=time.time(), src="manager")
        status = {"epoch": self.epoch, "manager_pid": 7, "phase": "running"}
        rows = tuple(
            {"step": step, "loss": 1.0, "generation": 1, "at_s": 0.0} for step in self.steps
        )
        return Drained(facts=(fact,), rows=rows, next=1, status=status)

    def send(self, method: str, *args: Any) -> None:
        self.calls.append(method)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def make_pump(store: MemoryStore, manager: Manager, monkeypatch: pytest.MonkeyPatch) -> Pump:
    monkeypatch.setattr(module, "TICK_S", 0.001)
    lease = Lease.take(store, "r", "one", time.time(), TTL_S)
    pump = Pump(store=store, config=make_config(), manager=manager, lease=lease)  # type: ignore[arg-type]
    pump._lease._every_s = 0.001
    return pump


def run_until_fenced(pump: Pump) -> None:
    fenced = threading.Event()
    pump.keep_lease(fenced.set)
    pump.start()
    assert fenced.wait(10.0)


def test_what_a_newer_epoch_tells_is_not_taken(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager(epoch=2)
    pump = make_pump(store, manager, monkeypatch)
    run_until_fenced(pump)
    assert pump.fenced == 2
    assert manager.calls == ["drain"]
    assert (read_events(store), read_rows(store)) == ([], [])


def test_a_lost_lease_ends_the_rounds(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pump = make_pump(store, Manager(), monkeypatch)
    Lease.take(store, "r", "two", time.time() + 2 * TTL_S, TTL_S)
    run_until_fenced(pump)
    assert pump.fenced == 2


def test_the_next_epoch_is_no_rival_of_the_one_before(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is renewed all the time; between taking the new one and knowing of it, too."""
    manager = Manager()
    pump = make_pump(store, manager, monkeypatch)
    pump.keep_lease(lambda: None)
    pump.start()

    def take() -> Lease:
        lease = Lease.take(store, "r", "one", time.time(), TTL_S)
        manager.epoch = lease.epoch  # no round asks it meanwhile
        time.sleep(0.1)  # many renewals would be due
        return lease

    for epoch in (2, 3):
        assert pump.next_epoch(take).epoch == epoch
        before_s = read_renewed_s(store)
        wait_until(lambda since_s=before_s: read_renewed_s(store) > since_s)  # type: ignore[misc]
    assert pump.fenced == 0
    pump.close("SUCCEEDED", "", {})


def read_renewed_s(store: MemoryStore) -> float:
    lease = read_lease(store)
    assert lease is not None
    return lease.renewed_at_s


def test_the_lease_is_renewed_while_a_round_waits_for_the_manager(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, goes_on = threading.Event(), threading.Event()

    class Slow(Manager):
        def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            waits.set()
            assert goes_on.wait(10.0)
            return super().call(method, *args, **kwargs)

    pump = make_pump(store, Slow(), monkeypatch)
    pump.keep_lease(lambda: None)
    pump.start()
    assert waits.wait(10.0)
    before_s = read_renewed_s(store)
    wait_until(lambda: read_renewed_s(store) > before_s)
    goes_on.set()
    pump.close("SUCCEEDED", "", {})


@pytest.mark.parametrize("surprise", [ValueError("no actor"), KeyError("status"), OSError("disk")])
def test_no_surprise_ends_the_rounds(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, surprise: Exception
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.001)
    raised = [surprise, surprise]

    class Odd(Manager):
        def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            if raised:
                raise raised.pop()
            return super().call(method, *args, **kwargs)

    pump = make_pump(store, Odd(), monkeypatch)
    pump.start()
    wait_until(lambda: bool(store.size(layout.STATUS)))
    pump.close("SUCCEEDED", "", {})


def test_a_run_without_workers_says_why(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = {"phase": "forming"}

    class Phased(Manager):
        def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            told = super().call(method, *args, **kwargs)
            told.status.update(phase)
            return told

    pump = make_pump(store, Phased(), monkeypatch)
    pump.set_state("RUNNING")
    told = [("forming", "2 workers have no place"), ("running", ""), ("recovering", "")]
    for number, (name, reason) in enumerate(told):
        phase["phase"] = name
        pump._why_waiting = lambda said=reason: said  # type: ignore[misc]
        pump.tick(time.time(), time.monotonic() + 10.0 * number)
        assert json.loads(store.get(layout.STATUS))["reason"] == reason


def test_the_lease_is_renewed_until_the_result_is_there_and_no_rival_gets_ours(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pump = make_pump(store, Manager(), monkeypatch)
    pump.keep_lease(lambda: None)
    real, asked = store.put, [0]

    def put(key: str, data: bytes) -> None:
        if key == layout.STATUS and not asked[0]:
            asked[0] += 1
            before_s = read_renewed_s(store)
            wait_until(lambda: read_renewed_s(store) > before_s)  # the last words take their time
            Lease.take(store, "r", "two", time.time() + 2 * TTL_S, TTL_S)
            wait_until(lambda: pump._lease.lost is not None)
        real(key, data)

    monkeypatch.setattr(store, "put", put)
    with pytest.raises(FencedError):
        pump.close("SUCCEEDED", "", {})
    assert asked == [1] and store.size(layout.RESULT) is None


def test_a_fact_that_cannot_be_understood_is_passed_over(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pump = make_pump(store, Full(items=3, at_once=10), monkeypatch)
    real = pump._incidents.add

    def add(fact: Fact) -> Any:
        if fact.step == 2:
            raise KeyError("rank")
        return real(fact)

    monkeypatch.setattr(pump._incidents, "add", add)
    pump.close("SUCCEEDED", "", {})
    assert [e["step"] for e in read_events(store) if e["kind"] == "told"] == [1, 2, 3]
    assert store.size(layout.RESULT)


def test_fenced_by_another_writer_of_its_own_epoch(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rival(Manager):
        def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            raise FencedError(what="epoch", ours=1, newest="another writer of this epoch")

    pump = make_pump(store, Rival(), monkeypatch)
    run_until_fenced(pump)
    assert pump.fenced == 2


def test_rows_without_room_stay_with_the_manager(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is far behind: what is not taken is not said to be written, and asked for again."""
    manager = Manager(steps=(1, 2))
    pump = make_pump(store, manager, monkeypatch)
    monkeypatch.setattr(segments, "MAX_PENDING_BYTES", 0)
    pump.tick(time.time(), time.monotonic())
    monkeypatch.undo()
    assert (manager.drained, pump.history().rows_whole_to) == ([(0, 0)], 0)
    for later_s in (10.0, 20.0, 30.0):
        pump.tick(time.time(), time.monotonic() + later_s)
    assert (manager.drained[1], manager.drained[-1]) == ((0, 0), (1, 1))
    assert [row["step"] for row in read_rows(store)] == [1, 2]


def test_rows_that_were_not_written_are_not_taken_for_written(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those before the newest one that are missing, nor those that no segment has yet."""
    pump = make_pump(store, Manager(steps=(1, 2, 5)), monkeypatch)
    pump.tick(time.time(), time.monotonic() - 1e6)  # nothing is due
    assert pump.history().rows_whole_to == 0
    pump.tick(time.time(), time.monotonic())
    assert (pump.history().last_row_step, pump.history().rows_whole_to) == (5, 2)


def test_a_clock_that_is_set_back_does_not_stop_the_rounds(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pump = make_pump(store, Manager(), monkeypatch)
    monkeypatch.setattr(module, "STATUS_EVERY_S", 0.01)
    pump.start()

    def updated_at_s() -> float:
        found = json.loads(store.get(layout.STATUS)) if store.size(layout.STATUS) else {}
        return float(found.get("updated_at_s", 0.0))

    wait_until(lambda: updated_at_s() > 0)
    set_s = time.time() - 3600.0
    monkeypatch.setattr(time, "time", lambda: set_s)
    wait_until(lambda: updated_at_s() == set_s)
    pump.close("SUCCEEDED", "", {})


class Full(Manager):
    """A manager with more to tell than the pump has room for, batch by batch."""

    def __init__(self, items: int, at_once: int) -> None:
        super().__init__()
        self.outbox = Outbox(1.0)
        self.at_once = at_once
        for step in range(1, items + 1):
            self.outbox.add(Fact(kind="told", at_s=float(step), src="manager", step=step))
            self.outbox.add({"step": step, "loss": 1.0, "generation": 1, "at_s": float(step)})

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        status = {"epoch": self.epoch, "manager_pid": 7, "phase": "done"}
        return self.outbox.drain(args[0], status, args[1]) if method == "drain" else None


@pytest.mark.parametrize(
    ("at_once", "room_bytes"), [(1, 600), (4, 1500), (7, 3000), (40, 9000), (4096, 16 << 20)]
)
def test_what_had_no_room_is_written_at_the_end(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, at_once: int, room_bytes: int
) -> None:
    monkeypatch.setattr(outbox, "MAX_PER_DRAIN", at_once)
    monkeypatch.setattr(segments, "MAX_PENDING_BYTES", room_bytes)
    monkeypatch.setattr(event_log, "MAX_PENDING_BYTES", room_bytes)
    pump = make_pump(store, Full(items=50, at_once=at_once), monkeypatch)
    pump.close("SUCCEEDED", "", {})
    told = [event["step"] for event in read_events(store) if event["kind"] == "told"]
    assert told == list(range(1, 51))
    assert [row["step"] for row in read_rows(store)] == list(range(1, 51))


@pytest.mark.parametrize(("at_once", "room_bytes"), [(40, 600), (50, 1500)])
def test_rows_of_a_batch_that_never_fits_are_written_all_the_same(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, at_once: int, room_bytes: int
) -> None:
    monkeypatch.setattr(segments, "MAX_PENDING_BYTES", room_bytes)
    pump = make_pump(store, Full(items=50, at_once=at_once), monkeypatch)
    pump.close("SUCCEEDED", "", {})
    assert [row["step"] for row in read_rows(store)] == list(range(1, 51))


@pytest.mark.parametrize(
    ("sent", "stops"),
    [
        (("1-stop",), True),
        (("1-stop", "2-resume"), False),
        (("1-resume", "2-stop"), True),
        (("1-resume", "1-stop"), True),
        (("1-stop", "2-resume", "2-stop"), True),
        (("1-stop", "2-stop", "3-resume", "3-resize"), False),
    ],
)
def test_every_command_is_heard_though_two_have_one_number(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, sent: tuple[str, ...], stops: bool
) -> None:
    manager = Manager()
    pump = make_pump(store, manager, monkeypatch)
    keys = [layout.command_key(int(n), verb) for n, verb in (one.split("-") for one in sent)]
    for key in keys:
        store.put(key, b"{}")
    for later_s in (0.0, 10.0):
        pump.tick(time.time(), time.monotonic() + later_s)
    assert ("request_stop" in manager.calls) is stops
    pump.close("STOPPED", "", {})
    acked = [e["data"]["command"] for e in read_events(store) if e["kind"] == "control.acked"]
    assert sorted(acked) == sorted(keys)


def wait_until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20.0
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
