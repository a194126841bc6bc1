"""`auto` in the manager: what it hears becomes a spacing that ranks, log and status are told."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_harness import Bench, make_config

from relit_platform.control.cadence_desk import CadenceDesk
from relit_platform.control.history import History
from relit_platform.control.journal import Journal
from relit_platform.facts import Fact, RowBatch, RunHistory
from relit_platform.machines.cadence import Cadence

BOTH = {"disk_auto": True, "object_auto": True, "expected_mtbf_s": 36_000.0}


class Desk:
    """A desk whose journal and clock are at hand; a step takes a second."""

    def __init__(self, **checkpoint: Any) -> None:
        self.now_s = 1000.0
        self.journal = Journal(lambda: self.now_s)
        self.spaced: list[float] = []
        self.desk = CadenceDesk(
            config=make_config(checkpoint={**BOTH, **checkpoint}),
            journal=self.journal,
            space=self.spaced.append,
            clock=lambda: self.now_s,
        )
        self.journal.heard = self.desk.heard
        self.step = 0

    def train(self, steps: int) -> None:
        rows = []
        for _ in range(steps):
            self.step += 1
            self.now_s += 1.0
            rows.append({"step": self.step, "generation": 1, "at_s": self.now_s, "loss": 0.5})
        self.desk.rows(rows)

    def commit(self, tier: str, seconds: float) -> None:
        data = {"tier": tier, "seconds": seconds, "bytes": 10}
        self.journal.say("ckpt.committed", data, generation=1, step=self.step)
        self.train(2)

    def saves(self, count: int, seconds: float = 0.5) -> Desk:
        for _ in range(count):
            self.train(20)
            self.commit("disk", seconds)
        return self

    def events(self) -> list[Fact]:
        facts = self.journal.outbox.drain(0, {}).facts
        return [fact for fact in facts if fact.kind == "ckpt.respaced"]


def test_a_spacing_is_found_told_and_shown() -> None:
    it = Desk()
    assert it.desk.disk_every_s == 0.0 and it.desk.status() is None
    it.saves(3)
    it.commit("object", 4.0)
    it.saves(2)
    event = it.events()[-1]
    assert event.data["disk_every_s"] == pytest.approx(it.desk.disk_every_s, rel=1e-5)
    assert event.data["reason"] and event.src == "manager"
    status = it.desk.status()
    assert status is not None and status["reason"] == event.data["reason"]
    assert status["disk_every_s"] == pytest.approx(it.desk.disk_every_s, abs=1e-3)
    # A step is on disk a moment before or after it is due: half a spacing early is on time.
    early_s = status["object_every_s"] - status["disk_every_s"] / 2
    assert it.spaced[-1] == pytest.approx(early_s, abs=1e-2)


def test_where_nothing_is_automatic_nothing_happens() -> None:
    it = Desk(disk_auto=False, object_auto=False).saves(6)
    it.desk.remember(RunHistory(spacing={"disk_every_s": 5.0, "reason": "x"}))
    assert it.desk.disk_every_s == 0.0 and it.desk.status() is None
    assert it.events() == [] and it.spaced == []


def test_only_what_followed_a_loss_is_a_failure() -> None:
    it = Desk().saves(4)
    before = len(it.events())

    def formed(generation: int, tier: str) -> None:
        data = {"generation": generation, "tier": tier, "start_step": 0}
        it.journal.say("generation.formed", data, generation=generation)

    it.now_s += 3600.0
    formed(2, "disk")  # a resume
    assert len(it.events()) == before
    for generation in range(3, 9):
        it.journal.say("generation.lost", {}, generation=generation - 1)
        formed(generation, "disk")
    it.now_s += 3600.0
    it.journal.say("epoch.started", {"ended": ["w1"]}, generation=8)
    formed(9, "disk")
    told = it.events()[before:]
    assert told and told[-1].generation == 9
    assert told[-1].data["failures"] == {"disk": 7}


@pytest.mark.parametrize(
    "spacing",
    [{}, {"disk_every_s": "x", "object_every_s": -1}, {"disk_every_s": float("inf")}],
)
def test_a_spacing_that_nobody_can_read_is_none(spacing: dict[str, Any]) -> None:
    it = Desk()
    it.desk.remember(RunHistory(spacing=spacing))
    assert it.desk.disk_every_s == 0.0 and it.spaced == []


def committing(bench: Bench, step: int) -> None:
    """The machine's own way of saying that a step is on disk, and the rows of the steps around."""
    bench.coordinator._journal.say(
        "ckpt.committed",
        {"tier": "disk", "seconds": 0.2, "bytes": 1},
        generation=1,
        step=step,
    )


def rows(bench: Bench, first: int, last: int) -> None:
    batch = tuple(
        {"step": step, "loss": 0.5, "at_s": 1000.0 + step} for step in range(first, last + 1)
    )
    bench.coordinator.rows(RowBatch(generation=1, rank=0, rows=batch))


def test_rank_0_the_status_and_the_next_manager_get_it() -> None:
    bench = Bench(checkpoint=BOTH).start("a", "b")
    assert bench.coordinator.spacing() == 0.0
    for save in range(1, 6):
        rows(bench, save * 10 - 9, save * 10)
        committing(bench, save * 10 - 2)
    found_s = bench.coordinator.spacing()
    assert found_s > 0
    event = bench.facts("ckpt.respaced")[-1]
    assert bench.coordinator.status()["spacing"]["reason"] == event.data["reason"]
    bench.again()
    assert bench.coordinator.spacing() == 0.0
    told = {**event.data, "object_every_s": 100.0}
    bench.coordinator.start_epoch(2, RunHistory(spacing=told, generation=1))
    assert bench.coordinator.spacing() == pytest.approx(found_s, rel=1e-5)
    wanted = bench.coordinator._saves.book.limits.object
    assert wanted.every_s == pytest.approx(100.0 - found_s / 2, rel=1e-4)
    assert wanted == Cadence(every_s=wanted.every_s), "and no longer every 20 steps"


def test_the_run_directory_says_what_failed_how_long_it_trained_and_the_spacing() -> None:
    history = History()
    for kind, data in (
        ("generation.formed", {"generation": 1, "start_step": 0, "tier": ""}),
        ("generation.formed", {"generation": 2, "start_step": 5, "tier": "disk"}),
        ("incident.closed", {"id": 1}),
        ("generation.formed", {"generation": 3, "start_step": 7, "tier": "memory"}),
        ("incident.closed", {"id": 2}),
        ("ckpt.respaced", {"disk_every_s": 9.0, "reason": "old"}),
        ("ckpt.respaced", {"disk_every_s": 12.0, "reason": "new"}),
    ):
        history.add({"kind": kind, "data": data})
    for step, generation, at_s in ((1, 1, 10.0), (2, 1, 11.5), (2, 1, 11.5), (3, 2, 90.0)):
        history.add_row({"step": step, "generation": generation, "at_s": at_s})
    told = history.for_manager()
    assert told.failures == {"disk": 1, "memory": 1} and told.recoveries == 2
    assert told.trained_s == 1.5
    assert told.spacing == {"disk_every_s": 12.0, "reason": "new"}


def test_a_node_that_may_write_only_so_fast_gets_the_time_for_it() -> None:
    plain = Bench().coordinator._saves.book.limits.persist_deadline_s
    capped = {"disk_bytes_per_s": 1 << 20, "memory_budget_bytes": 1 << 30}
    slow = Bench(checkpoint=capped).coordinator._saves.book.limits.persist_deadline_s
    assert slow == plain + 1024.0
