"""`relit watch`: one live picture of a run, from its directory alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from relit.cli.options import Output, find_run, json_option, run_argument, store_option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from relit.handle import JobHandle

_EVERY_S = 0.5
_STYLES = {
    "RUNNING": "green",
    "SUCCEEDED": "bold green",
    "RECOVERING": "yellow",
    "PENDING": "cyan",
    "STOPPING": "yellow",
    "STOPPED": "yellow",
}


@click.command(short_help="Follow a run on one screen.")
@run_argument
@store_option
@json_option
def watch(run: str, store: str | None, out: Output) -> None:
    """Follow a run until it is over; exits as the run did. Ctrl-C leaves the run alone.

    With --json, or when stdout is no terminal: one status a line, whenever it changes.
    """
    from relit.errors import run_exit_code

    job = find_run(run, store)
    if out.as_json or not sys.stdout.isatty():
        final = _follow_lines(job, out)
    else:
        final = _follow_live(job, out)
    sys.exit(run_exit_code(final))


def _follow_lines(job: JobHandle, out: Output) -> Mapping[str, Any]:
    from relit.wording import state_line

    last: list[str] = []

    def show(status: Mapping[str, Any]) -> None:
        line = state_line(status)
        if last != [line]:
            last[:] = [line]
            out.data(status)
            out.say(line)

    return job.wait(on_status=show)


def _follow_live(job: JobHandle, out: Output) -> Mapping[str, Any]:
    from rich.live import Live

    with Live(console=out.console(), auto_refresh=False) as live:
        shown_s = [0.0]

        def show(status: Mapping[str, Any]) -> None:
            if time.monotonic() - shown_s[0] >= _EVERY_S:
                shown_s[0] = time.monotonic()
                live.update(picture(status), refresh=True)

        final = job.wait(on_status=show)
        live.update(picture(final), refresh=True)
    return final


def picture(status: Mapping[str, Any]) -> RenderableType:
    """The screen for one status."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from relit.wording import committed_line, spacing_line

    state = str(status["state"])
    head = Text.assemble((f" {state} ", f"reverse {_STYLES.get(state, 'red')}"))
    head.append(f"  {status.get('run_id', '')}  {status.get('reason') or ''}")
    step, total = int(status.get("step") or 0), status.get("total_steps")
    bar = ProgressBar(total=float(total), completed=step, width=48) if total else ""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("step", f"{step}/{total}" if total else str(step))
    for label, name, form in _FACTS:
        if isinstance(status.get(name), (int, float)):
            facts.add_row(label, format(status[name], form))
    facts.add_row("committed", committed_line(status))
    if spacing := spacing_line(status):
        facts.add_row("spacing", spacing)
    if status.get("last_incident"):
        facts.add_row("incident", Text(str(status["last_incident"])))
    return Group(head, Padding(bar), facts)  # a bar alone does not end its line


_FACTS = (
    ("loss", "loss", ".4f"),
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("samples/s", "samples_per_s", ",.0f"),
    ("world", "world", "d"),
    ("generation", "generation", "d"),
    ("recoveries", "recoveries", "d"),
)
