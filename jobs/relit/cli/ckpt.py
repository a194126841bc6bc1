"""The group `relit ckpt`: one line for each tool; the tools lie in modules beside this one."""

from __future__ import annotations

import click

from relit.cli.lazy import LazyGroup

_TOOLS: dict[str, str] = {
    "ls": "relit.cli.ckpt_looking:ls",
    "show": "relit.cli.ckpt_looking:show",
    "verify": "relit.cli.ckpt_looking:verify",
    "diff": "relit.cli.ckpt_looking:diff",
    "export": "relit.cli.ckpt_export:export",
    "import": "relit.cli.ckpt_import:import_checkpoint",
    "plan": "relit.cli.ckpt_plan:plan",
    "pin": "relit.cli.ckpt_changing:pin",
    "rm": "relit.cli.ckpt_changing:rm",
    "gc": "relit.cli.ckpt_changing:gc",
}


@click.group(
    cls=LazyGroup, verbs=_TOOLS, short_help="Look at, check, export and import checkpoints."
)
def ckpt() -> None:
    """Work on a run's checkpoints, from its run directory alone: no cluster is needed.

    STEP is a number. export without one takes the newest step that is whole, verify checks all.
    """
