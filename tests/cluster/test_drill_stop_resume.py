"""Stopped by Ctrl-C, by `relit stop`, by the end of its job; resumed at exactly that step."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import harness
import pyarrow.parquet as pq
import pytest
import shell
import victims

import relit
from relit.handle import JobHandle

pytestmark = pytest.mark.cluster

STEPS = 200
DRIFT_STEPS = 60
STOPS = {"ctrl-c": 50, "relit stop": 100, "end of the job": 150}  # held after these steps
CODE = """
import time
from relit.examples import digits

LR = {lr}

class Held:  # goes on after the twentieth step only when a stop was asked for
    def __init__(self, run):
        self._run = run

    def __getattr__(self, name):
        return getattr(self._run, name)

    def batches(self, *data, **sizes):
        for batch in self._run.batches(*data, **sizes):
            looks = 0
            while self._run.step_no == 20 and not self._run.stop_requested:
                looks += 1
                assert looks < 2000, "nobody asked for a stop"
                time.sleep(0.05)
            yield batch

def train(run, cfg):
    return digits.train(Held(run), cfg | {{"lr": LR}})
"""


def check_stopped(job: JobHandle, held_at: int) -> int:
    """Everything that a stop promises; the step at which the run stands."""
    status = job.status()
    assert status["state"] == "STOPPED", status
    step = int(status["step"])
    assert step == held_at + 1  # the one that was held
    assert [row["step"] for row in job.metrics()] == list(range(1, step + 1))
    assert (status["committed"]["disk"], status["committed"]["object"]) == (step, step)
    return step


def restored(job: JobHandle) -> list[tuple[int, str]]:
    """Step and tier of every restore, in order."""
    formed = [event["data"] for event in job.events() if event["kind"] == "generation.formed"]
    return [(d["start_step"], d["tier"]) for d in formed if d["source"] == "checkpoint"]


def stop_by(how: str, lab: Any, job: JobHandle, waiting: Any) -> int:
    """Stop the run in one of three ways; the step at which it stands, and the exit codes."""
    lab.until_held(job, STOPS[how])
    store = str(lab.root / "store")
    if how == "ctrl-c":
        waiting.send_signal(signal.SIGINT)
        assert shell.end(waiting).code == 103
    elif how == "relit stop":
        assert shell.relit_cli("stop", job.id, "--store", store).code == 103
    else:
        for pid in victims.pids_of(job, job.status(), "driver"):
            victims.send(pid, signal.SIGTERM)
        job.wait(timeout_s=harness.WAIT_S)
    assert shell.relit_cli("result", job.id, "--store", store).code == 103
    return check_stopped(job, STOPS[how])


def test_a_stop_commits_and_a_resume_goes_on_right_there(
    lab: Any, calm: dict[int, float], tmp_path: Path
) -> None:
    held = lab.stoppable_spec("stopped", list(STOPS.values()), steps=STEPS)
    spec = shell.write_spec(tmp_path, held)
    waiting = shell.start("submit", spec, "--wait")
    job = shell.job_of(lab.root / "store", "stopped")
    steps = []
    for how in STOPS:
        steps.append(stop_by(how, lab, job, waiting))
        if how != "relit stop":  # that one is resumed while its supervisor still cleans up
            assert lab.leaks(job.id) == []
        assert shell.relit_cli("resume", job.id, "--store", str(lab.root / "store")).code == 0
    assert job.wait(timeout_s=harness.WAIT_S)["state"] == "SUCCEEDED", job.status()
    assert restored(job) == [(step, "disk") for step in steps]
    assert harness.losses(job) == harness.head(calm, STEPS)
    assert job.incidents() == []
    assert lab.leaks(job.id) == []


def test_what_decides_the_losses_changes_by_name_only(lab: Any, tmp_path: Path) -> None:
    """config, code and data set; each refused with what differs, then allowed by its flag."""
    code, data = tmp_path / "code", tmp_path / "data"
    code.mkdir()
    data.mkdir()
    for file in lab.data.iterdir():
        (data / file.name).write_bytes(file.read_bytes())
    (code / "job.py").write_text(CODE.format(lr=0.002))
    spec = lab.spec(
        "drift",
        steps=DRIFT_STEPS,
        entry="job.py:train",
        config={"data": str(data)},
        env={"working_dir": str(code)},
    )
    path = shell.write_spec(tmp_path, spec)
    job = relit.submit(spec)
    harness.at_step(job, 1)
    job.stop()
    assert job.wait(timeout_s=harness.WAIT_S)["state"] == "STOPPED"
    resume = ("resume", "drift", "--store", str(lab.root / "store"))

    said = shell.relit_cli(*resume, "config.lr=0.5")
    assert said.code == 2 and "config.lr" in said.text and "0.5" in said.text, said
    (code / "job.py").write_text(CODE.format(lr=0.004))
    said = shell.relit_cli(*resume, "--spec", path)
    assert said.code == 2 and "job.py changed" in said.text, said
    table = pq.read_table(data / "train.parquet")
    pq.write_table(table.slice(0, 1200), data / "train.parquet", row_group_size=100)
    said = shell.relit_cli(*resume, "--wait")
    assert said.code == 2 and f"{table.num_rows} rows became 1200." in said.text, said
    assert "--allow-data-change" in said.text
    flags = ("--allow-code-change", "--allow-data-change")
    said = shell.relit_cli(*resume, "--spec", path, *flags, "--wait")
    assert said.code == 0, said
    assert [row["step"] for row in job.metrics()] == list(range(1, DRIFT_STEPS + 1))
