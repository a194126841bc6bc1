"""Verbs that look at runs. They read run directories and need no cluster."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import click

from relit.cli.options import Output, find_run, json_option, make_client, run_argument, store_option

_COLUMNS = ("RUN", "STATE", "STEP", "WORLD", "RECOVERIES", "AGE", "OWNER")


@click.command(short_help="List the runs of a store.")
@store_option
@json_option
def ls(store: str | None, out: Output) -> None:
    """List the runs of a store, newest first."""
    from rich.markup import escape
    from rich.table import Table

    found = make_client(store).list()
    out.data(found)
    if out.as_json:
        return
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for run in found:
        table.add_row(*map(escape, _cells(run, time.time())))
    out.console().print(table)


def _cells(run: Mapping[str, Any], now: float) -> list[str]:
    step, total = run.get("step"), run.get("total_steps")
    progress = "" if step is None else f"{step}/{total}" if total else str(step)
    age = _age(now - float(run.get("created_at_s", now)))
    cells = (run["run_id"], run["state"], progress, run.get("world"), run.get("recoveries"), age)
    return ["" if cell is None else str(cell) for cell in (*cells, run.get("owner"))]


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


@click.command(short_help="Show where a run stands.")
@run_argument
@store_option
@json_option
def status(run: str, store: str | None, out: Output) -> None:
    """Show a run's state, step, loss, ranks and newest commit of each tier."""
    from relit.wording import committed_line, spacing_line, state_line

    job = find_run(run, store)
    found = job.status()
    out.data(found)
    if out.as_json:
        return
    out.say(state_line(found))
    out.say(f"  committed   {committed_line(found)}")
    if spacing := spacing_line(found):
        out.say(f"  spacing     {spacing}")
        out.say(f"              {found['spacing'].get('reason') or ''}")
    for label, name in (("world", "world"), ("generation", "generation"), ("epoch", "epoch")):
        if found.get(name) is not None:
            out.say(f"  {label:<11} {found[name]}")
    if found.get("recoveries"):
        last = str(found.get("last_incident") or "").partition(". ")[0]
        out.say(f"  recoveries  {found['recoveries']}, last: {last}")
    out.say(f"  directory   {job.path}")


@click.command(short_help="Print workers' output.")
@run_argument
@click.option("--rank", type=int, help="Only the worker that holds this rank now.")
@click.option("--worker", help="Only this worker id; `relit logs RUN --list` shows them.")
@click.option("--list", "list_workers", is_flag=True, help="List worker ids.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run is over.")
@store_option
@json_option
def logs(
    run: str,
    rank: int | None,
    worker: str | None,
    list_workers: bool,
    follow: bool,
    store: str | None,
    out: Output,
) -> None:
    """Print what workers wrote, as it was shipped to the run directory."""
    job = find_run(run, store)
    if list_workers:
        workers = job.reader.workers()
        out.data(workers)
        if not out.as_json:
            click.echo("\n".join(workers))
        return
    silent = True
    for text in job.logs(rank=rank, worker=worker, follow=follow):
        silent = False
        if out.as_json:
            for line in text.splitlines():
                out.data({"line": line})
        else:
            click.echo(text, nl=not text.endswith("\n"))
    if silent:
        click.echo(f"nothing was written by these workers of {job.id}", err=True)


@click.command(short_help="Print what happened.")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the run is over.")
@click.option("--since", type=int, default=0, metavar="SEQ", help="Only events after this one.")
@click.option("--kind", metavar="PREFIX", default="", help="Only kinds that begin with this.")
@store_option
@json_option
def events(run: str, follow: bool, since: int, kind: str, store: str | None, out: Output) -> None:
    """Print a run's events; with --json one object a line."""
    from relit.wording import event_line

    for event in find_run(run, store).events(since=since, follow=follow):
        if str(event.get("kind", "")).startswith(kind):
            out.data(event)
            if not out.as_json:
                click.echo(event_line(event))


@click.command(short_help="Print what went wrong and how it was recovered from.")
@run_argument
@store_option
@json_option
def incidents(run: str, store: str | None, out: Output) -> None:
    """Print a run's incidents: cause, steps lost, and where the time went; --json has it all."""
    job = find_run(run, store)
    found = job.incidents()
    for incident in found:
        out.data(incident)
        if not out.as_json:
            click.echo(str(incident.get("headline", "")))
    if not found:
        out.say(f"No incident: nothing has failed in run {job.id} so far.")


@click.command(short_help="Print how a run ended; exits as the run did.")
@run_argument
@store_option
@json_option
def result(run: str, store: str | None, out: Output) -> None:
    """Print a run's result; the exit code is the run's (0, 100, 103; 101 while it is not over)."""
    from relit.errors import run_exit_code
    from relit.wording import state_line

    job = find_run(run, store)
    found = job.result()
    incidents = job.incidents()
    out.data({**found, "incidents": incidents})
    if not out.as_json:
        out.say(state_line({"run_id": job.id, **found}))
        for incident in incidents:
            out.say(f"  {incident.get('headline', '')}")
        for line in _value_lines(found.get("value")):
            out.say(f"  value       {line}")
        out.say(f"  directory   {job.path}")
    sys.exit(run_exit_code(found))


def _value_lines(value: Any) -> list[str]:
    """What the training function returned, one line for each key if it is a dict."""
    if isinstance(value, dict):
        return [f"{key} = {json.dumps(item)}" for key, item in value.items()]
    return [] if value is None else [json.dumps(value)]
