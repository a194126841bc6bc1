"""Options that verbs share, and where their output goes.

With --json, stdout carries JSON alone (one object, or one a line where a verb follows something)
and everything for people goes to stderr.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

    from relit.client import Client
    from relit.handle import JobHandle

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Output:
    """Where a verb's answer goes. as_json chooses for whom it is."""

    as_json: bool

    def data(self, data: Any) -> None:
        """The machine's answer; nothing without --json."""
        if self.as_json:
            click.echo(json.dumps(data, sort_keys=True, default=str))

    def say(self, text: str) -> None:
        """A line for people: stdout, or stderr with --json."""
        click.echo(text, err=self.as_json)

    def console(self) -> Console:
        """Rich's console for tables; honours NO_COLOR and terminals by itself."""
        from rich.console import Console

        return Console(stderr=self.as_json, highlight=False)


def json_option(command: F) -> F:
    """--json, handed over as `out: Output`."""
    option = click.option(
        "--json",
        "out",
        is_flag=True,
        help="Answer as JSON on stdout.",
        callback=lambda ctx, param, value: Output(bool(value)),
    )
    return option(command)


def store_option(command: F) -> F:
    """--store; the client puts RELIT_STORE behind it."""
    help_text = "Where run directories lie; default: RELIT_STORE, else ~/.relit/store."
    return click.option("--store", metavar="URL", help=help_text)(command)


def address_option(command: F) -> F:
    """--address of a cluster's dashboard."""
    option = click.option(
        "--address",
        metavar="URL",
        help="A Ray dashboard, http://host:8265; default: RAY_ADDRESS, else a local cluster.",
    )
    return option(command)


def run_argument(command: F) -> F:
    """RUN, completed from the store's index by shells."""
    return click.argument("run", metavar="RUN", shell_complete=_complete_run)(command)


def find_run(run: str, store: str | None, address: str | None = None) -> JobHandle:
    """The handle of RUN; RunNotFoundError (102) or AmbiguousRunError (2)."""
    return make_client(store, address).get(run)


def make_client(store: str | None, address: str | None = None) -> Client:
    """A client; imports what it needs only now."""
    from relit.client import Client

    return Client(address, store=store)


def _complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from relit_storage.errors import RelitError
    from relit_storage.stores.opening import open_store

    client = make_client(ctx.params.get("store"))
    try:
        keys = open_store(client.store_url).list(f"index/{incomplete}")
    except (RelitError, OSError):
        return []  # completion never shows an error
    return [key.removeprefix("index/").removesuffix(".json") for key in keys]
