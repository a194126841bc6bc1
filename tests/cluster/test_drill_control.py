"""SIGKILL of everything that is not a rank: supervisor, manager, agent, driver.

Each is killed alone and at the same moment as a rank, while rank 0 holds a step, so that each kill
has its place whatever the speed. The run goes on under its own id, its losses are those of a run
that nobody touched, bit for bit, its rows have no hole, at most one step is done again, and nothing
is left of it on the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import harness
import pytest
import victims

pytestmark = pytest.mark.cluster

STEPS = 800
# Who is killed at which step. The driver alone: test_drill_second_driver.
PLAN = {
    100: ["manager"],
    200: ["agent"],
    300: ["supervisor"],
    400: ["manager", "rank"],
    500: ["agent", "rank"],
    600: ["supervisor", "rank"],
    700: ["driver", "rank"],
}


def all_live(status: Mapping[str, Any]) -> bool:
    """What the status names is there, and not what was killed before."""
    agents = [int(agent["pid"]) for agent in status["agents"]]
    parts = [int(status["supervisor_pid"]), int(status["manager_pid"]), *agents]
    return bool(agents) and all(map(harness.alive, [*parts, *harness.pids(status).values()]))


def test_the_run_goes_on(lab: Any, calm: dict[int, float]) -> None:
    job = lab.going("control", list(PLAN), steps=STEPS)
    for step, whom in PLAN.items():
        lab.until_held(job, step)
        status = harness.until(job, all_live)
        harness.kill(*(pid for what in whom for pid in victims.pids_of(job, status, what)))
        lab.let_go(job, step)
    assert job.wait(timeout_s=harness.WAIT_S)["state"] == "SUCCEEDED", job.status()
    assert [row["step"] for row in job.metrics()] == list(range(1, STEPS + 1))
    assert harness.losses(job) == harness.head(calm, STEPS)
    assert max((i["lost"]["steps"] for i in job.incidents()), default=0) <= 1, job.incidents()
    felt = [whom for whom in PLAN.values() if {"supervisor", "rank"} & set(whom)]
    classes = ["controller" if "supervisor" in whom else "worker_crash" for whom in felt]
    assert [i["cause"]["class"] for i in job.incidents()] == classes, job.incidents()
    assert [e for e in job.events() if e["level"] == "error"] == []
    assert lab.leaks(job.id) == []
