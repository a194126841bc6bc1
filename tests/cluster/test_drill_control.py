"""SIGKILL of everything that is not a rank: supervisor, manager, agent, driver.

Each is killed alone and at the same moment as a rank, while rank 0 holds a step, so that each kill
has its place whatever the speed. The run goes on under its own id, its losses are those of a run
that nobody touched, bit for bit, its rows have no hole, at most one step is done again, and nothing
is left of it on the cluster. Ray's own surfaces show it all the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import dashboard
import harness
import pytest
import victims

pytestmark = pytest.mark.cluster

STEPS = 320
# Who is killed at which step. The driver alone: test_drill_second_driver.
PLAN = {
    40: ["manager"],
    80: ["agent"],
    120: ["supervisor"],
    160: ["manager", "rank"],
    200: ["agent", "rank"],
    240: ["supervisor", "rank"],
    280: ["driver", "rank"],
}
SHOWN_AT = 240  # by then every part but the driver has had a successor


def all_live(status: Mapping[str, Any]) -> bool:
    """What the status names is there, and not what was killed before."""
    agents = [int(agent["pid"]) for agent in status["agents"]]
    parts = [int(status["supervisor_pid"]), int(status["manager_pid"]), *agents]
    return bool(agents) and all(map(harness.alive, [*parts, *harness.pids(status).values()]))


def causes(killed: Iterable[list[str]]) -> list[str]:
    """What the incidents of these kills are put down to; those of other parts nobody feels."""
    felt = [whom for whom in killed if {"supervisor", "rank"} & set(whom)]
    return ["controller" if "supervisor" in whom else "worker_crash" for whom in felt]


def test_the_run_goes_on(lab: Any, calm: dict[int, float]) -> None:
    job = lab.going("control", list(PLAN), steps=STEPS, owner="ada")
    for step, whom in PLAN.items():
        lab.until_held(job, step)
        status = harness.until(job, all_live)
        if step == SHOWN_AT:
            dashboard.check_card(job, "ada")
            before = {at: whom for at, whom in PLAN.items() if at < step}
            recovered = Counter(causes(before.values()))
            dashboard.check_gauges(job, max(before), step, recovered)
        harness.kill(*(pid for what in whom for pid in victims.pids_of(job, status, what)))
        lab.let_go(job, step)
    assert job.wait(timeout_s=harness.WAIT_S)["state"] == "SUCCEEDED", job.status()
    assert [row["step"] for row in job.metrics()] == list(range(1, STEPS + 1))
    assert harness.losses(job) == harness.head(calm, STEPS)
    assert max((i["lost"]["steps"] for i in job.incidents()), default=0) <= 1, job.incidents()
    found = [incident["cause"]["class"] for incident in job.incidents()]
    assert found == causes(PLAN.values()), job.incidents()
    assert [e for e in job.events() if e["level"] == "error"] == []
    assert lab.leaks(job.id) == []
