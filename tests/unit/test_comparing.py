"""Steps compared tensor by tensor, in however many pieces either has them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from cut_state import SPLITS
from saved_run import Saved, Tensors, Trained, make_run

from relit_storage.checkpoint.comparing import TensorChange, compare_tensors
from relit_storage.checkpoint.copies import take_inventory
from relit_storage.checkpoint.copy_reading import CopyReader
from relit_storage.checkpoint.manifest_entries import ShardEntry

PAIRS = list(itertools.pairwise([*SPLITS, next(iter(SPLITS))]))


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return make_run(tmp_path)


class Unread(CopyReader):
    """Fails where a chunk is read."""

    def chunk(self, shard: ShardEntry, index: int) -> memoryview:
        raise AssertionError(f"chunk {index} of {shard.file} was read")


def compared(
    saved: Saved, splits: tuple[str, str], states: tuple[Tensors, Tensors], kind: type[CopyReader]
) -> list[TensorChange]:
    """Steps 10 and 20 of two worlds that hold these tensors."""
    for step, split, state in zip((10, 20), splits, states, strict=True):
        saved.commit([step], state=(state, {}), split=SPLITS[split])
    newer, older = take_inventory(saved.store).copies
    done: list[int] = []
    changes = list(compare_tensors(kind(older), kind(newer), done.append))
    assert sum(done) == sum(tensor.nbytes for tensor in states[0].values())
    return changes


@pytest.mark.parametrize("splits", PAIRS, ids=" and ".join)
def test_other_worlds_with_the_same_state_are_equal(saved: Saved, splits: tuple[str, str]) -> None:
    state = Trained(10).flatten()[0]
    assert compared(saved, splits, (state, state), CopyReader) == []


@pytest.mark.parametrize("splits", PAIRS, ids=" and ".join)
def test_what_differs_is_found_in_any_piece(saved: Saved, splits: tuple[str, str]) -> None:
    state = Trained(10).flatten()[0]
    other = {name: tensor.clone() for name, tensor in state.items()}
    other["model.embed.weight"][59, 7] += 2.0
    other["model.embed.weight"][0, 0] -= 1.0
    other["model.short"] = torch.zeros(5, 3, dtype=torch.bfloat16)
    del other["model.norm.bias"]
    all_changes = compared(saved, splits, (state, other), CopyReader)
    changes = {change.name: change for change in all_changes}
    assert {name: change.what for name, change in changes.items()} == {
        "model.embed.weight": "values",
        "model.short": "dtype or shape",
        "model.norm.bias": "only in A",
    }
    found = changes["model.embed.weight"]
    assert (found.differing, found.elements) == (2, 480)
    assert found.max_abs == pytest.approx(2.0)


@pytest.mark.parametrize("split", SPLITS)
def test_equal_pieces_at_equal_places_are_not_read(saved: Saved, split: str) -> None:
    state = Trained(10).flatten()[0]
    assert compared(saved, (split, split), (state, state), Unread) == []
