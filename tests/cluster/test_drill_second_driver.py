"""One run, two drivers: the lease refuses the second, and a takeover fences the first off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import harness
import pytest
import victims

from relit import cluster
from relit.handle import JobHandle
from relit.keeper import ray_environment

pytestmark = pytest.mark.cluster

STEPS, HOLD_AT = 60, 20
LEASE_S = 4.0
# A supervisor under another name is another holder: what a second cluster on this store would be.
INTRUDER = """
import json, sys
import ray
from relit_platform.control.supervisor import RunSupervisor
ray.init(address=sys.argv[1], namespace="relit", log_to_driver=False, logging_level="ERROR")
actor = ray.remote(RunSupervisor).options(
    name="supervisor/intruder", lifetime="detached", num_cpus=0, max_restarts=-1, max_concurrency=4
).remote(sys.argv[2], sys.argv[3])
print(json.dumps(ray.get(actor.refused.remote(60.0), timeout=70.0)))
"""


def intrude(lab: Any, job: JobHandle) -> str:
    """Start a second supervisor; why it may not drive the run, '' if it does."""
    info = cluster.local_cluster()
    assert info is not None
    words = [info.gcs_address, str(lab.root / "store"), job.reader.run_key]
    done = subprocess.run(
        [sys.executable, "-c", INTRUDER, *words],
        env=ray_environment(info, dict(os.environ)),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return str(json.loads(done.stdout.splitlines()[-1]))


def test_a_second_driver_waits_for_the_first_ones_end(lab: Any, calm: dict[int, float]) -> None:
    """Refused while the first drives, then in its place while that is frozen. The frozen one wakes
    up while the other drives: it must see that, and leave. The job's own process, which only
    watches, is killed before all that.
    """
    job = lab.going("two-drivers", [HOLD_AT], steps=STEPS, recovery={"lease_s": LEASE_S})
    lab.until_held(job, HOLD_AT)
    harness.kill(*victims.pids_of(job, job.status(), "driver"))
    assert "is held by" in intrude(lab, job)
    [frozen] = victims.pids_of(job, job.status(), "supervisor")
    victims.send(frozen, signal.SIGSTOP)
    assert intrude(lab, job) == ""
    harness.until(job, lambda status: status["epoch"] == 2)
    victims.send(frozen, signal.SIGCONT)
    harness.until(job, lambda _: not harness.alive(frozen))
    lab.let_go(job, HOLD_AT)
    assert job.wait(timeout_s=harness.WAIT_S)["state"] == "SUCCEEDED", job.status()
    assert job.status()["epoch"] == 2
    assert harness.losses(job) == harness.head(calm, STEPS)
    assert [row["step"] for row in job.metrics()] == list(range(1, STEPS + 1))
    [incident] = job.incidents()
    assert incident["cause"]["code"] == "supervisor_lost"
    assert lab.leaks(job.id) == []
