"""One local cluster for all cluster tests, in a home of its own, ended and checked at the end."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def lab() -> Iterator[object]:
    """A running local cluster and a place for runs; nothing of it is left afterwards."""
    import harness

    from relit import cluster

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="rl") as folder:
        patch.setenv("HOME", folder)
        for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RELIT_STORE"):
            patch.delenv(name, raising=False)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "lab")  # of a drill's own S3 server; the workers inherit it
        patch.setenv("LAB_API_TOKEN", harness.TOKEN)
        cluster.ensure_cluster()
        try:
            yield harness.prepare(Path(folder))
        finally:
            cluster.stop_local_cluster()


@pytest.fixture(scope="session")
def calm_job(lab: Any) -> Any:
    """The digits job that nobody touches, longer than any other of its kind."""
    import kills

    job = lab.run("calm", steps=max(400, (kills.KILLS + 1) * kills.GAP[1]))
    assert job.status()["state"] == "SUCCEEDED", job.status()
    return job


@pytest.fixture(scope="session")
def calm(calm_job: Any) -> dict[int, float]:
    """Its losses by step: those of every digits job with as many steps or fewer, bit for bit."""
    import harness

    return harness.losses(calm_job)
