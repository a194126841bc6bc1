"""Verbs about the ground a run stands on: this machine, the store, the local cluster."""

from __future__ import annotations

import sys

import click

from relit.cli.options import Output, address_option, json_option, make_client, store_option


@click.command(short_help="Check this machine, the store and the cluster.")
@address_option
@store_option
@json_option
def doctor(address: str | None, store: str | None, out: Output) -> None:
    """Check what a run needs; exits 1 if something would break one. Starts and changes nothing."""
    from rich.markup import escape
    from rich.table import Table

    from relit.doctor import examine

    findings = examine(make_client(store).store_url, address)
    out.data([finding.to_json() for finding in findings])
    if not out.as_json:
        table = Table("", "CHECK", "FOUND", box=None, pad_edge=False)
        styles = {"ok": "green", "warn": "yellow", "bad": "bold red"}
        for finding in findings:
            mark = f"[{styles[finding.level]}]{finding.level}[/]"
            table.add_row(mark, finding.check, escape(finding.found))
        out.console().print(table)
    sys.exit(1 if any(finding.level == "bad" for finding in findings) else 0)


@click.group(short_help="The local cluster that relit keeps.")
def cluster() -> None:
    """Look at, start or end the local Ray cluster. It also ends itself when idle."""


@cluster.command("status")
@json_option
def cluster_status(out: Output) -> None:
    """Say whether the local cluster is up."""
    from dataclasses import asdict

    from relit.cluster import local_cluster

    found = local_cluster()
    out.data({"up": found is not None, **(asdict(found) if found else {})})
    up = f"up: dashboard {found.dashboard_url}, keeper {found.keeper_pid}" if found else "not up"
    out.say(f"the local cluster is {up}")


@cluster.command("start")
@json_option
def cluster_start(out: Output) -> None:
    """Start the local cluster, or find it."""
    from relit.cluster import ensure_local_cluster

    found = ensure_local_cluster()
    out.data({"dashboard_url": found.dashboard_url, "started_here": found.started_here})
    out.say(f"{'started' if found.started_here else 'found'} at {found.dashboard_url}")


@cluster.command("stop")
@json_option
def cluster_stop(out: Output) -> None:
    """End the local cluster; its runs are lost until `relit resume`."""
    from relit.cluster import stop_local_cluster

    ended = stop_local_cluster()
    out.data({"ended": ended})
    out.say("ended" if ended else "there is none")
