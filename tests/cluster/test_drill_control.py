"""SIGKILL of everything that is not a rank: supervisor, manager, agent, driver.

Each is killed twice in one run, first alone and then at the same moment as a rank. The run goes on
under its own id, its losses are those of a run that nobody touched, bit for bit, its rows have no
hole, at most one step is done again, and nothing is left of it on the cluster.
"""

from __future__ import annotations

from typing import Any

import harness
import pytest
import victims

pytestmark = pytest.mark.cluster

STEPS = 900
AT, AGAIN_AT = 150, 500
# Who is killed when: each alone, then at the same moment as a rank. A run has one driver.
PLANS = {
    "supervisor": {AT: ["supervisor"], AGAIN_AT: ["supervisor", "rank"]},
    "manager": {AT: ["manager"], AGAIN_AT: ["manager", "rank"]},
    "agent": {AT: ["agent"], AGAIN_AT: ["agent", "rank"]},
    "driver": {AT: ["driver"]},
    "driver and rank": {AT: ["driver", "rank"]},
}


@pytest.fixture(scope="module")
def calm(lab: Any) -> dict[int, float]:
    """The losses of the run that nobody touches."""
    job = lab.run("control-calm", steps=STEPS)
    assert job.status()["state"] == "SUCCEEDED", job.status()
    return harness.losses(job)


@pytest.mark.parametrize("plan", PLANS)
def test_the_run_goes_on(lab: Any, calm: dict[int, float], plan: str) -> None:
    job = lab.submit(f"control-{plan.replace(' ', '-')}", steps=STEPS)
    for step, whom in PLANS[plan].items():
        status = harness.at_step(job, step)
        harness.kill(*(pid for what in whom for pid in victims.pids_of(job, status, what)))
    assert job.wait(timeout_s=harness.WAIT_S)["state"] == "SUCCEEDED", job.status()
    assert [row["step"] for row in job.metrics()] == list(range(1, STEPS + 1))
    assert harness.losses(job) == calm
    assert max((i["lost"]["steps"] for i in job.incidents()), default=0) <= 1, job.incidents()
    assert [e for e in job.events() if e["level"] == "error"] == []
    assert lab.leaks(job.id) == []
