"""The demo's own logic, without Ray: comparison, planned kills, watching, the twin's cache."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from relit.demo.compare import compare, losses_of
from relit.demo.display import RunDisplay, describe
from relit.demo.faults import Fault, kill_ray_process, plan_faults, victim
from relit.demo.twin import load_losses, save_losses, source_sha, twin_key
from relit.demo.watching import Watched, Watcher, watch
from relit.errors import NotFinishedError


@pytest.mark.parametrize(
    ("ours", "twin", "equal", "first"),
    [
        ({1: 0.1, 2: 0.2}, {1: 0.1, 2: 0.2}, 2, None),
        ({1: 0.1, 2: 0.2}, {1: 0.1, 2: math.nextafter(0.2, 1)}, 1, 2),
        ({1: 0.0, 2: 0.2}, {1: -0.0, 2: 0.2}, 1, 1),
        ({1: 0.1}, {1: 0.1, 2: 0.2}, 1, 2),
        ({1: math.nan, 2: 1.0}, {1: math.nan, 2: 1.0}, 2, None),
        ({}, {}, 0, 1),
    ],
)
def test_losses_are_compared_by_their_bits(
    ours: dict[int, float], twin: dict[int, float], equal: int, first: int | None
) -> None:
    found = compare(ours, twin, steps=2)
    assert (found.equal, found.first and found.first.step) == (equal, first)
    assert found.identical == (first is None)
    assert f"{equal} of 2" in found.sentence()


def test_rows_without_a_loss_are_passed_over() -> None:
    assert losses_of([{"step": 1, "loss": 0.5}, {"step": 2}]) == {1: 0.5}


def test_faults_lie_at_a_third_and_two_thirds() -> None:
    rank, supervisor = plan_faults(steps=1500, workers=2)
    assert (rank.target, rank.rank, rank.step) == ("rank", 1, 500)
    assert (supervisor.target, supervisor.step) == ("supervisor", 1000)


@pytest.mark.parametrize(
    ("fault", "step", "pid"),
    [
        (Fault(target="rank", rank=1, step=5), 4, None),
        (Fault(target="rank", rank=1, step=5), 5, 11),
        (Fault(target="rank", rank=3, step=5), 9, None),
        (Fault(target="supervisor", step=5), 7, 99),
    ],
)
def test_a_victim_is_addressed_by_step(fault: Fault, step: int, pid: int | None) -> None:
    workers = [{"rank": 0, "pid": 10}, {"rank": 1, "pid": 11}]
    assert victim(fault, {"step": step, "supervisor_pid": 99, "workers": workers}) == pid


def test_only_processes_of_ray_are_killed() -> None:
    assert not kill_ray_process(os.getpid())
    code = ["-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(
        ["ray::sleep", *code], executable=sys.executable, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()  # until then its name may not be there
        assert kill_ray_process(child.pid)
        assert child.wait(timeout=5) == -9
    assert not kill_ray_process(child.pid)


class ScriptedRun:
    """A handle whose statuses are given; "^C" stands for the user's Ctrl-C, "lost" for the end."""

    def __init__(self, *statuses: Any) -> None:
        self.statuses = list(statuses)
        self.stops = 0

    def wait(
        self,
        timeout_s: float | None = None,
        on_status: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        assert on_status is not None
        while True:
            now = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
            if now == "^C":
                raise KeyboardInterrupt
            if now == "lost":
                raise NotFinishedError(run="r", state="LOST", why="its Ray job failed")
            on_status(now)
            if now["state"] in ("SUCCEEDED", "STOPPED"):
                return dict(now)

    def stop(self, reason: str = "") -> None:
        assert reason == "Ctrl-C"
        self.stops += 1


def running(step: int) -> dict[str, Any]:
    workers = [{"rank": 0, "pid": 10}, {"rank": 1, "pid": 11}]
    return {"state": "RUNNING", "step": step, "supervisor_pid": 99, "workers": workers}


def follow(run: ScriptedRun, killed: list[int], faults: tuple[Fault, ...] = ()) -> Watched:
    """Watch without waiting: each look at the clock is a second later; the first kill misses."""
    now = iter(range(10_000))

    def kill(pid: int) -> bool:
        killed.append(pid)
        return len(killed) != 1

    display = RunDisplay(Console(file=io.StringIO()), "test", 9)
    watcher = Watcher(display, faults, clock=lambda: float(next(now)), kill=kill)
    return watch(run, watcher, display)


def test_a_kill_that_found_nobody_is_tried_again_and_then_never_more() -> None:
    killed: list[int] = []
    run = ScriptedRun(*[running(k) for k in range(10)], {"state": "SUCCEEDED", "step": 9})
    seen = follow(run, killed, plan_faults(9, 2))
    assert killed == [11, 11, 99]
    assert [(kill.pid, kill.seen_step) for kill in seen.kills] == [(11, 4), (99, 6)]
    assert seen.state == "SUCCEEDED"


def test_ctrl_c_asks_for_a_stop_and_waits_for_it() -> None:
    run = ScriptedRun(running(1), "^C", running(2), {"state": "STOPPED", "step": 3})
    seen = follow(run, [])
    assert (run.stops, seen.interrupted, seen.state) == (1, True, "STOPPED")


@pytest.mark.parametrize(
    ("last", "why"), [(running(1), "no new step for 180 s"), ("lost", "its Ray job failed")]
)
def test_a_run_that_goes_nowhere_is_left_with_a_reason(last: Any, why: str) -> None:
    seen = follow(ScriptedRun(running(1), last), [])
    assert seen.state == "RUNNING"
    assert why in seen.reason


def test_the_line_names_every_committed_tier() -> None:
    status = running(3) | {"loss": 1.25, "world": 2, "committed": {"memory": 3, "disk": 2}}
    assert describe(status) == "running  loss 1.250  world 2  committed: memory 3, disk 2"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"state": "PENDING"}, "starting the supervisor"),
        (
            {"state": "PENDING", "placement": {"workers": 2, "spares": 1}, "waiting": 1},
            "starting the ranks, 1 of 3 ready",
        ),
        ({"state": "RUNNING", "tokens_per_s": 12345.0}, "running  12.3k tokens/s"),
        ({"state": "RECOVERING", "tokens_per_s": 12345.0}, "recovering"),
    ],
)
def test_the_line_says_what_is_waited_for(status: dict[str, Any], words: str) -> None:
    assert describe(status) == words


def test_a_pipe_gets_whole_lines_at_each_state_and_stride() -> None:
    out = io.StringIO()
    with RunDisplay(Console(file=out, width=40), "title", steps=24) as display:
        for _ in range(3):
            display.show({"state": "PENDING", "placement": {"workers": 2, "spares": 0}})
        for step in range(25):
            display.show(running(step) | {"last_incident": "Incident 1: " + "word " * 20})
        display.show(running(24) | {"state": "SUCCEEDED"})
    lines = out.getvalue().splitlines()
    assert lines[0] == "title  0/24  starting the ranks, 0 of 2 ready"
    assert len([line for line in lines if line.startswith("title")]) == 15
    assert len(lines) == 16 and lines[-1] == "title  24/24  succeeded"


def test_the_terminal_has_a_bar_and_the_last_incident() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60)
    with RunDisplay(console, "title", steps=24) as display:
        display.show(running(3) | {"last_incident": "Incident 1: rank 1 ended. More."})
    assert "3/24 steps" in out.getvalue()
    assert "last incident: Incident 1: rank 1 ended" in out.getvalue()


def test_the_twin_is_cached_by_content(tmp_path: Path) -> None:
    losses = {1: 0.1 + 0.2, 2: 5e-324, 3: math.pi}
    save_losses(tmp_path, "key", losses, "run-1")
    assert load_losses(tmp_path, "key") == losses
    assert load_losses(tmp_path, "other") is None
    (tmp_path / "torn.json").write_text('{"losses": [[1, ')
    assert load_losses(tmp_path, "torn") is None


def test_another_config_world_or_data_is_another_twin() -> None:
    keys = {
        twin_key({"steps": 1}, 2, "a"),
        twin_key({"steps": 2}, 2, "a"),
        twin_key({"steps": 1}, 3, "a"),
        twin_key({"steps": 1}, 2, "b"),
    }
    assert len(keys) == 4
    assert twin_key({"steps": 1}, 2, "a") in keys
    assert len(source_sha()) == 64
