"""A run that goes on with another number of workers: the same samples, each once, from a tier."""

from __future__ import annotations

import harness
import pytest
from harness import Lab

from relit_storage.data.ledger import LedgerRow, audit
from relit_storage.data.loader import Loader
from relit_storage.data.table import TableDataset

pytestmark = pytest.mark.cluster

STEPS = 300
GLOBAL_BATCH = 64


def test_two_workers_then_one_then_three(lab: Lab) -> None:
    job = lab.stoppable("resized", [60, 120], steps=STEPS)
    first = lab.stop_held(job, 60)
    job = job.resume(overrides=["scaling.workers=1"])
    second = lab.stop_held(job, 120)
    job = job.resume(overrides=["scaling.workers=3"])
    assert job.wait(timeout_s=harness.WAIT_S)["state"] == "SUCCEEDED"
    rows = job.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    worlds = [2] * first + [1] * (second - first) + [3] * (STEPS - second)
    assert [row["world"] for row in rows] == worlds
    data = TableDataset.open(str(lab.data / "train.parquet"))
    num_rows = int(data.rows_per_block.sum())
    loader = Loader(data, global_batch=GLOBAL_BATCH, seed=0, steps=STEPS, prefetch=False)
    ledger = [LedgerRow.from_metric_row(row) for row in rows]
    report = audit(ledger, num_rows, sample_ids=loader.sample_ids)
    assert report.exact, report.problems
