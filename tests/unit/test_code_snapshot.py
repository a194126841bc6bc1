from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest

from relit.errors import EntryError, SnapshotError
from relit.spec import code_snapshot
from relit.spec.code_snapshot import snapshot
from relit.spec.entry import find_entry
from relit.spec.model import JobSpec
from relit.spec.resolve import resolve


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def spec_for(entry: str, working_dir: Path | None = None, **env: object) -> JobSpec:
    place = {} if working_dir is None else {"working_dir": str(working_dir)}
    return JobSpec.parse({"name": "a", "entry": entry, "env": {**place, **env}})


def names(data: bytes) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(data)).namelist()


def test_same_files_give_the_same_bytes_whatever_their_times_and_place(tmp_path: Path) -> None:
    for place in ("one", "two"):
        write(
            tmp_path / place, {"train.py": "def train(run, cfg): ...", "lib/b.py": "", "a.txt": "x"}
        )
    os.utime(tmp_path / "two" / "train.py", (1, 1))
    zips = [snapshot(find_entry(spec_for("train:train", tmp_path / p))) for p in ("one", "two")]
    assert zips[0].data == zips[1].data
    assert zips[0].sha == zips[1].sha
    assert names(zips[0].data) == ["a.txt", "lib/b.py", "train.py"]
    write(tmp_path / "two", {"lib/b.py": "changed"})
    assert snapshot(find_entry(spec_for("train:train", tmp_path / "two"))).sha != zips[0].sha


def test_rubbish_secrets_and_excluded_files_stay_out(tmp_path: Path) -> None:
    kept = {"train.py": "def train(): ...", "pkg/model.py": "", "conf.yaml": ""}
    dropped = {
        ".git/HEAD": "", ".venv/bin/x": "", "__pycache__/a.pyc": "", "x.pyc": "", ".env": "S=1",
        "my.pem": "", "a.egg-info/PKG": "", "data/big.bin": "", "notes.md": "",
    }  # fmt: skip
    write(tmp_path, kept | dropped)
    spec = spec_for("train.py:train", tmp_path, exclude=["data", "*.md"])
    found = snapshot(find_entry(spec), spec.env.exclude)
    assert names(found.data) == sorted(kept)


def test_too_large_names_the_biggest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_snapshot, "MAX_BYTES", 1000)
    write(tmp_path, {"train.py": "def train(): ...", "weights.bin": "x" * 2000})
    with pytest.raises(SnapshotError, match=r"weights\.bin .*env\.exclude"):
        snapshot(find_entry(spec_for("train:train", tmp_path)))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("nothing_here:train", "no module 'nothing_here'"),
        ("missing.py:train", "no file"),
        ("train:trian", "did you mean 'train'"),
        ("broken:train", "does not parse"),
        ("pkg.nope:train", "no module 'pkg.nope'"),
        ("../outside.py:train", "not below env.working_dir"),
    ],
)
def test_a_missing_module_or_function_is_named(entry: str, words: str, tmp_path: Path) -> None:
    write(tmp_path, {"outside.py": "def train(): ..."})
    write(
        tmp_path / "in", {"train.py": "def train(): ...", "broken.py": "(", "pkg/__init__.py": ""}
    )
    with pytest.raises(EntryError, match=words):
        find_entry(spec_for(entry, tmp_path / "in"))


@pytest.mark.parametrize(
    ("entry", "module", "contents"),
    [
        ("pkg.sub.job:go", "pkg.sub.job", ["pkg/__init__.py", "pkg/sub/job.py"]),
        ("pkg/sub/job.py:go", "job", ["job.py"]),
        ("alone:go", "alone", ["alone.py", "pkg/__init__.py", "pkg/sub/job.py"]),
    ],
)
def test_a_package_travels_alone_and_a_module_with_its_folder(
    entry: str, module: str, contents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = "try:\n    from m import go\nexcept ImportError:\n    def go(): ..."
    write(tmp_path, {"pkg/__init__.py": "raise SystemExit", "pkg/sub/job.py": job, "alone.py": job})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path if "/" in entry else "/")
    found = find_entry(spec_for(entry))
    assert found.module == module
    assert names(snapshot(found).data) == contents


def test_resolve_gives_what_the_platform_runs(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "def train(run, cfg): ..."})
    spec = spec_for("train.py:train", tmp_path)
    config, found = resolve(spec.model_copy(update={"config": {"lr": 0.1}, "run_id": "r1"}))
    assert (config.entry, config.run_key) == ("train:train", "default/r1")
    assert (config.code_sha, config.code_key) == (found.sha, f"code/{found.sha}.zip")
    assert os.path.isabs(config.store)
    assert type(config).from_json(config.to_json()) == config


def test_config_identity_follows_what_decides_losses(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "def train(run, cfg): ..."})
    spec = spec_for("train.py:train", tmp_path)
    shas = {
        resolve(spec.model_copy(update=change))[0].config_sha
        for change in ({}, {"config": {"a": 1}}, {"seed": 1}, {"tags": {"x": "y"}})
    }
    assert len(shas) == 3
