"""A run on Ray's own surfaces: its job's card in the dashboard, its gauges for Prometheus."""

from __future__ import annotations

import re
from typing import Any

import dashboard
import pytest
from harness import Lab, at_step, kill, pids

from relit.handle import JobHandle

STEPS = 100_000  # stopped when everything has been seen
GAUGES = {
    "relit_step",
    "relit_loss",
    "relit_world_size",
    "relit_generation",
    "relit_committed_step{memory}",
    "relit_committed_step{disk}",
    "relit_committed_step{object}",
    "relit_state{RUNNING}",
    "relit_recoveries_total{worker_crash}",
    "relit_downtime_seconds_total",
}


@pytest.fixture(scope="module")
def shown(lab: Lab) -> Any:
    """A run that has lost a rank once and trains on; stopped afterwards."""
    job = lab.submit("shown", steps=STEPS, owner="ada")
    kill(pids(at_step(job, 60))[1])
    try:
        yield job
    finally:
        job.stop()
        job.wait(timeout_s=120)


def test_the_jobs_card_shows_the_run(shown: JobHandle) -> None:
    told = dashboard.until(
        lambda: dashboard.card("shown"),
        # The first message after the start, and after a recovery, may come before a loss is known.
        lambda job: re.search("RUNNING at step .* loss ", str(job.get("message"))) is not None,
    )
    metadata = told["metadata"]
    assert (metadata["name"], metadata["owner"], metadata["run_id"]) == ("shown", "ada", "shown")
    assert metadata["state"] == "RUNNING" and told["status"] == "RUNNING"
    assert told["message"].startswith("shown RUNNING at step") and "loss" in told["message"]


def test_prometheus_gets_the_runs_gauges(shown: JobHandle) -> None:
    found = dashboard.until(lambda: dashboard.samples("shown"), lambda seen: set(seen) >= GAUGES)
    assert found["relit_world_size"] == 2.0 and found["relit_generation"] >= 2.0
    assert found["relit_recoveries_total{worker_crash}"] == 1.0
    assert found["relit_state{FAILED}"] == 0.0
    assert 60 <= found["relit_step"] <= shown.status()["step"]
    assert found["relit_committed_step{object}"] % 40 == 0
