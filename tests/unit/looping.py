"""A small loop with everything that a body may change, and a member whose collectives break."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from relit_platform.errors import CollectiveBrokenError
from relit_platform.facts import FaultReport
from relit_platform.worker.context import RankContext
from relit_platform.worker.gradient_sync import GradientSync
from relit_platform.worker.local import LocalMember

STEPS = 12


@dataclass
class Numbers:
    """Sixty-four samples of eight numbers and a target, in blocks of sixteen."""

    fingerprint: str = "numbers-v1"
    row_bytes: int = 36
    rows_per_block: npt.NDArray[np.int64] = field(
        default_factory=lambda: np.full(4, 16, dtype=np.int64)
    )

    def gather(
        self, blocks: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[Any]]:
        ids = blocks * 16 + rows
        x = np.sin(ids[:, None] * np.arange(1, 9) * 0.37).astype(np.float32)
        return {"x": x, "y": x.sum(1, keepdims=True) ** 2}

    def to_batch(self, columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        return {name: np.array(values) for name, values in columns.items()}


def train(run: RankContext, cfg: dict[str, Any]) -> dict[str, Any]:
    """A loop with everything an abandoned step could spoil: BatchNorm, drop-out, schedule, EMA."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
    ema = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    count = {"bodies": 0}
    run.register(
        net=net, ema=ema, optimizer=optimizer, schedule=schedule,
        count=(lambda: dict(count), count.update),
    )  # fmt: skip
    for batch in run.batches(Numbers(), global_batch=8, steps=STEPS, micro_batch=cfg.get("micro")):
        loss = nn.functional.mse_loss(net(batch["x"]), batch["y"])
        run.backward(loss)
        run.step(optimizer, loss=loss, lr=optimizer.param_groups[0]["lr"])
        schedule.step()
        count["bodies"] += 1
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), net.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
    state = {**net.state_dict(prefix="net."), **ema.state_dict(prefix="ema.")}
    return {
        "state": {name: value.tolist() for name, value in state.items()},
        "lr": schedule.get_last_lr(), "count": count["bodies"],
    }  # fmt: skip


class BreakingSync(GradientSync):
    """Breaks the collective of the visits given, counted from 1."""

    def __init__(self, params: list[nn.Parameter], visits: tuple[int, ...]) -> None:
        super().__init__(params)
        self._visits, self._visit = visits, 0

    def finish(self) -> None:
        super().finish()
        self._visit += 1
        if self._visit in self._visits:
            raise CollectiveBrokenError(operation="all-reduce", generation=1, rank=0, cause="test")


@dataclass(slots=True)
class BreakingMember(LocalMember):
    """A LocalMember whose collectives break, and which then enters the next generation."""

    visits: tuple[int, ...] = ()
    entries: int = 0
    lonely_ends: int = 0

    def meet(self) -> FaultReport | None:
        """The first `lonely_ends` times a peer is missing at the end."""
        self.lonely_ends -= 1
        if self.lonely_ends < 0:
            return None
        return FaultReport(kind="collective", message="test", at_s=0.0, step=self.step)

    def make_sync(self, objects: Any) -> GradientSync:
        params = list(objects["net"].parameters())
        return BreakingSync(params, self.visits)

    def enter(self, objects: Any, sync: GradientSync, fault: Any) -> bool:
        self.entries += 1
        self.generation = self.entries
        return LocalMember.enter(self, objects, sync, fault)
