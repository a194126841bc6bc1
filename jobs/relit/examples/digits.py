"""A small convolutional network on scikit-learn's 1,797 handwritten digits, read from Parquet.

`prepare(folder)` writes the two Parquet files once; `train` is the job. Seconds long, so it
serves tests and searches. Drop-out is on purpose: its masks come from relit's per-step
randomness, so a run that was killed shows the very same losses.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional

from relit_storage.data.table import TableDataset

if TYPE_CHECKING:
    from relit_platform.worker.context import RankContext

DEFAULTS: dict[str, Any] = {"global_batch": 64, "steps": 440, "lr": 2e-3, "seed": 0}
NUM_TEST = 297  # every sixth or so: the last rows, which other writers wrote


def prepare(folder: str | Path) -> Path:
    """Write `train.parquet` and `test.parquet` below `folder`, unless they are there; returns it.

    Columns: x, 64 pixels in 0..1 as fixed-size float32 list, and y, the digit. Needs scikit-learn.
    """
    from sklearn.datasets import load_digits

    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    pixels, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
    cut = len(labels) - NUM_TEST
    for name, part in (("train", slice(0, cut)), ("test", slice(cut, None))):
        path = folder / f"{name}.parquet"
        if path.exists():
            continue
        flat = pa.array(pixels[part].reshape(-1))
        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(flat, 64), "y": labels[part]})
        pq.write_table(table, f"{path}.tmp", row_group_size=100)
        Path(f"{path}.tmp").rename(path)
    return folder


class Net(nn.Module):
    """Two convolutions and two linear layers; [batch, 64] pixels to [batch, 10] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Pixels to logits."""
        hidden: Tensor = self.features(x.view(-1, 1, 8, 8))
        logits: Tensor = self.head(hidden.flatten(1))
        return logits


def train(run: RankContext, cfg: dict[str, Any]) -> dict[str, Any]:
    """The job: cfg["data"] is the folder that `prepare` wrote. Returns the test accuracy."""
    cfg = DEFAULTS | cfg
    torch.manual_seed(cfg["seed"])
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    run.register(model=model, optimizer=optimizer)
    data = TableDataset.open(str(Path(cfg["data"]) / "train.parquet"))
    for batch in run.batches(data, global_batch=cfg["global_batch"], steps=cfg["steps"]):
        loss = functional.cross_entropy(model(batch["x"]), batch["y"])
        run.backward(loss)
        run.step(optimizer, loss=loss)
    return {"test_accuracy": accuracy(model, str(Path(cfg["data"]) / "test.parquet"))}


@torch.no_grad()
def accuracy(model: Net, path: str) -> float:
    """The share of right answers over the test file, drop-out off."""
    test = TableDataset.open(path)
    rows = [test.read(block, np.arange(n)) for block, n in enumerate(test.rows_per_block)]
    pixels = torch.from_numpy(np.concatenate([row["x"] for row in rows]))
    labels = torch.from_numpy(np.concatenate([row["y"] for row in rows]))
    model.eval()
    return float((model(pixels).argmax(dim=1) == labels).float().mean())
