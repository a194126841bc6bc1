"""What the demo shows while it waits: a live picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

LINES_PER_RUN = 12  # plain lines over a whole run when the output is no terminal
TIERS = ("memory", "disk", "object")


class RunDisplay:
    """One run's progress. Used as a context manager by the thread that polls the status."""

    def __init__(self, console: Console, title: str, steps: int) -> None:
        self._console = console
        self._title = title
        self._steps = steps
        self._next_line = 0
        self._shown_state = ""
        self._shown_incident = ""
        self._details = ""
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task(title, total=steps)
        self._live = Live(console=console, refresh_per_second=5, get_renderable=self._picture)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop_task(self._task)
        self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """A line above the picture; broken by words on a terminal, left whole elsewhere."""
        whole = not self._console.is_terminal
        self._console.print(Text(text, style=style), soft_wrap=whole)

    def show(self, status: Mapping[str, Any]) -> None:
        """Bring the picture up to this status; called some times a second."""
        step = int(status.get("step") or 0)
        self._details = describe(status)
        self._progress.update(self._task, completed=step)
        incident = str(status.get("last_incident") or "")
        if incident and incident != self._shown_incident:
            self._shown_incident = incident
            self.say(incident, "yellow")
        if not self._console.is_terminal:
            state = str(status.get("state"))
            self._line(step, self._details if state == "PENDING" else state)

    def _picture(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress.get_renderable()]
        if self._details:
            parts.append(Text(f"  {self._details}"))
        if self._shown_incident:
            parts.append(Text(f"  last incident: {first_sentence(self._shown_incident)}", "yellow"))
        return Group(*parts)

    def _line(self, step: int, state: str) -> None:
        if step < self._next_line and state == self._shown_state:
            return
        stride = max(1, self._steps // LINES_PER_RUN)
        self._next_line = step - step % stride + stride
        self._shown_state = state
        self.say(f"{self._title}  {step}/{self._steps}  {self._details}")


def describe(status: Mapping[str, Any]) -> str:
    """State, loss, speed, world and newest whole step per tier, in one line."""
    state = str(status.get("state") or "PENDING")
    parts = [state.lower()]
    if state == "PENDING":
        parts = [waiting_for(status)]
    loss, speed = status.get("loss"), status.get("tokens_per_s")
    if loss is not None:
        parts.append(f"loss {loss:.3f}")
    if speed and state == "RUNNING":
        parts.append(f"{speed / 1000:.1f}k tokens/s")
    if status.get("world"):
        parts.append(f"world {status['world']}")
    committed = status.get("committed") or {}
    tiers = [f"{name} {committed[name]}" for name in TIERS if committed.get(name)]
    if tiers:
        parts.append("committed: " + ", ".join(tiers))
    return "  ".join(parts)


def waiting_for(status: Mapping[str, Any]) -> str:
    """What a run that has not begun to train is waiting for."""
    placement = status.get("placement")
    if not placement:
        return "starting the supervisor"
    wanted = int(placement["workers"]) + int(placement["spares"])
    return f"starting the ranks, {status.get('waiting') or 0} of {wanted} ready"


def first_sentence(headline: str) -> str:
    """An incident's headline up to its first full stop."""
    return headline.partition(". ")[0]
