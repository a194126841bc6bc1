"""Follow one run through its handle, killing what is due, until it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from relit.demo.display import RunDisplay
from relit.demo.faults import Fault, Kill, kill_ray_process, victim
from relit.errors import RunFinishedError
from relit_storage.errors import StoreError

TERMINAL = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
POLL_S = 0.1
STALL_S = 180.0  # without one new step, cluster start included
STOP_S = 90.0


class RunView(Protocol):
    """What the demo needs of a `relit.JobHandle`."""

    @property
    def id(self) -> str:
        """The run id."""
        ...

    def status(self) -> dict[str, Any]:
        """The newest status, from the run directory."""
        ...

    def stop(self) -> Any:
        """Ask for a stop at the next boundary."""
        ...


@dataclass(slots=True)
class Watched:
    """How a watch ended: the last status, the kills carried out, and why it ended early."""

    status: dict[str, Any] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    interrupted: bool = False
    stalled: bool = False

    @property
    def state(self) -> str:
        """The run's last known state."""
        return str(self.status.get("state") or "PENDING")

    @property
    def step(self) -> int:
        """Completed steps at the last look."""
        return int(self.status.get("step") or 0)

    @property
    def reason(self) -> str:
        """Why the run is in its state, or why the watch gave up."""
        if self.stalled:
            return f"no new step for {STALL_S:.0f} s"
        return str(self.status.get("reason") or "")

    @property
    def value(self) -> dict[str, Any]:
        """What the training function returned, if it was a dict."""
        value = self.status.get("value")
        return value if isinstance(value, dict) else {}


def watch(
    run: RunView,
    display: RunDisplay,
    faults: Iterable[Fault] = (),
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    kill: Callable[[int], bool] = kill_ray_process,
) -> Watched:
    """Poll until the run is terminal, stalled, or stopped by Ctrl-C. Blocks; kills for real.

    A fault is carried out once, at the first status that shows its step; a kill that finds no
    process (it was being replaced) is tried again at the next status.
    """
    seen = Watched()
    waiting = list(faults)
    newest, moved_at = -1, clock()
    try:
        while True:
            seen.status = read_status(run)
            display.show(seen.status)
            if seen.state in TERMINAL:
                return seen
            _carry_out(waiting, seen, display, kill)
            if seen.step > newest:
                newest, moved_at = seen.step, clock()
            if clock() - moved_at > STALL_S:
                seen.stalled = True
                return seen
            sleep(POLL_S)
    except KeyboardInterrupt:
        seen.interrupted = True
        display.say("Stopping at the next step boundary; Ctrl-C again leaves at once.", "bold")
        try:
            run.stop()
        except RunFinishedError:
            pass  # it ended while the key was pressed
        _until_terminal(run, seen, display, clock, sleep)
        return seen


def _carry_out(
    waiting: list[Fault], seen: Watched, display: RunDisplay, kill: Callable[[int], bool]
) -> None:
    for fault in list(waiting):
        pid = victim(fault, seen.status)
        if pid is None or not kill(pid):
            continue
        done = Kill(fault=fault, pid=pid, seen_step=seen.step)
        seen.kills.append(done)
        waiting.remove(fault)
        display.say(done.sentence(), "bold red")


def _until_terminal(
    run: RunView,
    seen: Watched,
    display: RunDisplay,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    deadline = clock() + STOP_S
    while seen.state not in TERMINAL and clock() < deadline:
        sleep(POLL_S)
        seen.status = read_status(run)
        display.show(seen.status)


def read_status(run: RunView) -> dict[str, Any]:
    """The handle's status; a query that fails is no news, and never a failure of the run."""
    try:
        return run.status()
    except StoreError:
        return {}
