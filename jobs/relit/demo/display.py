"""What the demo shows while it waits: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

LINES_PER_RUN = 12  # plain lines over a whole run when the output is no terminal


class RunDisplay:
    """One run's progress. Used as a context manager by the thread that polls the status."""

    def __init__(self, console: Console, title: str, steps: int) -> None:
        self._console = console
        self._title = title
        self._steps = steps
        self._next_line = 0
        self._shown_incident = ""
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=steps, detail="starting")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, text: str, style: str = "") -> None:
        """A line above the bar."""
        self._console.print(Text(text, style=style))

    def show(self, status: Mapping[str, Any]) -> None:
        """Bring the bar up to this status; called some times a second."""
        step = int(status.get("step") or 0)
        detail = describe(status)
        self._progress.update(self._task, completed=step, detail=detail)
        incident = headline(status)
        if incident and incident != self._shown_incident:
            self._shown_incident = incident
            self.say(incident, "yellow")
        if not self._console.is_terminal and step >= self._next_line:
            self._next_line = step - step % self._stride + self._stride
            self.say(f"{self._title}  {step}/{self._steps}  {detail}")

    @property
    def _stride(self) -> int:
        return max(1, self._steps // LINES_PER_RUN)


def describe(status: Mapping[str, Any]) -> str:
    """State, loss, speed, world and newest committed step per tier, in one line."""
    parts = [str(status.get("state") or "PENDING").lower()]
    loss, speed = status.get("loss"), status.get("tokens_per_s")
    if loss is not None:
        parts.append(f"loss {loss:.3f}")
    if speed:
        parts.append(f"{speed / 1000:.1f}k tokens/s")
    if status.get("world"):
        parts.append(f"world {status['world']}")
    committed = status.get("committed") or {}
    tiers = [
        f"{name} {committed[name]}" for name in ("memory", "disk", "object") if committed.get(name)
    ]
    if tiers:
        parts.append("committed: " + ", ".join(tiers))
    return "  ".join(parts)


def headline(status: Mapping[str, Any]) -> str:
    """The last incident's sentence, or an empty string."""
    incident = status.get("last_incident")
    if isinstance(incident, Mapping):
        return str(incident.get("headline") or "")
    return str(incident or "")
