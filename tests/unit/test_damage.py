"""A stopped run whose checkpoint files were damaged: the newest whole step, or a clear verdict.

Every file of the newest step in turn, on disk and in the object tier. What is restored is always
bit for bit a state that the run had; what was passed over is named with its reason.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import stopped_run
import torch
from stopped_run import Resumed, damage, state_of

from relit_platform.facts import RunHistory

HOW = ("deleted", "truncated", "flipped")
IMAGES = ("rank-00000.safetensors", "rank-00001.safetensors")
EXTRAS = ("rank-00000.json", "rank-00001.json")


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """disk: steps 20 and 30 on disk, 20 in the object tier too. object: 20 and 40 in that tier
    alone. both: 20 and 40 on either.
    """
    folders = {name: tmp_path_factory.mktemp(name) for name in ("disk", "object", "both")}
    stopped_run.save(folders["disk"], (10, 20, 30))
    stopped_run.save(folders["both"], (20, 40))
    shutil.copytree(folders["both"] / "store", folders["object"] / "store")
    return folders


@pytest.fixture
def copy(templates: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda tier: Path(shutil.copytree(templates[tier], tmp_path / "run"))


def file_of(root: Path, tier: str, step: int, name: str) -> Path:
    top = root / "store" if tier == "object" else root / "disk" / "r" / stopped_run.NODE
    return top / "checkpoints" / "steps" / f"{step:012d}" / "g000001" / name


def restored(result: Resumed) -> int:
    """The step whose state the run goes on with; it must be that state to the bit."""
    assert result.step and result.tensors is not None, result
    wanted = state_of(result.step)
    assert set(result.tensors) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(result.tensors[name], tensor), (result.step, name)
    return result.step


def says(result: Resumed, step: int, name: str) -> bool:
    """True if a refusal names this file of this step, with a reason."""
    said = [r for r in result.refusals if r["step"] == step and r["reason"]]
    assert any(str(r["file"]).endswith(name) for r in said), (name, said)
    return True


@pytest.mark.parametrize(("tier", "step"), [("disk", 30), ("object", 40)])
def test_undamaged(copy: Callable[[str], Path], tier: str, step: int) -> None:
    result = stopped_run.resume(copy(tier))
    assert (restored(result), result.tier, result.refusals) == (step, tier, [])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", [*IMAGES, *EXTRAS])
def test_a_file_on_disk(copy: Callable[[str], Path], name: str, how: str) -> None:
    root = copy("disk")
    damage(file_of(root, "disk", 30, name), how)
    result = stopped_run.resume(root)
    assert (restored(result), result.tier) == (20, "disk")
    assert says(result, 30, name)


@pytest.mark.parametrize(
    ("name", "how", "step", "file"),
    [
        # The records of both shards are there, so the manifest is written once more.
        ("manifest.json", "deleted", 30, ""),
        ("manifest.json", "truncated", 20, "manifest.json"),
        ("rank-00001.record", "deleted", 20, "rank-00001.safetensors"),
        ("rank-00001.record", "truncated", 20, "rank-00001.record"),
    ],
)
def test_a_description_on_disk(
    copy: Callable[[str], Path], name: str, how: str, step: int, file: str
) -> None:
    root = copy("disk")
    damage(file_of(root, "disk", 30, name), how)
    result = stopped_run.resume(root)
    assert restored(result) == step
    assert not file or says(result, 30, file)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.record"])
def test_any_bit_of_a_description(copy: Callable[[str], Path], name: str, seed: int) -> None:
    """A bit that says nothing (a time) may be passed over; what is restored is exact either way."""
    root = copy("disk")
    damage(file_of(root, "disk", 30, name), "flipped", seed)
    result = stopped_run.resume(root)
    assert restored(result) == 30 or says(result, 30, "")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", [*IMAGES, *EXTRAS, "manifest.json"])
def test_a_file_in_the_object_tier(copy: Callable[[str], Path], name: str, how: str) -> None:
    root = copy("object")
    damage(file_of(root, "object", 40, name), how)
    result = stopped_run.resume(root)
    assert (restored(result), result.tier) == (20, "object")
    assert says(result, 40, name)


@pytest.mark.parametrize("how", HOW)
def test_the_commit_of_the_newest_step(copy: Callable[[str], Path], how: str) -> None:
    root = copy("object")
    damage(log_records(root)[-1], how)
    result = stopped_run.resume(root)
    assert (restored(result), result.tier) == (20, "object")


def log_records(root: Path) -> list[Path]:
    return sorted((root / "store" / "checkpoints" / "log").iterdir())


def test_the_other_tier_has_the_step_too(copy: Callable[[str], Path]) -> None:
    root = copy("both")
    damage(file_of(root, "disk", 40, IMAGES[0]), "flipped")
    result = stopped_run.resume(root)
    assert (restored(result), result.tier) == (40, "object")
    assert says(result, 40, IMAGES[0])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", [IMAGES[1], EXTRAS[0]])
def test_nothing_whole_is_left(copy: Callable[[str], Path], name: str, how: str) -> None:
    root = copy("both")
    broken = sorted((root).rglob(name))
    for path in broken:
        damage(path, how)
    result = stopped_run.resume(root)
    assert result.tensors is None and result.verdict.startswith("not_restorable"), result
    for path in broken:
        assert path.parent.parent.name.lstrip("0") in result.verdict
    assert name in result.verdict


@pytest.mark.parametrize("left", ["", "checkpoints/log"])
def test_all_checkpoints_are_gone(copy: Callable[[str], Path], left: str) -> None:
    """The run directory remembers that there were some: never from scratch in silence."""
    root = copy("both")
    shutil.rmtree(root / "disk")
    shutil.rmtree(root / "store" / "checkpoints" / ("" if not left else "steps"))
    result = stopped_run.resume(root, RunHistory(generation=1, last_row_step=40, saved_step=40))
    assert result.tensors is None and result.verdict.startswith("not_restorable"), result
    assert not left or "step 40" in result.verdict


def test_before_the_first_checkpoint_a_run_begins_again(tmp_path: Path) -> None:
    result = stopped_run.resume(tmp_path, RunHistory(generation=1, last_row_step=7))
    assert (result.step, result.verdict) == (0, "")
