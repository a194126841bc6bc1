"""`relit.load_checkpoint`: tensors of a step by name, verified, in a process of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from saved_run import Saved, Tied, Trained, make_run

import relit
from relit.errors import (
    BadInputError,
    CheckpointBrokenError,
    CheckpointNotFoundError,
    RunNotFoundError,
)
from relit_storage.run.layout import shard_key


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saved:
    monkeypatch.setenv("RELIT_STORE", str(tmp_path / "store"))
    run = make_run(tmp_path)
    run.commit([10, 20])
    return run


def test_weights_load_into_the_model(saved: Saved) -> None:
    found = relit.load_checkpoint("r1")
    assert (found.run_id, found.step) == ("r1", 20)
    model = Tied()
    model.load_state_dict(found.of("model"))
    for key, tensor in Trained(20).model.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor)
    assert found["model.head.weight"].data_ptr() == found["model.embed.weight"].data_ptr()


def test_everything_of_an_older_step(saved: Saved) -> None:
    found = relit.load_checkpoint(saved.job.path, 10, weights_only=False)
    wanted = Trained(10).flatten()[0]
    assert wanted.keys() <= found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_only_what_is_asked_for_is_read(saved: Saved) -> None:
    found = relit.load_checkpoint("r1", only="model.body.*")
    assert sorted(found) == ["model.body.bias", "model.body.weight"]
    assert len(relit.load_checkpoint("r1", only=["model.short", "*.bias"])) == 3
    with pytest.raises(BadInputError, match=r"no name fits nothing\.\*; there are model\.body"):
        relit.load_checkpoint("r1", only="nothing.*")
    with pytest.raises(BadInputError, match="'ema' is loaded; there is model"):
        found.of("ema")


def flip(saved: Saved, step: int) -> None:
    for rank in (0, 1):
        path = saved.path(shard_key(step, 1, rank))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def test_damage_gives_way_to_an_older_step_or_is_named(saved: Saved) -> None:
    flip(saved, 20)
    found = relit.load_checkpoint("r1", weights_only=False)
    assert found.step == 10
    with pytest.raises(CheckpointBrokenError, match=r"step 20.*checksum"):
        relit.load_checkpoint("r1", 20, weights_only=False)


def test_what_is_not_there_is_said(saved: Saved) -> None:
    with pytest.raises(RunNotFoundError):
        relit.load_checkpoint("nobody")
    with pytest.raises(CheckpointNotFoundError, match="10, 20"):
        relit.load_checkpoint("r1", 15)
