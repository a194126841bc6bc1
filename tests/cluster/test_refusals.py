"""What relit will not save, and what it will not show: one job that tries both for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import pytest
import shell

import relit

pytestmark = pytest.mark.cluster

# The token is the cluster's, see conftest; a line, an error's text and a metric's name carry it.
CODE = """
import os
import sys
from relit.examples import digits

class Schedule:
    def state_dict(self):
        return {"after": [lambda step: step]}

    def load_state_dict(self, state):
        pass

class Run:
    '''The run, with one more registered object.'''

    def __init__(self, run, token, leak):
        self._run, self._token, self._leak = run, token, leak

    def __getattr__(self, name):
        return getattr(self._run, name)

    def register(self, **objects):
        more = {} if self._leak else {"schedule": Schedule()}
        self._run.register(**objects, **more)

    def batches(self, *data, **sizes):
        for batch in self._run.batches(*data, **sizes):
            if self._leak and self._run.step_no == 30:
                raise RuntimeError(f"401 Unauthorized: Bearer {self._token}")
            yield batch

def train(run, cfg):
    token = os.environ["LAB_API_TOKEN"]
    print("the token is", token)
    print("the token is", token, file=sys.stderr)
    return digits.train(Run(run, token, cfg["leak"]), cfg)
"""


def refused(lab: Any, folder: Path, name: str, leak: bool) -> shell.Said:
    """Submit such a job and wait for its end."""
    (folder / "job.py").write_text(CODE)
    spec = lab.spec(
        name,
        entry="job.py:train",
        config={"leak": leak},
        env={"working_dir": str(folder), "secrets": ["LAB_API_TOKEN"]},
    )
    return shell.relit_cli("submit", shell.write_spec(folder, spec), "--wait")


def holding_token(lab: Any, secret: str) -> list[str]:
    """Files of the store and of the disk tier in which the secret can be read."""
    files = [path for name in ("store", "disk") for path in (lab.root / name).rglob("*")]
    return [str(path) for path in files if path.is_file() and secret.encode() in path.read_bytes()]


def test_state_that_needs_pickle_is_refused_by_name(lab: Any, tmp_path: Path) -> None:
    said = refused(lab, tmp_path, "not-savable", leak=False)
    assert said.code == 2, said
    assert "schedule.after" in said.text and "state_dict" in said.text, said.text
    job = relit.Client(store=str(lab.root / "store")).get("not-savable")
    assert any("the token is" in line for line in job.logs())
    assert lab.leaks(job.id) == []  # first, for it waits until nothing is deleted any more
    assert holding_token(lab, harness.TOKEN) == []


def test_a_secret_in_an_error_reaches_nobody_and_no_step_is_lost(lab: Any, tmp_path: Path) -> None:
    said = refused(lab, tmp_path, "leaky", leak=True)
    assert said.code == 100, said
    assert "401 Unauthorized" in said.text
    job = relit.Client(store=str(lab.root / "store")).get("leaky")
    printed = [said.text, *job.logs(), *map(str, job.events()), *map(str, job.incidents())]
    assert [text for text in printed if harness.TOKEN in text] == []
    # Disk is due at 20 and the object tier at 40: what memory held was saved before the end.
    committed = job.status()["committed"]
    assert (committed["disk"], committed["object"]) == (30, 30), job.status()
    assert [event["step"] for event in job.events() if event["kind"] == "ckpt.rescue"] == [30]
    assert lab.leaks(job.id) == []
    assert holding_token(lab, harness.TOKEN) == []
