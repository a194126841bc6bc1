"""Verbs that begin, end and continue runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from relit.cli.options import (
    Output,
    address_option,
    find_run,
    json_option,
    make_client,
    run_argument,
    store_option,
)

if TYPE_CHECKING:
    from relit.handle import JobHandle


@click.command(short_help="Start the job of a specification file.")
@click.argument("spec", type=click.Path(dir_okay=False))
@click.argument("overrides", nargs=-1, metavar="[a.b=VALUE]...")
@click.option("--wait", is_flag=True, help="Wait for the end; exit as the run does.")
@click.option("--timeout", type=float, metavar="S", help="With --wait: give up waiting (101).")
@click.option("--run-id", help="Choose the run id; the same again is the same run.")
@address_option
@store_option
@json_option
def submit(
    spec: str,
    overrides: tuple[str, ...],
    wait: bool,
    timeout: float | None,
    run_id: str | None,
    address: str | None,
    store: str | None,
    out: Output,
) -> None:
    """Start the job that SPEC (a YAML file) describes, with overrides such as config.lr=0.001.

    A run of this id and specification that is there already is not started again: if it has ended,
    the exit code is the run's.
    """
    from relit.errors import run_exit_code
    from relit.run_state import LOST, TERMINAL
    from relit.spec import files
    from relit.wording import state_line

    chosen = (*overrides, f"run_id={run_id}") if run_id else overrides
    job = make_client(store, address).submit(files.load(spec, chosen))
    status = job.status()
    over = status["state"] in TERMINAL
    out.say(f"{job.id} is there already" if over else f"submitted {job.id}")
    out.say(f"  directory   {job.path}")
    if over or status["state"] == LOST:
        out.say(state_line(status))
    if over and status["state"] != "SUCCEEDED":
        out.say(f"`relit resume {job.id}` continues it")
    if wait and not over:
        _wait(job, timeout, out)
    out.data({"run_id": job.id, "path": job.path, "state": status["state"]})
    if over:
        sys.exit(run_exit_code(status))


@click.command(short_help="Check a specification file; start nothing.")
@click.argument("spec", type=click.Path(dir_okay=False))
@click.argument("overrides", nargs=-1, metavar="[a.b=VALUE]...")
@json_option
def validate(spec: str, overrides: tuple[str, ...], out: Output) -> None:
    """Check SPEC: keys, types, the function to run, the size of the code, secrets."""
    from relit.spec import files
    from relit.spec.resolve import resolve

    loaded = files.load(spec, overrides)
    config, code = resolve(loaded)
    out.data(
        {"valid": True, "spec": loaded.to_plain(), "code_sha": code.sha, "entry": config.entry}
    )
    ranks = config.scaling.workers
    out.say(f"{spec} is valid: {config.entry}, {ranks} rank{'' if ranks == 1 else 's'}")
    out.say(f"  code        {code.num_files} files, {len(code.data) / 1e3:.0f} kB, {code.sha[:12]}")
    out.say(f"  store       {config.store}")


@click.command(short_help="Commit at the next boundary and stop.")
@run_argument
@click.option("--reason", default="relit stop", show_default=True)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it stopped.")
@click.option("--timeout", type=float, default=300.0, show_default=True, metavar="S")
@store_option
@json_option
def stop(run: str, reason: str, wait: bool, timeout: float, store: str | None, out: Output) -> None:
    """Ask a run to commit at its next step boundary and stop; exits 103 when it has."""
    job = find_run(run, store)
    number = job.stop(reason)
    out.say(f"asked {job.id} to stop (command {number})")
    if not wait:
        out.data({"run_id": job.id, "command": number})
        return
    _wait(job, timeout, out)


@click.command(short_help="Go on from the newest checkpoint.")
@run_argument
@click.argument("overrides", nargs=-1, metavar="[a.b=VALUE]...")
@click.option("--spec", type=click.Path(dir_okay=False), help="Go on with this file and its code.")
@click.option("--allow-config-change", "allow_config", is_flag=True)
@click.option("--allow-code-change", "allow_code", is_flag=True)
@click.option("--allow-data-change", "allow_data", is_flag=True)
@click.option("--wait", is_flag=True, help="Wait for the end; exit as the run does.")
@click.option("--timeout", type=float, metavar="S")
@address_option
@store_option
@json_option
def resume(
    run: str,
    overrides: tuple[str, ...],
    spec: str | None,
    allow_config: bool,
    allow_code: bool,
    allow_data: bool,
    wait: bool,
    timeout: float | None,
    address: str | None,
    store: str | None,
    out: Output,
) -> None:
    """Continue a stopped, failed or lost run under its own id, exactly where it was.

    It runs its own stored code and configuration. Overrides or --spec change them; what decides
    the losses may only change by the flag that names it.
    """
    from relit.spec import files

    job = find_run(run, store, address)
    named = {"config": allow_config, "code": allow_code, "data": allow_data}
    loaded = files.load(spec) if spec else None
    again = job.resume(loaded, overrides, [name for name, allowed in named.items() if allowed])
    out.say(f"resumed {again.id}")
    if not wait:
        out.data({"run_id": again.id, "path": again.path})
        return
    _wait(again, timeout, out)


def _wait(job: JobHandle, timeout: float | None, out: Output) -> None:
    """Wait for the end, say it, and exit as the run did.

    The first Ctrl-C asks the run to commit and stop (103 when it has); the second leaves it.
    """
    from relit.errors import run_exit_code
    from relit.wording import state_line

    try:
        found = job.wait(timeout)
    except KeyboardInterrupt:
        out.say("stopping at the next boundary; Ctrl-C again leaves the run alone")
        job.stop("Ctrl-C")
        found = job.wait(timeout)
    out.data(found)
    out.say(state_line(found))
    sys.exit(run_exit_code(found))
