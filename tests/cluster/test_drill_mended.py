"""What relit will not save and not show, and a failed run that its owner mends and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import damage
import harness
import pyarrow.parquet as pq
import pytest
import shell

import relit
from relit.handle import JobHandle

pytestmark = pytest.mark.cluster

STEPS, FAILS_AT = 60, 30
# The token is the cluster's, see conftest; a line, an error's text and a metric's name carry it.
CODE = """
import os
import sys
from relit.examples import digits

FAILS_AT = {fails_at}

class Schedule:
    def state_dict(self):
        return {{"after": [lambda step: step]}}

    def load_state_dict(self, state):
        pass

class Run:
    '''The run with one more registered object, or one that fails.'''

    def __init__(self, run, token, savable):
        self._run, self._token, self._savable = run, token, savable

    def __getattr__(self, name):
        return getattr(self._run, name)

    def register(self, **objects):
        more = {{}} if self._savable else {{"schedule": Schedule()}}
        self._run.register(**objects, **more)

    def batches(self, *data, **sizes):
        for batch in self._run.batches(*data, **sizes):
            if self._run.step_no == FAILS_AT:
                raise RuntimeError(f"401 Unauthorized: Bearer {{self._token}}")
            yield batch

def train(run, cfg):
    token = os.environ["LAB_API_TOKEN"]
    print("the token is", token)
    print("the token is", token, file=sys.stderr)
    return digits.train(Run(run, token, cfg["savable"]), cfg)
"""


def write_code(folder: Path, fails_at: int) -> None:
    """The user's own module."""
    (folder / "job.py").write_text(CODE.format(fails_at=fails_at))


def spec_of(lab: Any, name: str, code: Path, **config: Any) -> relit.JobSpec:
    """A job that runs the user's module."""
    write_code(code, FAILS_AT)
    env = {"working_dir": str(code), "secrets": ["LAB_API_TOKEN"]}
    spec: relit.JobSpec = lab.spec(
        name, steps=STEPS, entry="job.py:train", env=env, config=config
    )  # fmt: skip
    return spec


def job_of(lab: Any, name: str) -> JobHandle:
    return relit.Client(store=str(lab.root / "store")).get(name)


def holding_token(lab: Any, secret: str) -> list[str]:
    """Files of the store and of the disk tier in which the secret can be read."""
    files = [path for name in ("store", "disk") for path in (lab.root / name).rglob("*")]
    return [str(path) for path in files if path.is_file() and secret.encode() in path.read_bytes()]


def test_state_that_needs_pickle_is_refused_by_name(lab: Any, tmp_path: Path) -> None:
    spec = spec_of(lab, "not-savable", tmp_path, savable=False)
    said = shell.relit_cli("submit", shell.write_spec(tmp_path, spec), "--wait")
    assert said.code == 2, said
    assert "schedule.after" in said.text and "state_dict" in said.text, said.text
    job = job_of(lab, "not-savable")
    assert any("the token is" in line for line in job.logs())
    assert lab.leaks(job.id) == []  # first, for it waits until nothing is deleted any more
    assert holding_token(lab, harness.TOKEN) == []


def test_a_failed_run_is_mended_by_its_owner_and_goes_on(lab: Any, tmp_path: Path) -> None:
    code, data = tmp_path / "code", tmp_path / "data"
    code.mkdir()
    data.mkdir()
    for file in lab.data.iterdir():
        (data / file.name).write_bytes(file.read_bytes())
    path = shell.write_spec(tmp_path, spec_of(lab, "mended", code, savable=True, data=str(data)))
    fails_with_its_secret(lab, path)
    no_checkpoint_is_whole(lab, job_of(lab, "mended"))
    changes_by_name_only(lab, path, code, data)


def fails_with_its_secret(lab: Any, spec: str) -> None:
    """It reaches nobody, and no step is lost: what memory held is saved before the end."""
    said = shell.relit_cli("submit", spec, "--wait")
    assert said.code == 100, said
    assert "401 Unauthorized" in said.text
    job = job_of(lab, "mended")
    printed = [said.text, *job.logs(), *map(str, job.events()), *map(str, job.incidents())]
    assert [text for text in printed if harness.TOKEN in text] == []
    committed = job.status()["committed"]  # disk was due at 20, the object tier not yet
    assert (committed["disk"], committed["object"]) == (FAILS_AT, FAILS_AT), job.status()
    assert [e["step"] for e in job.events() if e["kind"] == "ckpt.rescue"] == [FAILS_AT]
    assert lab.leaks(job.id) == []
    assert holding_token(lab, harness.TOKEN) == []


def no_checkpoint_is_whole(lab: Any, job: JobHandle) -> None:
    """Every step is damaged, then made whole again: in between a resume ends with the reason."""
    damaged = damage.shards(lab.root, job, rank=0)
    assert len(damaged) == 3, damaged  # the step on disk, and the rescued one on both tiers
    for path in damaged:
        damage.flip(path)
    said = shell.relit_cli("resume", job.id, "--store", str(lab.root / "store"), "--wait")
    assert said.code == 100, said
    assert "rank-00000.safetensors" in said.text and "checksum" in said.text, said
    assert [data["source"] for data in damage.formations(job)].count("fresh") == 1
    assert [row["step"] for row in job.metrics()] == list(range(1, FAILS_AT + 1))
    assert lab.leaks(job.id) == []
    for path in damaged:
        damage.flip(path)


def changes_by_name_only(lab: Any, spec: str, code: Path, data: Path) -> None:
    """config, code and data set; each refused with what differs, then allowed by its flag."""
    resume = ("resume", "mended", "--store", str(lab.root / "store"))
    said = shell.relit_cli(*resume, "config.lr=0.5")
    assert said.code == 2 and "config.lr" in said.text and "0.5" in said.text, said
    write_code(code, fails_at=-1)
    said = shell.relit_cli(*resume, "--spec", spec)
    assert said.code == 2 and "job.py changed" in said.text, said
    table = pq.read_table(data / "train.parquet")
    pq.write_table(table.slice(0, 1200), data / "train.parquet", row_group_size=100)
    said = shell.relit_cli(*resume, "--wait")
    assert said.code == 2 and f"{table.num_rows} rows became 1200." in said.text, said
    assert "--allow-data-change" in said.text
    flags = ("--allow-code-change", "--allow-data-change")
    said = shell.relit_cli(*resume, "--spec", spec, *flags, "--wait")
    assert said.code == 0, said
    job = job_of(lab, "mended")
    assert [row["step"] for row in job.metrics()] == list(range(1, STEPS + 1))
    assert lab.leaks(job.id) == []
