"""Incidents: what caused them, where the time went, and the sentence that says so."""

from __future__ import annotations

from typing import Any

import pytest

from relit_platform.facts import Fact
from relit_platform.machines.incident import IncidentState, advance, finish


def fact(kind: str, at_s: float, generation: int = 1, **data: Any) -> Fact:
    return Fact(kind=kind, at_s=at_s, src="manager", generation=generation, data=data)


def formed(at_s: float, generation: int, start: int, **data: Any) -> Fact:
    values = {"world": 2, "source": "member", "source_rank": 0, "filled_at_s": at_s, **data}
    values |= {"generation": generation, "start_step": start}
    return Fact(
        kind="generation.formed", at_s=at_s, src="manager", generation=generation, data=values
    )


def exited(rank: int | None, at_s: float, **data: Any) -> Fact:
    values = {"pid": 7, "last_phase": "backward", "node_id": "node-b", "completed_step": 30, **data}
    return fact("worker.exited", at_s, rank=rank, noticed_at_s=at_s + 0.05, **values)


def collective(rank: int, at_s: float, **data: Any) -> Fact:
    values = {"fault": "collective", "message": "connection closed", "completed_step": 30, **data}
    return fact("member.fault", at_s, rank=rank, noticed_at_s=at_s + 0.01, **values)


def entered(rank: int, at_s: float, generation: int = 2, restore_s: float = 0.0) -> Fact:
    return fact("rank.entered", at_s, generation, rank=rank, restore_s=restore_s)


def done(step: int, at_s: float, generation: int = 2) -> Fact:
    return fact("step.completed", at_s, generation, step=step)


BEFORE = [formed(1.0, 1, 0), done(1, 2.0, 1)]
LOST = fact("generation.lost", 10.2, completed_step=30, budget={"used": 1, "allowed": 9})
KILL = [
    collective(0, 10.02),
    exited(1, 10.0),
    LOST,
    formed(14.3, 2, 30, filled_at_s=14.2),
    entered(0, 14.5),
    entered(1, 14.6, restore_s=0.2),
    done(31, 15.0),
]


def run(facts: list[Fact]) -> list[dict[str, Any]]:
    state, records = IncidentState(), []
    for one in [*BEFORE, *facts]:
        state, closed = advance(state, one)
        records += closed
    _, left = finish(state, 99.0)
    return records + left


def one(facts: list[Fact]) -> dict[str, Any]:
    [record] = run(facts)
    return record


@pytest.mark.parametrize(("total", "end_s"), [(30, 14.6), (None, 14.9)])
def test_after_the_last_step_being_in_place_is_all(total: int | None, end_s: float) -> None:
    begun = fact("loop.begun", 1.5, total_steps=total)
    record = one([begun, *KILL[:-1], fact("rank.finished", 14.9, 2, rank=0)])
    assert record["recovered"] and record["lost"]["steps"] == 0
    assert record["downtime_s"] == pytest.approx(end_s - 10.0)


def test_a_last_step_done_again_is_no_new_one_but_the_end_is() -> None:
    facts = [fact("loop.begun", 1.5, total_steps=30), *KILL[:3], formed(14.3, 2, 29)]
    record = one([*facts, entered(0, 14.5), entered(1, 14.6), fact("rank.finished", 15.2, 2)])
    assert record["recovered"] and record["lost"]["steps"] == 1


def test_a_lost_node_is_named_and_not_the_rank_that_noticed() -> None:
    gone = [exited(rank, 21.0, node_id="node-bbbb1", node_lost=True) for rank in (1, 3)]
    facts = [collective(0, 10.02), LOST, *gone, formed(24.3, 2, 30, filled_at_s=24.2)]
    record = one([*facts, entered(0, 24.5), entered(1, 24.6), done(31, 25.0)])
    assert (record["cause"]["class"], record["cause"]["node"]) == ("node_lost", "node-bbbb1")
    assert record["victims"] == [0] and record["downtime_s"] == pytest.approx(25.0 - 10.02)
    assert "node node-bbb was lost with ranks 1, 3 at step 30" in record["headline"]


def test_a_killed_rank() -> None:
    record = one(KILL)
    assert record["cause"]["class"] == "worker_crash" and record["cause"]["rank"] == 1
    assert record["victims"] == [0] and record["lost"]["steps"] == 0
    assert record["downtime_s"] == pytest.approx(5.0)
    phases = {k: round(v, 3) for k, v in record["phases"].items()}
    assert phases == {
        "detect": 0.03,
        "wait": 4.17,
        "rendezvous": 0.1,
        "restore": 0.3,
        "replay": 0.4,
    }
    assert record["headline"] == (
        "Incident {id}: rank 1 on node node-b ended unexpectedly (pid 7) at step 30. "
        "Noticed in 0.03 s by process exit. No step lost, state from the memory of rank 0. "
        "5.00 s down: detect 0.03, wait 4.17, rendezvous 0.10, restore 0.30, replay 0.40. "
        "World 2 to 2."
    )


@pytest.mark.parametrize("shift", [-3.0, 0.0, 0.7, 9.0])
def test_phases_sum_to_the_downtime_exactly_whatever_the_clocks_say(shift: float) -> None:
    skewed = [*KILL[:4], entered(0, 14.5 + shift), entered(1, 14.6 - shift), KILL[-1]]
    record = one(skewed)
    assert sum(record["phases"].values()) == record["downtime_s"]
    assert record["downtime_s"] == pytest.approx(5.0)
    assert min(record["phases"].values()) >= 0.0


def test_collective_errors_alone_begin_at_the_first_of_them() -> None:
    record = one([collective(1, 10.5), collective(0, 10.4), *KILL[3:]])
    assert record["at_s"] == 10.4 and record["cause"]["class"] == "unknown"
    assert record["downtime_s"] == pytest.approx(4.6)


def test_steps_that_are_done_again_are_lost() -> None:
    plan = {"source": "checkpoint", "tier": "disk", "refusals": [{"file": "f"}]}
    record = one([exited(0, 10.0), exited(1, 10.1), formed(14.3, 2, 26, **plan), done(31, 20.0)])
    assert record["lost"]["steps"] == 4 and record["restore"]["skipped"] == [{"file": "f"}]
    assert "ranks 0, 1 ended" in record["headline"]
    assert "Went back 4 steps to 26, state restored from the disk tier." in record["headline"]


def test_redone_steps_do_not_close_it() -> None:
    record = one([exited(1, 10.0), formed(14.3, 2, 26), done(30, 15.0), done(31, 16.0)])
    assert record["downtime_s"] == pytest.approx(6.0)


def test_a_late_row_of_the_old_generation_does_not_close_it() -> None:
    record = one([exited(1, 10.0), done(31, 10.0, 1), formed(14.3, 2, 31), done(32, 16.0)])
    assert record["downtime_s"] == pytest.approx(6.0)


def test_overlapping_faults_are_one_incident() -> None:
    second = [collective(0, 14.4, completed_step=30), exited(1, 14.35, worker_id="b2")]
    record = one([*KILL[:4], *second, formed(18.0, 3, 30), done(31, 19.0, 3)])
    assert record["downtime_s"] == pytest.approx(9.0)
    assert record["generation"] == {"before": 1, "after": 3}
    assert len(record["cause"]["evidence"]) == 4


def test_an_exception_outranks_the_exit_that_follows_it() -> None:
    error = fact("worker.error", 10.0, rank=1, type="ValueError", message="bad", step=30)
    record = one([error, exited(1, 9.9), *KILL[3:]])
    assert record["cause"]["class"] == "user_error"
    assert "rank 1 raised ValueError: bad" in record["headline"]


@pytest.mark.parametrize("data", [{"rank": None}, {"rank": 1, "expected": True}])
def test_spares_and_finished_ranks_are_no_incident(data: dict[str, Any]) -> None:
    rank = data.pop("rank")
    assert run([exited(rank, 10.0, **data)]) == []


def test_a_lost_supervisor_is_the_cause_of_what_it_took_along() -> None:
    epoch = fact("epoch.started", 12.0, ended=["a", "b"], completed_step=30)
    record = one([exited(0, 10.0), exited(1, 10.1), epoch, *KILL[3:]])
    assert record["cause"]["code"] == "supervisor_lost" and record["at_s"] == 10.0
    assert "the supervisor was lost at step 30" in record["headline"]
    assert "by the end of its workers" in record["headline"]


def test_a_new_supervisor_learns_the_world_from_what_it_ended() -> None:
    epoch = fact("epoch.started", 12.0, ended=["a", "b"], completed_step=30)
    state, records = IncidentState(), []
    for seen in [exited(0, 10.0), exited(1, 10.1), epoch, *KILL[3:]]:
        state, closed = advance(state, seen)
        records += closed
    assert records[0]["world"] == {"before": 2, "after": 2}
    assert records[0]["generation"] == {"before": 1, "after": 2}


def test_a_restart_by_the_same_supervisor_is_not() -> None:
    restarting = fact("run.restarting", 11.0)
    epoch = fact("epoch.started", 12.0, ended=["a", "b"])
    record = one([exited(0, 10.0), exited(1, 10.1), restarting, epoch, *KILL[3:]])
    assert record["cause"]["class"] == "worker_crash"


def test_the_first_epoch_is_no_incident() -> None:
    assert run([fact("epoch.started", 0.5, ended=[])]) == []


def test_epilogue_closes_when_everybody_is_in_place() -> None:
    record = one([exited(1, 10.0), formed(12.0, 2, 30, world=1, epilogue=True), entered(0, 12.5)])
    assert record["recovered"] and record["downtime_s"] == pytest.approx(2.5)


def test_never_recovered_says_so() -> None:
    record = one([exited(1, 10.0), LOST])
    assert not record["recovered"] and "Not recovered." in record["headline"]
    assert record["downtime_s"] == pytest.approx(89.0)


def test_a_lost_train_controller() -> None:
    record = one(
        [
            fact("run.restarting", 9.9, error="The actor died\nclass_name: X", completed_step=30),
            exited(0, 10.0),
            exited(1, 10.0),
            fact("epoch.started", 10.5, ended=["a", "b"], completed_step=30),
            formed(14.3, 2, 29, source="checkpoint", tier="memory", filled_at_s=14.2),
            entered(0, 14.5),
            entered(1, 14.6),
            done(31, 15.0),
        ]
    )
    assert record["cause"]["code"] == "train_controller_lost"
    assert "Ray Train's controller was lost at step 30." in record["headline"]
    assert record["lost"]["steps"] == 1 and record["downtime_s"] == pytest.approx(5.0)
