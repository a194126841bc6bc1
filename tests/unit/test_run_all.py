"""The benchmark harness: what it accepts, what it refuses, what it writes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HARNESS = Path(__file__).resolve().parents[2] / "benchmarks" / "run_all.py"
ROW = {
    "name": "sync",
    "ours": 2.0,
    "peer": 1.0,
    "peer_name": "ddp",
    "ratio": 2.0,
    "floor": 0.97,
    "unit": "steps/s",
}


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The harness, working in an empty folder."""
    spec = importlib.util.spec_from_file_location("run_all", HARNESS)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module, "LATEST", tmp_path / "results" / "latest.json")
    return module


def plant(folder: Path, name: str, row: dict[str, Any], exit_code: int = 0) -> None:
    code = f"import json, sys\nprint('talk')\nprint(json.dumps([{row!r}], indent=1))\n"
    (folder / f"{name}.py").write_text(code + f"sys.exit({exit_code})\n")


def test_all_fields_are_written(harness: Any, tmp_path: Path) -> None:
    plant(tmp_path, "sync", ROW)
    assert harness.main([]) == 0
    (row,) = json.loads(harness.LATEST.read_text())
    assert tuple(row) == harness.FIELDS
    assert (row["ratio"], row["command"]) == (2.0, "python benchmarks/sync.py")
    assert row["machine"]


def test_a_ratio_below_its_floor_is_written_and_fails(harness: Any, tmp_path: Path) -> None:
    plant(tmp_path, "sync", ROW | {"ratio": 0.9}, exit_code=1)
    assert harness.main([]) == 1
    assert json.loads(harness.LATEST.read_text())[0]["ratio"] == 0.9


@pytest.mark.parametrize(
    ("row", "exit_code"),
    [({"name": "sync"}, 0), (ROW, 2)],
    ids=["fields are missing", "it crashed"],
)
def test_a_broken_benchmark_does_not_hide_the_others(
    harness: Any, tmp_path: Path, row: dict[str, Any], exit_code: int
) -> None:
    plant(tmp_path, "broken", row, exit_code)
    plant(tmp_path, "good", ROW)
    assert harness.main([]) == 1
    assert len(json.loads(harness.LATEST.read_text())) == 1


def test_an_unknown_name_is_refused(harness: Any) -> None:
    assert harness.main(["nothing"]) == 2
