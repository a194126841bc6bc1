"""The example jobs are plain loops: they train under a run handle of twenty lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from relit.examples import digits, gpt
from relit_storage.data.loader import Loader
from relit_storage.data.token_writing import prepare_text


class PlainRun:
    """The run handle of an undisturbed single process."""

    def __init__(self) -> None:
        self.step_no = 0
        self.losses: list[float] = []
        self.registered: dict[str, Any] = {}

    def register(self, **objects: Any) -> None:
        self.registered |= objects

    def batches(self, data: Any, *, global_batch: int, steps: int) -> Iterator[dict[str, Any]]:
        loader = Loader(data, global_batch=global_batch, seed=0, steps=steps, prefetch=False)
        while self.step_no < steps:
            torch.manual_seed(self.step_no)
            batch = loader.batch(self.step_no, rank=0, world=1)
            yield {name: torch.from_numpy(values) for name, values in batch.items()}

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: torch.optim.Optimizer, *, loss: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(loss.item())
        self.step_no += 1


@pytest.fixture(scope="module")
def token_shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokens")
    prepare_text([Path(gpt.__file__)] * 8, str(folder), block_len=64, rows_per_group=512)
    return str(folder)


def train_gpt(folder: str, steps: int) -> tuple[PlainRun, dict[str, Any]]:
    run = PlainRun()
    config = {"data": folder, "val_data": folder, "steps": steps, "warmup": 10, "sample_bytes": 20}
    return run, gpt.train(run, config)  # type: ignore[arg-type]


def test_the_gpt_learns_and_speaks(token_shards: str) -> None:
    run, value = train_gpt(token_shards, 40)
    assert run.losses[0] == pytest.approx(5.545, abs=0.2)  # ln 256: it knows nothing
    assert run.losses[-1] < 3.5
    assert value["val_loss"] == pytest.approx(run.losses[-1], abs=0.5)
    assert value["sample"].startswith("def ")


def test_the_gpt_is_the_same_twice(token_shards: str) -> None:
    first, second = train_gpt(token_shards, 5), train_gpt(token_shards, 5)
    assert first[0].losses == second[0].losses
    assert first[1] == second[1]


def test_the_embedding_is_tied() -> None:
    names = [name for name, _ in gpt.GPT(64, 2, 4, 64).named_parameters()]
    assert sum("embed" in name for name in names) == 1


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    rates = [gpt.learning_rate(step, gpt.DEFAULTS) for step in range(1501)]
    assert max(rates) < gpt.DEFAULTS["lr"]
    assert rates[0] < rates[50] < rates[99]
    assert rates[1500] == pytest.approx(gpt.DEFAULTS["lr"] / 10)


def test_the_digits_are_learnt(tmp_path: Path) -> None:
    folder = digits.prepare(tmp_path)
    made = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    digits.prepare(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == made
    run = PlainRun()
    value = digits.train(run, {"data": str(folder), "steps": 100})  # type: ignore[arg-type]
    assert value["test_accuracy"] > 0.8
    assert set(run.registered) == {"model", "optimizer"}
