"""`relit demo`: the command. Heavy imports wait until it runs."""

from __future__ import annotations

import json
import sys

import click


@click.command("demo", short_help="Train a small GPT through two SIGKILLs and prove the losses.")
@click.option("--steps", type=click.IntRange(min=3), default=1500, show_default=True)
@click.option("--workers", type=click.IntRange(min=1, max=64), default=2, show_default=True)
@click.option("--no-faults", is_flag=True, help="Train undisturbed; nothing is compared.")
@click.option("--store", envvar="RELIT_STORE", help="Where run directories go (path or URL).")
@click.option("--keep", is_flag=True, help="Hold the local cluster and its dashboard until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; progress on stderr.")
def demo(
    steps: int, workers: int, no_faults: bool, store: str | None, keep: bool, as_json: bool
) -> None:
    """Train a small language model on the Python standard library's own source.

    One rank is killed at a third of the steps, the supervisor at two thirds. Then the undisturbed
    twin runs (or its losses are taken from an earlier demo of the same content), and all losses
    are compared bit for bit. Ctrl-C stops at the next step; `relit resume` goes on.

    Exit codes: 0 done and equal, 100 failed or a loss differs, 101 not finished, 103 stopped.
    """
    from rich.console import Console

    from relit.cluster import local_cluster
    from relit.demo.holding import end_cluster, hold_cluster
    from relit.demo.story import DemoOptions, run_demo

    console = Console(stderr=as_json)
    options = DemoOptions(steps=steps, workers=workers, faults=not no_faults, store=store)
    found = local_cluster() is not None
    report = run_demo(options, console)
    report.print_to(console)
    if as_json:
        click.echo(json.dumps(report.to_json()))
    if keep:
        hold_cluster(console)
    elif not found:
        end_cluster(console)
    sys.exit(report.exit_code)
