"""What `relit ckpt` says of damaged runs: hundreds of kinds of damage, drawn from a seed.

a copy that --deep calls whole reads back bit for bit, extras included
a copy that no damage has touched is called whole
nothing but a RelitError comes out, whatever the damage
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import corruptions
import pytest
import stopped_run
import torch
from stopped_run import NODE, state_of

from relit_storage.checkpoint.copies import StepCopy, take_inventory
from relit_storage.checkpoint.copy_reading import CopyReader
from relit_storage.checkpoint.verifying import verify_copy
from relit_storage.stores.local import LocalStore

COUNT, STEPS = 150, (20, 40)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    stopped_run.save(root, STEPS)
    return root


def whole_copies(root: Path) -> list[StepCopy]:
    store = LocalStore(str(root / "store"))
    disks = [LocalStore(str(root / "disk" / "r" / NODE))]
    copies = take_inventory(store, disks).copies
    return [copy for copy in copies if not verify_copy(copy, deep=True)]


def difference(copy: StepCopy) -> str:
    """What a copy holds that the run did not, or ""."""
    reader, wanted = CopyReader(copy), state_of(copy.step)
    if {tensor.name for tensor in reader.manifest.tensors} != set(wanted):
        return "other tensors"
    for tensor in reader.manifest.tensors:
        raw = torch.frombuffer(reader.read(tensor), dtype=torch.float32)
        if not torch.equal(raw.view(tensor.global_shape), wanted[tensor.name]):
            return tensor.name
    extras = [reader.extras(rank) for rank in (0, 1)]
    return "" if extras == [{"step": copy.step, "rank": rank} for rank in (0, 1)] else "extras"


def test_the_undamaged_run(template: Path) -> None:
    whole = whole_copies(template)
    places = [(copy.tier, copy.step) for copy in whole]
    assert places == [("disk", 40), ("object", 40), ("disk", 20), ("object", 20)]
    assert [difference(copy) for copy in whole] == [""] * 4


def test_any_damage(template: Path, tmp_path: Path) -> None:
    found_broken = 0
    for number in range(COUNT):
        rng = random.Random(f"tools {number}")
        root = tmp_path / str(number)
        shutil.copytree(template, root, copy_function=shutil.copyfile)
        files = corruptions.victims(root)
        done = [corruptions.apply(files, rng) for _ in range(rng.choice((1, 1, 2, 3)))]
        what = f"seed {number}: {[told for told, _ in done]}"
        touched = {place for _, places in done for place in places}
        whole = whole_copies(root)
        said = {(copy.tier, copy.step) for copy in whole}
        for copy in whole:
            assert not difference(copy), f"{what}: {copy.tier} {copy.step}: {difference(copy)}"
        for tier in ("disk", "object"):
            for step in STEPS:
                assert (tier, step) in said or (tier, step) in touched, f"{what}: {tier} {step}"
        found_broken += len(said) < 4
        shutil.rmtree(root, ignore_errors=True)
    assert found_broken > COUNT / 2
