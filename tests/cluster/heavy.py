"""A job whose state is large and whose steps are quick: a save takes long enough to be hit.

The ballast is a pure function of the completed steps, and the loss depends on it: a state put
together from two steps cannot give the same losses. Runs in the workers.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relit_storage.data.table import TableDataset

PARTS = 4


class Heavy(nn.Module):
    """A linear layer beside `megabytes` of buffers, in equal parts: every rank saves some."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        for part in range(PARTS):
            self.register_buffer(f"part_{part}", torch.zeros(megabytes * 250_000 // PARTS))

    def parts(self) -> list[Tensor]:
        """The buffers."""
        return [self.get_buffer(f"part_{part}") for part in range(PARTS)]


def train(run: Any, cfg: dict[str, Any]) -> None:
    """cfg: data, steps, megabytes, pause_s (of each step, so that a save spans only a few)."""
    torch.manual_seed(0)
    model = Heavy(cfg["megabytes"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.register(model=model, optimizer=optimizer)
    data = TableDataset.open(str(Path(cfg["data"]) / "train.parquet"))
    for batch in run.batches(data, global_batch=64, steps=cfg["steps"]):
        ballast = sum(float(part[-1]) for part in model.parts())
        loss = nn.functional.cross_entropy(model.linear(batch["x"]), batch["y"])
        run.backward(loss + ballast)
        run.step(optimizer)
        for part in model.parts():
            part.add_(0.125)
        time.sleep(cfg["pause_s"])
