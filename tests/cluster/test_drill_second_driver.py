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


RECOVERY = {"lease_s": LEASE_S}


def check_end(lab: Any, job: JobHandle, calm: dict[int, float], epoch: int) -> None:
    assert job.wait(timeout_s=harness.WAIT_S)["state"] == "SUCCEEDED", job.status()
    assert job.status()["epoch"] == epoch
    assert harness.losses(job) == harness.head(calm, STEPS)
    assert [row["step"] for row in job.metrics()] == list(range(1, STEPS + 1))
    assert lab.leaks(job.id) == []


def test_a_second_driver_is_refused_while_the_first_lives(lab: Any, calm: dict[int, float]) -> None:
    job = lab.going("second-driver", [HOLD_AT], steps=STEPS, recovery=RECOVERY)
    lab.until_held(job, HOLD_AT)
    assert "is held by" in intrude(lab, job)
    lab.let_go(job, HOLD_AT)
    check_end(lab, job, calm, epoch=1)
    assert job.incidents() == []


def test_a_frozen_driver_is_replaced_and_fenced(lab: Any, calm: dict[int, float]) -> None:
    """The frozen one wakes up while the other drives: it must see that, and leave."""
    job = lab.going("frozen-driver", [HOLD_AT], steps=STEPS, recovery=RECOVERY)
    lab.until_held(job, HOLD_AT)
    [frozen] = victims.pids_of(job, job.status(), "supervisor")
    victims.send(frozen, signal.SIGSTOP)
    assert intrude(lab, job) == ""
    harness.until(job, lambda status: status["epoch"] == 2)
    victims.send(frozen, signal.SIGCONT)
    harness.until(job, lambda _: not harness.alive(frozen))
    lab.let_go(job, HOLD_AT)
    check_end(lab, job, calm, epoch=2)
    [incident] = job.incidents()
    assert incident["cause"]["code"] == "supervisor_lost"
