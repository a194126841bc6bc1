"""A run whose store is `s3://`, stopped by Ctrl-C, by `relit stop`, by the end of its job.

Each time it is resumed at exactly that step: without its disk, from the object tier alone; with one
worker instead of two; then with three, after its newest checkpoint has been damaged on both tiers,
from the one before. An S3 server in this process, credentials by environment.
"""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import boto3
import damage
import harness
import pytest
import shell
import victims
from harness import Lab
from moto.server import ThreadedMotoServer

from relit.handle import JobHandle
from relit_storage.data.ledger import LedgerRow, audit
from relit_storage.data.loader import Loader
from relit_storage.data.table import TableDataset

pytestmark = [pytest.mark.cluster, pytest.mark.s3]

STEPS, GLOBAL_BATCH, DISK_EVERY = 180, 64, 20
HELD = {"ctrl-c": 50, "relit stop": 90, "end of the job": 130}  # after these steps
# Of losses around 0.5 to 0.02: the masks of drop-out are others with other numbers of workers.
MEAN_DIFFERENCE = 0.1


@dataclass(frozen=True, slots=True)
class Bucket:
    """A store of its own; the lab's environment holds the credentials."""

    url: str
    client: Any

    def remove_manifest(self, run_key: str, step: int) -> None:
        """This step is whole no more in the object tier."""
        listed = self.client.list_objects_v2(Bucket="lab")["Contents"]
        [key] = [
            entry["Key"]
            for entry in listed
            if f"{run_key}/" in entry["Key"]
            and f"/steps/{step:012d}/" in entry["Key"]
            and entry["Key"].endswith("manifest.json")
        ]
        self.client.delete_object(Bucket="lab", Key=key)


@pytest.fixture(scope="module")
def bucket(lab: Any) -> Iterator[Bucket]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="lab")
    yield Bucket(f"s3://lab/runs?endpoint_url={endpoint}&region=us-east-1", client)
    server.stop()


def stop_by(how: str, lab: Any, job: JobHandle, store: str, waiting: Any) -> int:
    """Stop the run in one of three ways; the step at which it stands, and the exit codes."""
    lab.until_held(job, HELD[how])
    if how == "ctrl-c":
        waiting.send_signal(signal.SIGINT)
        assert shell.end(waiting).code == 103
        assert shell.relit_cli("result", job.id, "--store", store).code == 103
    elif how == "relit stop":
        assert shell.relit_cli("stop", job.id, "--store", store).code == 103
    else:
        for pid in victims.pids_of(job, job.status(), "driver"):
            victims.send(pid, signal.SIGTERM)
        job.wait(timeout_s=harness.WAIT_S)
    return check_stopped(job, HELD[how])


def check_stopped(job: JobHandle, held_at: int) -> int:
    """Everything that a stop promises; the step at which the run stands."""
    status = job.status()
    assert status["state"] == "STOPPED", status
    step = int(status["step"])
    assert step == held_at + 1  # the one that was held
    assert [row["step"] for row in job.metrics()] == list(range(1, step + 1))
    assert (status["committed"]["disk"], status["committed"]["object"]) == (step, step)
    return step


def check_samples(lab: Lab, job: JobHandle) -> None:
    """Each step read the samples that are its own whatever the number of workers, each once."""
    data = TableDataset.open(str(lab.data / "train.parquet"))
    loader = Loader(data, global_batch=GLOBAL_BATCH, seed=0, steps=STEPS, prefetch=False)
    ledger = [LedgerRow.from_metric_row(row) for row in job.metrics()]
    report = audit(ledger, int(data.rows_per_block.sum()), sample_ids=loader.sample_ids)
    assert report.exact, report.problems


def check_restored(job: JobHandle, stops: list[int]) -> int:
    """From which steps and tiers the run went on, and why not from the newest; the last of them."""
    restored = [data for data in damage.formations(job) if data["source"] == "checkpoint"]
    before = stops[-1] // DISK_EVERY * DISK_EVERY
    tried = [(data["tier"], data["start_step"]) for data in restored]
    first, second, third = stops
    assert tried == [("object", first), ("disk", second), ("disk", third), ("disk", before)]
    assert {"rank-00000.safetensors", "manifest.json"} <= damage.refused_files(restored[-1])
    killed, refused = job.incidents()
    assert killed["lost"]["steps"] == 0 and killed["recovered"], killed
    assert refused["cause"]["code"] == "restore_refused" and refused["recovered"], refused
    return before


def check_losses(job: JobHandle, calm: dict[int, float], with_two: int) -> None:
    """With two workers those of the calm run; then near them."""
    losses = harness.losses(job)
    assert harness.head(losses, with_two) == harness.head(calm, with_two)
    later = [abs(losses[step] - calm[step]) for step in range(with_two + 1, STEPS + 1)]
    assert mean(later) < MEAN_DIFFERENCE


def test_a_stop_commits_and_a_resume_goes_on_right_there(
    lab: Any, calm: dict[int, float], bucket: Bucket, tmp_path: Path
) -> None:
    spec = lab.stoppable_spec(
        "stopped", list(HELD.values()), steps=STEPS, store=bucket.url,
        faults=[{"rank": 1, "step": 30, "phase": "backward"}],
    )  # fmt: skip
    waiting = shell.start("submit", shell.write_spec(tmp_path, spec), "--wait")
    job = shell.job_of(bucket.url, "stopped")
    resume = ("resume", job.id, "--store", bucket.url)

    first = stop_by("ctrl-c", lab, job, bucket.url, waiting)
    assert lab.left_by(job, disk=True) == []
    shutil.rmtree(lab.root / "disk" / job.id)
    assert shell.relit_cli(*resume).code == 0

    second = stop_by("relit stop", lab, job, bucket.url, waiting)
    # At once: its supervisor still cleans up.
    assert shell.relit_cli(*resume, "scaling.workers=1").code == 0

    third = stop_by("end of the job", lab, job, bucket.url, waiting)
    assert lab.left_by(job, disk=True) == []
    damage.flip(damage.on_disk(lab.root, job, third) / "rank-00000.safetensors")
    bucket.remove_manifest(job.reader.run_key, third)
    assert shell.relit_cli(*resume, "scaling.workers=3").code == 0
    assert job.wait(timeout_s=harness.WAIT_S)["state"] == "SUCCEEDED", job.status()

    before = check_restored(job, [first, second, third])
    rows = job.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    worlds = [2] * second + [1] * (before - second) + [3] * (STEPS - before)
    assert [row["world"] for row in rows] == worlds
    check_losses(job, calm, second)
    check_samples(lab, job)
    assert lab.left_by(job, disk=False) == []
