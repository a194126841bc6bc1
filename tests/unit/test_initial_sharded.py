"""A sharded model begins with whole saved tensors: each rank takes its own part."""

from __future__ import annotations

import pytest
import torch
from meshes import ARRANGEMENTS, assert_same, local
from test_taking_over import rule, saved_of

from relit_platform.worker.taking_over import Saved, take_over

SHARDED = ("fsdp-1", "fsdp-3", "hsdp-2x2", "fsdp-tp-2x2")


@pytest.fixture(scope="module")
def saved() -> Saved:
    """State of a job that was not sharded."""
    for _ in ARRANGEMENTS["whole-1"].ranks():
        found = saved_of(ARRANGEMENTS["whole-1"].job(5).objects)
    return found


@pytest.mark.parametrize("name", SHARDED)
def test_every_rank_takes_its_part_of_all(saved: Saved, name: str) -> None:
    for _ in ARRANGEMENTS[name].ranks():
        ours, wanted = ARRANGEMENTS[name].job(3), ARRANGEMENTS[name].job(5)
        report = take_over(ours.objects, saved, rule(weights_only=False))
        assert report.whole and report.missing == report.unexpected == ()
        assert_same(ours, wanted)


@pytest.mark.parametrize("name", SHARDED)
def test_every_rank_takes_its_part_of_the_weights(saved: Saved, name: str) -> None:
    for _ in ARRANGEMENTS[name].ranks():
        ours, wanted = ARRANGEMENTS[name].job(3), ARRANGEMENTS[name].job(5)
        report = take_over(ours.objects, saved, rule())
        assert report.objects == ("model",)
        theirs = wanted.model.state_dict()
        for key, tensor in ours.model.state_dict().items():
            assert torch.equal(local(tensor), local(theirs[key])), key
        assert ours.extra["seen"] == 3
