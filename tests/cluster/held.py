"""The digits job, except that it can hold a step until a hot spare waits. Runs in the workers."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from relit.examples.digits import DEFAULTS, Net, accuracy
from relit_storage.data.table import TableDataset

HOLD_S = 100.0  # less than the peers' patience in a collective
LOOK_EVERY_S = 0.05


def train(run: Any, cfg: dict[str, Any]) -> dict[str, Any]:
    """cfg: data, steps, hold_at (numbers of completed steps), status (the run's status.json)."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=DEFAULTS["lr"])
    run.register(model=model, optimizer=optimizer)
    data = TableDataset.open(str(Path(cfg["data"]) / "train.parquet"))
    hold_at = set(cfg["hold_at"])
    for batch in run.batches(data, global_batch=DEFAULTS["global_batch"], steps=cfg["steps"]):
        if run.step_no in hold_at:
            hold(Path(cfg["status"]))
        loss = functional.cross_entropy(model(batch["x"]), batch["y"])
        run.backward(loss)
        run.step(optimizer, loss=loss)
    return {"test_accuracy": accuracy(model, str(Path(cfg["data"]) / "test.parquet"))}


def hold(status_path: Path) -> None:
    """Wait until the status names this process as a member and a worker without a rank.

    Each rank looks for its own pid, so that a status from before the newest recovery is not taken
    for the present one by all of them.
    """
    deadline_s = time.monotonic() + HOLD_S
    while time.monotonic() < deadline_s:
        status = json.loads(status_path.read_text())
        mine = any(worker["pid"] == os.getpid() for worker in status["workers"])
        if mine and status["phase"] == "running" and status["waiting"] > 0:
            return
        time.sleep(LOOK_EVERY_S)
    raise TimeoutError(f"no spare came in {HOLD_S:.0f} s")
