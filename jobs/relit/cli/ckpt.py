"""The group `relit ckpt`: one line for each tool; the tools lie in modules beside this one."""

from __future__ import annotations

import click

from relit.cli.lazy import LazyGroup

_TOOLS: dict[str, str] = {}


@click.group(cls=LazyGroup, verbs=_TOOLS, short_help="Look at, check and export checkpoints.")
def ckpt() -> None:
    """Work on a run's checkpoints, from its run directory alone: no cluster is needed.

    STEP is a number; where it may be left out, the newest committed step is meant.
    """
