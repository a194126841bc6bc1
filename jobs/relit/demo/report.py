"""What the demo says at the end: one value, printed for people or as one JSON object."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from relit import errors
from relit.demo.compare import Comparison
from relit.demo.faults import Kill
from relit.run_state import TERMINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """The outcome. comparison and twin are None if the run did not succeed or was not compared.

    store: the one that was named, for the commands that are suggested.
    """

    run_id: str
    run_directory: str
    state: str
    reason: str
    step: int
    steps: int
    seconds: float
    value: dict[str, Any]
    kills: tuple[Kill, ...]
    planned_kills: int
    incidents: tuple[dict[str, Any], ...]
    comparison: Comparison | None = None
    twin: str | None = None
    twin_state: str = "SUCCEEDED"
    store: str | None = None

    @property
    def steps_lost(self) -> int:
        """Completed steps that had to be computed again, over all incidents."""
        return sum(int((incident.get("lost") or {}).get("steps", 0)) for incident in self.incidents)

    @property
    def exit_code(self) -> int:
        """0; 100 failed or a loss differs; 101 unfinished; 103 stopped; the twin's counts too."""
        if self.comparison is not None and not self.comparison.identical:
            return errors.FAILED
        return errors.state_exit_code(self.state) or errors.state_exit_code(self.twin_state)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON for `relit demo --json`."""
        return {
            "run_id": self.run_id,
            "run_directory": self.run_directory,
            "state": self.state,
            "reason": self.reason,
            "step": self.step,
            "steps": self.steps,
            "seconds": round(self.seconds, 2),
            "value": self.value,
            "kills": [kill.to_json() for kill in self.kills],
            "planned_kills": self.planned_kills,
            "incidents": list(self.incidents),
            "steps_lost": self.steps_lost,
            "comparison": self.comparison and self.comparison.to_json(),
            "twin": self.twin,
            "exit_code": self.exit_code,
        }

    def print_to(self, console: Console) -> None:
        """The report for people."""
        style = "bold green" if self.state == "SUCCEEDED" else "bold red"
        head = f"{self.state} at step {self.step} of {self.steps}, {self.seconds:.0f} s in all"
        console.print(Text(f"\n{head}  {self.reason}".rstrip(), style=style))
        self._print_incidents(console)
        if self.comparison is not None:
            good = "bold green" if self.comparison.identical else "bold red"
            console.print(Text(f"Losses: {self.comparison.sentence()}", style=good))
        if self.twin is not None:
            console.print(Text(f"Undisturbed twin: {self.twin}", style="dim"), soft_wrap=True)
        if "val_loss" in self.value:
            console.print(f"Validation loss: {self.value['val_loss']:.4f} nats per byte")
        if self.value.get("sample"):
            sample = Text(str(self.value["sample"]).rstrip())
            console.print(Panel(sample, title="generated", width=min(80, console.width)))
        console.print(Text(f"Run directory: {self.run_directory}"), soft_wrap=True)
        verb = "result" if self.state in TERMINAL else "status"
        console.print(Text(f"Look around:   {self._command(verb)}", style="dim"), soft_wrap=True)
        if self.state == "STOPPED":
            console.print(Text(f"Go on:         {self._command('resume')}"), soft_wrap=True)

    def _command(self, verb: str) -> str:
        """What to type for this run, also where the environment is not activated."""
        program = "relit" if shutil.which("relit") else os.path.relpath(_beside_python("relit"))
        store = f" --store {self.store}" if self.store else ""
        return f"{program} {verb} {self.run_id}{store}"

    def _print_incidents(self, console: Console) -> None:
        missed = self.planned_kills - len(self.kills)
        if missed:
            console.print(
                Text(f"{missed} planned kill(s) came too late: the run was over", "yellow")
            )
        for incident in self.incidents:
            console.print(Text(str(incident.get("headline")), style="yellow"))
        if self.planned_kills or self.incidents:
            console.print(f"Steps lost: {self.steps_lost}")


def _beside_python(name: str) -> str:
    return os.path.join(os.path.dirname(sys.executable), name)
