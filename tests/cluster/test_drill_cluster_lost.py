"""The whole cluster is gone, and with it every process of the run; the host is not.

Nothing was due on disk. `resume` on a new cluster, whose node has another id, finds the newest
boundary in the shared memory that the dead node has left, and the rows that lay beside it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import damage
import harness
import kills
import pytest

from relit import cluster, keeper

pytestmark = pytest.mark.cluster

HELD_AT, STEPS = 40, 80
NO_DISK = {"disk_every_steps": 0, "object_every_steps": 0}
LEASE_S = 4.0


def end_cluster() -> None:
    """SIGKILL of all of Ray at once; the keeper sees it, and leaves."""
    info = cluster.local_cluster()
    assert info is not None
    while living := keeper.descendants(info.keeper_pid):
        for pid in living:
            with contextlib.suppress(ProcessLookupError):  # died of another's death
                os.kill(pid, signal.SIGKILL)
    harness.gone(info.keeper_pid)


def test_a_resume_on_a_new_cluster_finds_what_memory_held(lab: Any, calm: dict[int, float]) -> None:
    job = lab.going(
        "cluster-lost",
        [HELD_AT],
        config={"steps": STEPS},
        checkpoint=NO_DISK,
        recovery={"lease_s": LEASE_S},
    )
    lab.until_held(job, HELD_AT)
    harness.until(job, lambda _: bool(damage.formations(job)))  # so that there is an incident
    end_cluster()
    harness.until(job, lambda status: status["state"] == "LOST")
    lab.let_go(job, HELD_AT)
    job = job.resume()
    job.wait(timeout_s=harness.WAIT_S)
    kills.check_exact(job, calm, lab.data, STEPS)
    formed = damage.formations(job)
    assert len(formed) == 2 and (formed[1]["source"], formed[1]["tier"]) == ("checkpoint", "memory")
    # Rank 1 may have been at its copy of the newest boundary.
    assert formed[1]["start_step"] in (HELD_AT - 1, HELD_AT), formed[1]
    [record] = job.incidents()
    kills.check_phases(record)
    print(f"\n{record['headline']}")
    assert record["lost"]["steps"] <= 1, record
    assert [e["data"]["slots"] for e in job.events() if e["kind"] == "agent.inherited"] == [6]
    assert lab.leaks(job.id) == []
