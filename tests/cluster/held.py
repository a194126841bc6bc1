"""The digits job, except that it can hold a step: until a spare or a standby process waits, a stop
is asked for, or the test lets it go.

Runs in the workers. So a test that stops a run needs no luck with its speed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from relit.examples.digits import DEFAULTS, Net, accuracy
from relit_platform.node.standby import RANK_OF, standing
from relit_storage.data.table import TableDataset

HOLD_S = 100.0  # less than the peers' patience in a collective
LOOK_EVERY_S = 0.05


def train(run: Any, cfg: dict[str, Any]) -> dict[str, Any]:
    """cfg: data, steps, and numbers of completed steps: hold_at, until a spare waits by status
    (the path of the run's status.json), or where that is empty a standby process; stop_at, until
    somebody has asked for a stop, once each: a run that goes back to before such a step finds its
    mark in the folder `marks`; go_at, until there is a mark `go-<step>` beside the one that says
    which step is held. lives: a folder for a note of each process, when it was started.
    """
    if "lives" in cfg:
        note_life(Path(cfg["lives"]))
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=DEFAULTS["lr"])
    run.register(model=model, optimizer=optimizer)
    data = TableDataset.open(str(Path(cfg["data"]) / "train.parquet"))
    hold_at, stop_at = set(cfg.get("hold_at", ())), set(cfg.get("stop_at", ()))
    for batch in run.batches(data, global_batch=DEFAULTS["global_batch"], steps=cfg["steps"]):
        if run.step_no in hold_at:
            hold(Path(cfg["status"])) if cfg["status"] else hold_for_standby()
        if run.is_main and run.step_no in stop_at:
            await_stop(run, Path(cfg["marks"]) / str(run.step_no))
        if run.is_main and run.step_no in cfg.get("go_at", ()):
            await_go(Path(cfg["marks"]), run.step_no)
        loss = functional.cross_entropy(model(batch["x"]), batch["y"])
        run.backward(loss)
        run.step(optimizer, loss=loss)
    return {"test_accuracy": accuracy(model, str(Path(cfg["data"]) / "test.parquet"))}


def note_life(folder: Path) -> None:
    """Write the wall clock's time of this process's start, in s, under its pid."""
    folder.mkdir(parents=True, exist_ok=True)
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    (folder / str(os.getpid())).write_text(repr(time.time() - age_s))


def await_stop(run: Any, mark: Path) -> None:
    """Wait until this rank sees the stop; it takes effect with the step that is held."""
    mark.parent.mkdir(parents=True, exist_ok=True)
    if mark.exists():
        return
    mark.touch()
    wait(lambda: bool(run.stop_requested), "nobody asked for a stop")


def await_go(marks: Path, step: int) -> None:
    """Wait for the test, whose word counts for every process that comes to this step."""
    marks.mkdir(parents=True, exist_ok=True)
    (marks / str(step)).touch()
    wait((marks / f"go-{step}").exists, f"nobody let step {step} go")


def hold(status_path: Path) -> None:
    """Wait until the status names this process as a member and a worker without a rank.

    Each rank looks for its own pid, so that a status from before the newest recovery is not taken
    for the present one by all of them.
    """

    def a_spare_waits() -> bool:
        status = json.loads(status_path.read_text())
        mine = any(worker["pid"] == os.getpid() for worker in status["workers"])
        return bool(mine and status["phase"] == "running" and status["waiting"] > 0)

    wait(a_spare_waits, "no spare came")


def hold_for_standby() -> None:
    """Wait until this node has a standby process that has loaded."""
    wait(
        lambda: bool(standing(os.environ[RANK_OF], os.getppid(), (), idle=True)),
        "no standby process came",
    )


def wait(ready: Callable[[], bool], otherwise: str) -> None:
    """Look again and again at what another process does; TimeoutError after HOLD_S."""
    deadline_s = time.monotonic() + HOLD_S
    while not ready():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{otherwise} in {HOLD_S:.0f} s")
        time.sleep(LOOK_EVERY_S)
