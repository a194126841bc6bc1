"""A run whose store is `s3://` loses its disk and goes on with other numbers of workers.

An S3 server in this process, credentials by environment.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from statistics import mean
from typing import Any

import boto3
import damage
import harness
import leaks
import pytest
from harness import Lab
from moto.server import ThreadedMotoServer

from relit.handle import JobHandle
from relit_storage.data.ledger import LedgerRow, audit
from relit_storage.data.loader import Loader
from relit_storage.data.table import TableDataset

pytestmark = [pytest.mark.cluster, pytest.mark.s3]

STEPS = 300
GLOBAL_BATCH = 64
# Of losses around 0.5 to 0.02: the masks of drop-out are others with other numbers of workers.
MEAN_DIFFERENCE = 0.1


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


def check_samples(lab: Lab, job: JobHandle) -> None:
    """Each step read the samples that are its own whatever the number of workers, each once."""
    data = TableDataset.open(str(lab.data / "train.parquet"))
    loader = Loader(data, global_batch=GLOBAL_BATCH, seed=0, steps=STEPS, prefetch=False)
    ledger = [LedgerRow.from_metric_row(row) for row in job.metrics()]
    report = audit(ledger, int(data.rows_per_block.sum()), sample_ids=loader.sample_ids)
    assert report.exact, report.problems


def test_two_workers_then_one_from_the_object_tier_then_three(
    lab: Lab, calm: dict[int, float], bucket: str
) -> None:
    faults = [{"rank": 1, "step": 30, "phase": "backward"}]
    job = lab.stoppable("resized", [60, 120], steps=STEPS, store=bucket, faults=faults)
    first = lab.stop_held(job, 60)
    assert job.status()["committed"]["object"] == first
    assert [i["lost"]["steps"] for i in job.incidents()] == [0]
    assert leaks.left_by(lab.root, job.id, list(job.events()), disk=True) == []
    shutil.rmtree(lab.root / "disk" / job.id)
    job = job.resume(overrides=["scaling.workers=1"])
    second = lab.stop_held(job, 120)
    job = job.resume(overrides=["scaling.workers=3"])
    assert job.wait(timeout_s=harness.WAIT_S)["state"] == "SUCCEEDED", job.status()

    restored = [data for data in damage.formations(job) if data["source"] == "checkpoint"]
    went_on = [(data["tier"], data["start_step"]) for data in restored]
    assert went_on == [("object", first), ("disk", second)]
    rows = job.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    worlds = [2] * first + [1] * (second - first) + [3] * (STEPS - second)
    assert [row["world"] for row in rows] == worlds
    losses = harness.losses(job)
    assert harness.head(losses, first) == harness.head(calm, first)
    later = [abs(losses[step] - calm[step]) for step in range(first + 1, STEPS + 1)]
    assert mean(later) < MEAN_DIFFERENCE
    check_samples(lab, job)
    assert leaks.left_by(lab.root, job.id, list(job.events()), disk=False) == []
