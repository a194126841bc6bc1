"""Follow one run through its handle, killing what is due, until it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from relit.demo.display import RunDisplay
from relit.demo.faults import Fault, Kill, kill_ray_process, victim
from relit.errors import NotFinishedError, RunFinishedError

STALL_S = 180.0  # without one new step, cluster start included
STOP_S = 90.0


class StalledError(Exception):
    """No new step for too long."""


class RunView(Protocol):
    """What the demo needs of a `relit.JobHandle`."""

    def wait(
        self,
        timeout_s: float | None = None,
        on_status: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Block until the run is over, showing each status; NotFinishedError if it was lost."""
        ...

    def stop(self, reason: str = "") -> Any:
        """Ask for a stop at the next boundary."""
        ...


@dataclass(slots=True)
class Watched:
    """How a watch ended: the last status, the kills carried out, and why it ended early."""

    status: dict[str, Any] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    interrupted: bool = False
    gave_up: str = ""

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
        return self.gave_up or str(self.status.get("reason") or "")

    @property
    def value(self) -> dict[str, Any]:
        """What the training function returned, if it was a dict."""
        value = self.status.get("value")
        return value if isinstance(value, dict) else {}


class Watcher:
    """Sees each status of a run: shows it, kills what is due, notices a run that stands still.

    A fault is carried out once, at the first status that shows its step; a kill that finds no
    process (it was being replaced) is tried again at the next status.
    """

    def __init__(
        self,
        display: RunDisplay,
        faults: Iterable[Fault] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        kill: Callable[[int], bool] = kill_ray_process,
    ) -> None:
        self._display = display
        self._waiting = list(faults)
        self._clock = clock
        self._kill = kill
        self._newest, self._moved_at_s = -1, clock()
        self.seen = Watched()

    def show(self, status: Mapping[str, Any]) -> None:
        """One status, only shown."""
        self.seen.status = dict(status)
        self._display.show(status)

    def look(self, status: Mapping[str, Any]) -> None:
        """One status. Raises StalledError after STALL_S without a new step."""
        self.show(status)
        self._carry_out()
        now_s = self._clock()
        if self.seen.step > self._newest:
            self._newest, self._moved_at_s = self.seen.step, now_s
        if now_s - self._moved_at_s > STALL_S:
            raise StalledError

    def _carry_out(self) -> None:
        for fault in list(self._waiting):
            pid = victim(fault, self.seen.status)
            if pid is None or not self._kill(pid):
                continue
            done = Kill(fault=fault, pid=pid, seen_step=self.seen.step)
            self.seen.kills.append(done)
            self._waiting.remove(fault)
            self._display.say(done.sentence(), "bold red")


def watch(run: RunView, watcher: Watcher, display: RunDisplay) -> Watched:
    """Follow the run to its end, or until it is lost, stands still, or Ctrl-C stops it. Blocks."""
    seen = watcher.seen
    try:
        seen.status = run.wait(on_status=watcher.look)
    except KeyboardInterrupt:
        seen.interrupted = True
        display.say("Stopping at the next step boundary; Ctrl-C again leaves at once.", "bold")
        _stop(run, watcher)
    except StalledError:
        seen.gave_up = f"no new step for {STALL_S:.0f} s"
    except NotFinishedError as lost:
        seen.gave_up = str(lost)
    return seen


def _stop(run: RunView, watcher: Watcher) -> None:
    seen = watcher.seen
    try:
        run.stop("Ctrl-C")
    except RunFinishedError:
        pass  # it ended while the key was pressed
    try:
        seen.status = run.wait(timeout_s=STOP_S, on_status=watcher.show)
    except NotFinishedError as late:
        seen.gave_up = str(late)
