"""A supervisor dies anywhere in a recovery: the next one tells each fact once, and one incident."""

from __future__ import annotations

import json
from typing import Any

import pytest
from coordinator_harness import make_config
from test_incident import BEFORE, KILL, done

from relit_platform.control.outbox import Outbox
from relit_platform.control.pump import Pump
from relit_platform.facts import Fact
from relit_storage.errors import StoreError
from relit_storage.run.event_log import read_events
from relit_storage.run.lease import Lease
from relit_storage.stores.memory import MemoryStore

FACTS = [*BEFORE, *KILL, done(32, 16.0)]
TTL_S = 30.0


class Manager:
    """Outlives its supervisors; keeps what they did not say they had written."""

    def __init__(self, now_s: float = 2.0) -> None:
        self.outbox = Outbox(now_s)

    @property
    def link(self) -> Manager:
        return self

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "start_epoch":
            self.epoch = args[0]
            return self.outbox.raise_above(args[1].told)
        return self.outbox.drain(args[0], {"epoch": self.epoch, "manager_pid": 7}, args[1])

    epoch = 0


class Away(MemoryStore):
    """Takes no incident."""

    def put(self, key: str, data: bytes) -> None:
        if key.startswith("incidents/"):
            raise StoreError(url=self.url, key=key, cause="away")
        super().put(key, data)


def supervise(store: MemoryStore, manager: Manager, epoch: int) -> Pump:
    lease = Lease.take(store, "r", f"supervisor-{epoch}", 100.0 * epoch, TTL_S)
    pump = Pump(store=store, config=make_config(), manager=manager, lease=lease)  # type: ignore[arg-type]
    manager.call("start_epoch", epoch, pump.history())
    return pump


def records(store: MemoryStore) -> list[dict[str, Any]]:
    return [json.loads(store.get(key)) for key in store.list("incidents/")]


def taken_over(cut: int, first: MemoryStore, *, written: bool = True) -> MemoryStore:
    """The first supervisor hears `cut` facts and dies; the second hears whatever it is told."""
    manager, second = Manager(), MemoryStore()
    second._objects = first._objects  # the same store, seen by the one that comes after
    for fact in FACTS[:cut]:
        manager.outbox.add(fact)
    pump = supervise(first, manager, 1)
    try:
        pump.tick(101.0, 101.0)
        if written:
            pump._flush(101.0, force=True)
    except StoreError:
        assert isinstance(first, Away)
    for fact in FACTS[cut:]:
        manager.outbox.add(fact)
    supervise(second, manager, 2).close("SUCCEEDED", "", {})
    return second


@pytest.mark.parametrize("store", [MemoryStore, Away])
@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("cut", range(len(FACTS) + 1))
def test_each_fact_once_and_one_incident(cut: int, written: bool, store: type[MemoryStore]) -> None:
    found = taken_over(cut, store(), written=written)
    told = [event["kind"] for event in read_events(found) if event.get("number")]
    assert told == [fact.kind for fact in FACTS]
    [record] = records(found)
    [whole] = records(taken_over(0, MemoryStore()))
    for field in ("id", "step", "lost", "world", "generation", "victims", "headline"):
        assert record[field] == whole[field], field
    assert record["phases"] == pytest.approx(whole["phases"], abs=1e-5)
    assert sum(event["kind"] == "incident.closed" for event in read_events(found)) == 1


def test_an_incident_that_the_end_closed_stays_closed() -> None:
    manager, store = Manager(), MemoryStore()
    for fact in FACTS[:5]:
        manager.outbox.add(fact)
    supervise(store, manager, 1).close("FAILED", "no more", {})
    assert [record["recovered"] for record in records(store)] == [False]
    manager.outbox.add(done(31, 200.0, 9))
    supervise(store, manager, 2).close("SUCCEEDED", "", {})
    assert len(records(store)) == 1


@pytest.mark.parametrize("clock_s", [1.0, 2.0, 3.0])
@pytest.mark.parametrize(("after", "incidents"), [(True, 1), (False, 0)])
def test_manager_and_supervisor_lost_together(after: bool, incidents: int, clock_s: float) -> None:
    """Nobody is left who knew the workers; that a supervisor ran until now is in the log."""
    store = MemoryStore()
    manager = Manager()
    for fact in BEFORE:
        manager.outbox.add(fact)
    first = supervise(store, manager, 1)
    first.tick(101.0, 101.0)
    first._flush(101.0, force=True)
    manager = Manager(clock_s)
    pump = supervise(store, manager, 2)
    pump.fact(Fact(kind="run.epoch", at_s=20.0, src="supervisor", data={"after": after}))
    for fact in KILL[3:]:
        manager.outbox.add(fact)
    pump.close("SUCCEEDED", "", {})
    told = [event["kind"] for event in read_events(store) if event.get("number")]
    assert told == [fact.kind for fact in [*BEFORE, *KILL[3:]]]
    found = records(store)
    assert len(found) == incidents
    assert all("the supervisor was lost" in record["headline"] for record in found)
