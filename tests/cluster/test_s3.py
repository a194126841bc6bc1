"""The same runs with `store = s3://`: an S3 server in this process, credentials by environment."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import boto3
import harness
import leaks
import pytest
from moto.server import ThreadedMotoServer

pytestmark = [pytest.mark.cluster, pytest.mark.s3]

STEPS = 300


@pytest.fixture(scope="module")
def bucket(lab: Any) -> Iterator[str]:
    """The URL of an empty bucket. The lab's environment holds the credentials."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="lab")
    yield f"s3://lab/runs?endpoint_url={endpoint}&region=us-east-1"
    server.stop()


def test_a_kill_a_stop_and_a_resume_from_the_object_tier(
    lab: Any, calm: dict[int, float], bucket: str
) -> None:
    faults = [{"rank": 1, "step": 60, "phase": "backward"}]
    job = lab.stoppable("s3", [120], steps=STEPS, store=bucket, faults=faults)
    stopped = lab.stop_held(job, 120)
    status = job.status()
    assert status["committed"]["object"] == stopped
    assert [i["lost"]["steps"] for i in job.incidents()] == [0]
    assert leaks.left_by(lab.root, job.id, list(job.events()), disk=True) == []
    shutil.rmtree(lab.root / "disk" / job.id)
    job.resume()
    assert job.wait(timeout_s=harness.WAIT_S)["state"] == "SUCCEEDED", job.status()
    formed = [e["data"] for e in job.events() if e["kind"] == "generation.formed"][-1]
    assert (formed["tier"], formed["start_step"]) == ("object", stopped)
    assert harness.losses(job) == harness.head(calm, STEPS)
    assert leaks.left_by(lab.root, job.id, list(job.events()), disk=False) == []
