"""SIGKILL of ranks at seeded (rank, step, phase), several per run; the survivor never ends.

RELIT_DRILL_KILLS says how many for each policy, RELIT_DRILL_SEED which ones. Every loss equals
that of the run that nobody touched, bit for bit, and each sample is read once. Every second kill
finds a spare or a standby process that waits, the others come before there is another.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import harness
import kills
import pytest

HELD = str(Path(__file__).with_name("held.py")) + ":train"
WAIT, SPARE = (kills.scattered(kills.KILLS, kills.SEED + number) for number in range(2))
SHORT = 40  # steps of the runs with one or two addressed kills
PER_KILL_S = 25.0
RUN_S = harness.WAIT_S + PER_KILL_S * kills.KILLS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(RUN_S + 120.0)]


def submitted(lab: Any, name: str, plan: kills.Plan, steps: int, **changes: Any) -> Any:
    """Run the held digits job with the plan's kills, to its end."""
    status = lab.root / "store" / "default" / name / "status.json"
    spares = "spares" in changes.get("scaling", {})
    config = {
        "steps": steps,
        "hold_at": plan.hold_at,
        "status": str(status) if spares else "",
        "lives": str(lives(lab, name)),
    }
    job = lab.submit(name, entry=HELD, config=config, faults=plan.kills, **changes)
    job.wait(timeout_s=RUN_S)
    return job


def lives(lab: Any, name: str) -> Path:
    """Where the processes of a run note when they were started."""
    return Path(lab.root) / f"lives-{name}"


def figures(lab: Any, job: Any, hot: list[Any], cold: list[Any]) -> str:
    """What the log gets of the kills that met somebody, and of the others."""
    met, alone = (kills.figures(records, job, lives(lab, job.id)) for records in (hot, cold))
    return f"\nsomebody waited: {met}\nnobody yet: {alone}"


def test_scattered_kills_of_a_run_that_waits(lab: Any, calm: dict[int, float]) -> None:
    job = submitted(lab, "kills-wait", WAIT, WAIT.steps)
    kills.check_exact(job, calm, lab.data, WAIT.steps)
    records = kills.check_kills(job, WAIT.kills)
    hot, cold = WAIT.met(records)
    print(figures(lab, job, hot, cold))
    assert hot
    if cold:
        assert median(r["downtime_s"] for r in hot) < median(r["downtime_s"] for r in cold)
    assert lab.leaks(job.id) == []


def test_scattered_kills_of_a_run_with_a_spare(lab: Any, calm: dict[int, float]) -> None:
    job = submitted(
        lab, "kills-spare", SPARE, SPARE.steps,
        scaling={"workers": 2, "spares": 1}, recovery={"on_rank_loss": "spare"},
    )  # fmt: skip
    kills.check_exact(job, calm, lab.data, SPARE.steps)
    records, since_s = kills.check_kills(job, SPARE.kills), kills.waiting_since_s(job)
    hot = [record for record in records if kills.was_waiting(record, since_s)]
    cold = [record for record in records if record not in hot]
    print(figures(lab, job, hot, cold))
    assert hot
    if cold:
        assert median(r["downtime_s"] for r in hot) < min(r["downtime_s"] for r in cold)
    assert lab.leaks(job.id) == []


def check_last(job: Any) -> None:
    """A rank died when the last step was done: somebody else was left with it, and it is saved."""
    result = job.result()
    assert result["value"]["test_accuracy"] > 0
    assert (result["committed"]["disk"], result["committed"]["object"]) == (SHORT, SHORT)


def test_both_ranks_killed_at_once(lab: Any, calm: dict[int, float]) -> None:
    """Nobody is left: a full restart from shared memory, three times. Then one dies at the end."""
    addresses = [
        [(0, 10, "forward"), (1, 10, "forward")],
        [(0, 20, "boundary"), (1, 20, "update")],  # the newest step is whole nowhere
        [(0, 30, "snapshot"), (1, 30, "snapshot")],
        [(0, SHORT, "end")],
    ]
    plan = kills.Plan([kills.kill(*address) for pair in addresses for address in pair])
    job = submitted(lab, "kills-both", plan, SHORT)
    kills.check_exact(job, calm, lab.data, SHORT)
    *both, last = job.incidents()
    assert len(both) == len(addresses) - 1
    for record in both:
        kills.check_phases(record)
        assert record["restore"]["tier"] == "memory", record
        assert record["lost"]["steps"] <= 1, record
    assert last["recovered"], last
    check_last(job)
    assert lab.leaks(job.id) == []


def test_killed_again_while_the_generation_forms(lab: Any, calm: dict[int, float]) -> None:
    """A second fault during the recovery; rank 0 owns the store where the others meet. And a
    last one in the update of the last step.
    """
    addresses = [
        [(1, 8, "forward"), (1, 8, "form")],  # the newcomer
        [(0, 16, "forward"), (0, 16, "form")],  # the newcomer as rank 0
        [(1, 24, "forward"), (1, 24, "restore")],  # the newcomer, while it gets state
        [(1, 32, "update"), (0, 33, "form")],  # the survivor, and the state with it
        [(0, SHORT, "update")],
    ]
    plan = kills.Plan([kills.kill(*address) for pair in addresses for address in pair])
    job = submitted(lab, "kills-again", plan, SHORT)
    kills.check_exact(job, calm, lab.data, SHORT)
    *records, last = job.incidents()
    assert len(records) == len(addresses) - 1
    for record in records:
        kills.check_phases(record)
        print(f"\n{record['headline']}")
    assert [record["lost"]["steps"] for record in records] == [0, 0, 0, 1]
    assert last["recovered"], last
    check_last(job)
    assert lab.leaks(job.id) == []
