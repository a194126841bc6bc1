"""The two loops of benchmarks/recovery.py: the same model, batches and kills, ours and stock Ray.

Both write lines (what, step, wall time) into files of cfg["notes"]: "done" when rank 0 has
completed a step, "kill" just before rank 1 kills itself, "from" with the step that a life of
rank 0 begins after. cfg: data, steps, kill_at (steps), notes, and for ours status and hold:
what must wait for the next dead rank before it is killed, "spare", "standby" or "".
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from relit.examples.digits import DEFAULTS, Net
from relit_platform.node.standby import RANK_OF, standing
from relit_storage.data.loader import Loader
from relit_storage.data.table import TableDataset

VICTIM = 1
HOLD_S = 100.0
LOOK_EVERY_S = 0.02


def note(cfg: dict[str, Any], what: str, step: int) -> None:
    """One line, in the file of this process."""
    with open(Path(cfg["notes"]) / f"{os.getpid()}.txt", "a") as file:
        file.write(f"{what} {step} {time.time()}\n")


def killed(cfg: dict[str, Any], step: int) -> Path:
    """Is there once the kill of this step has happened."""
    return Path(cfg["notes"]) / f"killed-{step}"


def perhaps_die(cfg: dict[str, Any], rank: int, step: int) -> None:
    """SIGKILL of this process, once per address, in the middle of `step`."""
    if rank != VICTIM or step not in cfg["kill_at"]:
        return
    mark = killed(cfg, step)
    if not mark.exists():
        mark.touch()
        note(cfg, "kill", step)
        os.kill(os.getpid(), signal.SIGKILL)


def made() -> tuple[Net, torch.optim.Optimizer]:
    """The model of both."""
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.Adam(model.parameters(), lr=DEFAULTS["lr"])


def ours(run: Any, cfg: dict[str, Any]) -> None:
    """A relit job, as anybody would write it; with `hold` it lets no kill come before the spare.

    A step counts as done when the next one begins: an abandoned one never does.
    """
    noted = 0
    model, optimizer = made()
    run.register(model=model, optimizer=optimizer)
    data = TableDataset.open(cfg["data"])
    for batch in run.batches(data, global_batch=DEFAULTS["global_batch"], steps=cfg["steps"]):
        step = run.step_no + 1
        if run.rank == 0 and run.step_no != noted:
            noted = run.step_no
            note(cfg, "done", noted)
        if cfg["hold"] and step in cfg["kill_at"] and not killed(cfg, step).exists():
            _until(_a_spare_waits if cfg["hold"] == "spare" else _a_standby_waits, cfg)
        loss = functional.cross_entropy(model(batch["x"]), batch["y"])
        perhaps_die(cfg, run.rank, step)
        run.backward(loss)
        run.step(optimizer, loss=loss)


def _until(there: Callable[[dict[str, Any]], bool], cfg: dict[str, Any]) -> None:
    deadline_s = time.monotonic() + HOLD_S
    while not there(cfg):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no {cfg['hold']} came")
        time.sleep(LOOK_EVERY_S)


def _a_spare_waits(cfg: dict[str, Any]) -> bool:
    status = json.loads(Path(cfg["status"]).read_text())
    mine = any(worker["pid"] == os.getpid() for worker in status["workers"])
    return bool(mine and status["phase"] == "running" and status["waiting"] > 0)


def _a_standby_waits(cfg: dict[str, Any]) -> bool:
    return bool(standing(os.environ[RANK_OF], os.getppid(), (), idle=True))


def peer(cfg: dict[str, Any]) -> None:
    """Stock Ray Train: DDP, a checkpoint reported at every step, loaded again after a failure."""
    import ray.train

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    model, optimizer = made()
    begin = _load(model, optimizer)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    data = TableDataset.open(cfg["data"])
    loader = Loader(data, global_batch=DEFAULTS["global_batch"], seed=0, steps=cfg["steps"])
    for step in range(begin + 1, cfg["steps"] + 1):
        (share,) = loader.micro_batches(step - 1, rank, world)
        x, y = torch.from_numpy(share["x"]), torch.from_numpy(share["y"])
        optimizer.zero_grad()
        loss = functional.cross_entropy(wrapped(x), y)
        perhaps_die(cfg, rank, step)
        torch.autograd.backward(loss)
        optimizer.step()
        if rank == 0:
            note(cfg, "done", step)
        _report(rank, step, model, optimizer)


def _load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        saved = torch.load(Path(folder) / "state.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def _report(rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    import ray.train

    if rank != 0:
        ray.train.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, Path(folder) / "state.pt")
        ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))
