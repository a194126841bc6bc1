"""What the cluster tests share: one real local cluster, real jobs, real kills, and a leak check.

A fault is addressed by (rank, step, phase) through the spec's `faults`, or is a SIGKILL of a pid
that status.json names, sent when the run has reached a step. Nothing is timed by sleeping.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import leaks

import relit
from relit.examples import digits
from relit.handle import JobHandle

WAIT_S = 240.0
HELD = str(Path(__file__).with_name("held.py")) + ":train"
POLL_S = 0.02
ASK_S = 2.0
# What LAB_API_TOKEN holds on the lab's cluster; in parts, for this file is kept with many runs.
TOKEN = "-".join(["lab", "7c1f09e2", "d3b84a65"])


@dataclass(frozen=True, slots=True)
class Lab:
    """Where the tests' runs live."""

    root: Path
    data: Path

    def spec(self, name: str, *, steps: int = 120, **changes: Any) -> relit.JobSpec:
        """A two-rank digits job; `changes` are fields of JobSpec that differ from the usual."""
        body: dict[str, Any] = {
            "name": name,
            "run_id": name,
            "entry": "relit.examples.digits:train",
            "config": {"data": str(self.data), "steps": steps},
            "store": str(self.root / "store"),
            "scaling": {"workers": 2},
            "checkpoint": {
                "disk_every_steps": 20,
                "object_every_steps": 40,
                "disk_dir": str(self.root / "disk"),
            },
        }
        for key, value in changes.items():
            nested = key in ("scaling", "checkpoint", "recovery", "config")
            body[key] = {**body.get(key, {}), **value} if nested else value
        return relit.JobSpec.model_validate(body)

    def submit(self, name: str, **changes: Any) -> JobHandle:
        """Submit such a job to the local cluster."""
        return relit.submit(self.spec(name, **changes))

    def stoppable_spec(self, name: str, stop_at: list[int], **changes: Any) -> relit.JobSpec:
        """The digits job that waits, after each of these steps, for a stop."""
        marks = str(self.root / "marks" / name)
        config = {**changes.pop("config", {}), "stop_at": stop_at, "marks": marks}
        return self.spec(name, entry=HELD, config=config, **changes)

    def going(self, name: str, hold_at: list[int], **changes: Any) -> JobHandle:
        """Submit the digits job of which rank 0 waits after each of these steps for `let_go`."""
        marks = str(self.root / "marks" / name)
        config = {**changes.pop("config", {}), "go_at": hold_at, "marks": marks}
        return self.submit(name, entry=HELD, config=config, **changes)

    def until_held(self, job: JobHandle, step: int) -> None:
        """Wait until rank 0 of such a job holds the step after this one.

        The run is asked now and then whether it is over: its store may be on a server in this very
        process, on two cores.
        """
        mark = self.root / "marks" / job.id / str(step)
        until(job, lambda _: _appears(mark, ASK_S))

    def let_go(self, job: JobHandle, step: int) -> None:
        """Whoever holds that step, or comes to it later, goes on."""
        (self.root / "marks" / job.id / f"go-{step}").touch()

    def run(self, name: str, **changes: Any) -> JobHandle:
        """Submit it and wait for its end."""
        job = self.submit(name, **changes)
        job.wait(timeout_s=WAIT_S)
        return job

    def leaks(self, run_id: str) -> list[str]:
        """What a finished run left behind, once its supervisor has had the time to clean up."""
        job = relit.Client(store=str(self.root / "store")).get(run_id)
        whole = job.status()["state"] == "SUCCEEDED"  # other runs keep their disk for a resume
        return self.left_by(job, disk=not whole)

    def left_by(self, job: JobHandle, *, disk: bool) -> list[str]:
        """The same of a run with a store of its own; disk: its disk tier may stay."""
        return leaks.left_by(self.root, job.id, list(job.events()), disk=disk)


def prepare(root: Path) -> Lab:
    """Write the digits data once."""
    return Lab(root=root, data=digits.prepare(root / "digits"))


def losses(job: JobHandle) -> dict[int, float]:
    """Loss by step, of the surviving line."""
    return {int(row["step"]): float(row["loss"]) for row in job.metrics()}


def head(calm: Mapping[int, float], steps: int) -> dict[int, float]:
    """What a run of `steps` steps must show: the calm run's losses as far as that."""
    return {step: calm[step] for step in range(1, steps + 1)}


def _appears(mark: Path, within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while not (there := mark.exists()) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return there


def until(job: JobHandle, ready: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
    """Poll the live status until `ready`; fails loudly if the run ends or nothing happens."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        status = job.status()
        if ready(status):
            return status
        assert status["state"] not in ("SUCCEEDED", "FAILED", "STOPPED"), status
        time.sleep(POLL_S)
    raise AssertionError(f"not reached in {WAIT_S} s: {job.status()}")


def at_step(job: JobHandle, step: int) -> Mapping[str, Any]:
    """Wait until the run has completed `step` steps."""
    return until(job, lambda status: int(status.get("step") or 0) >= step)


def pids(status: Mapping[str, Any]) -> dict[int, int]:
    """Pid by rank."""
    return {int(w["rank"]): int(w["pid"]) for w in status["workers"] if w["rank"] is not None}


def kill(*targets: int) -> None:
    """SIGKILL these pids, all at once, and wait for their ends; Ray reaps them.

    A process that gives back gigabytes is there for a while, and a status that names it would be
    taken for one of its successor.
    """
    assert min(targets) > 1
    ends = [os.pidfd_open(pid) for pid in targets]
    for end in ends:
        signal.pidfd_send_signal(end, signal.SIGKILL)
    for end in ends:
        _await_end(end)


def gone(pid: int) -> None:
    """Wait for the end of a process that leaves by itself."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    _await_end(end)


def _await_end(end: int) -> None:
    ended, _, _ = select.select([end], [], [], WAIT_S)
    os.close(end)
    assert ended, "a process does not die"


def alive(pid: int) -> bool:
    """True while the process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
