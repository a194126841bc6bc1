"""The digits job with a ballast: a save takes long enough to be hit.

The ballast is a pure function of the completed steps. The loss has the difference between what it
is and what it must be in it, which is zero: so the losses are those of the digits job, bit for bit,
and a state put together from two steps cannot give them. Runs in the workers.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from relit.examples.digits import DEFAULTS, Net
from relit_storage.data.table import TableDataset

PARTS = 4
PER_STEP = 0.125  # a power of two: sums of it are exact


class Ballast(nn.Module):
    """`megabytes` of buffers, in equal parts: every rank saves some."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        for part in range(PARTS):
            self.register_buffer(f"part_{part}", torch.zeros(megabytes * 250_000 // PARTS))

    def parts(self) -> list[Tensor]:
        """The buffers."""
        return [self.get_buffer(f"part_{part}") for part in range(PARTS)]

    def is_of(self) -> float:
        """The step of which this is the state; a mixture of two is of none of them."""
        return sum(float(part[-1]) for part in self.parts()) / (PARTS * PER_STEP)


def train(run: Any, cfg: dict[str, Any]) -> None:
    """cfg: data, steps, megabytes, pause_s (of each step, so that a save spans only a few)."""
    torch.manual_seed(0)
    model, ballast = Net(), Ballast(cfg["megabytes"])
    optimizer = torch.optim.Adam(model.parameters(), lr=DEFAULTS["lr"])
    run.register(model=model, ballast=ballast, optimizer=optimizer)
    data = TableDataset.open(str(Path(cfg["data"]) / "train.parquet"))
    for batch in run.batches(data, global_batch=DEFAULTS["global_batch"], steps=cfg["steps"]):
        wrong = ballast.is_of() - run.step_no
        loss = functional.cross_entropy(model(batch["x"]), batch["y"]) + wrong
        run.backward(loss)
        run.step(optimizer, loss=loss)
        for part in ballast.parts():
            part.add_(PER_STEP)
        time.sleep(cfg["pause_s"])
