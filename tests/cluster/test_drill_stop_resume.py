"""Stopped by Ctrl-C, by `relit stop`, by the end of its job; resumed at exactly that step.

After the last stop its checkpoint is damaged: the run resumes from the one before.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import damage
import harness
import pytest
import shell
import victims

from relit.handle import JobHandle

pytestmark = pytest.mark.cluster

STEPS = 200
STOPS = {"ctrl-c": 50, "relit stop": 100, "end of the job": 150}  # held after these steps


def check_stopped(job: JobHandle, held_at: int) -> int:
    """Everything that a stop promises; the step at which the run stands."""
    status = job.status()
    assert status["state"] == "STOPPED", status
    step = int(status["step"])
    assert step == held_at + 1  # the one that was held
    assert [row["step"] for row in job.metrics()] == list(range(1, step + 1))
    assert (status["committed"]["disk"], status["committed"]["object"]) == (step, step)
    return step


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


def damaged(lab: Any, job: JobHandle, step: int) -> None:
    """This step is whole nowhere: on disk a shard has a flipped bit, the object has no manifest."""
    on_disk, in_store = damage.folders(lab.root, job, step)
    damage.flip(on_disk / "rank-00001.safetensors")
    (in_store / "manifest.json").unlink()


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
        if how == "end of the job":
            damaged(lab, job, steps[-1])
        assert shell.relit_cli("resume", job.id, "--store", str(lab.root / "store")).code == 0
    assert job.wait(timeout_s=harness.WAIT_S)["state"] == "SUCCEEDED", job.status()
    restored = [data for data in damage.formations(job) if data["source"] == "checkpoint"]
    tried = [(data["start_step"], data["tier"]) for data in restored]
    assert tried == [(step, "disk") for step in (*steps, steps[-1] // 20 * 20)]
    assert {"rank-00001.safetensors", "manifest.json"} <= damage.refused_files(restored[-1])
    assert harness.losses(job) == harness.head(calm, STEPS)
    [incident] = job.incidents()
    assert incident["cause"]["code"] == "restore_refused" and incident["recovered"], incident
    assert lab.leaks(job.id) == []
