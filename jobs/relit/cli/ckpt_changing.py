"""Tools that keep or give up checkpoints of the object tier: pin, rm, gc.

A node's disk is its agent's: what lies there goes by the run's retention, or with the run.
"""

from __future__ import annotations

import click

from relit.cli.ckpt_looking import checkpoints_of
from relit.cli.ckpt_progress import byte_bar, size_text
from relit.cli.options import Output, json_option, run_argument, store_option


@click.command(short_help="Keep a step for ever.")
@run_argument
@click.argument("step", type=int)
@click.option("--remove", is_flag=True, help="Take the pin away.")
@click.option("--reason", default="", help="Kept with the pin.")
@store_option
@json_option
def pin(run: str, step: int, remove: bool, reason: str, store: str | None, out: Output) -> None:
    """Pin a step: retention, rm and gc leave it alone. Works on a live run, too."""
    checkpoints = checkpoints_of(run, store)
    changed = checkpoints.unpin(step) if remove else checkpoints.pin(step, reason)
    out.data({"step": step, "pinned": not remove, "changed": changed})
    if changed:
        out.say(f"step {step} is {'no longer pinned' if remove else 'pinned'}")
    else:
        out.say(f"step {step} was {'not pinned' if remove else 'pinned already'}")


@click.command(short_help="Delete one step.")
@run_argument
@click.argument("step", type=int)
@store_option
@json_option
def rm(run: str, step: int, store: str | None, out: Output) -> None:
    """Delete a step from the object tier, of a run that is over or lost.

    Refused for the newest commit, for the newest step that is whole (it is read to be sure), and
    for a pinned one. The commit log says first that the step is given up.
    """
    checkpoints = checkpoints_of(run, store)
    with byte_bar("checking the newest step", checkpoints.newest_bytes()) as done:
        found = checkpoints.remove(step, done)
    out.data({"deleted": True, "steps": [garbage.to_json() for garbage in found]})
    num_files = sum(len(garbage.keys) for garbage in found)
    size = size_text(sum(garbage.num_bytes for garbage in found))
    out.say(f"step {step} is deleted: {num_files} files, {size}")


@click.command(short_help="Delete what no run needs any more.")
@run_argument
@click.option("--yes", is_flag=True, help="Delete; without it, only say what would go.")
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    metavar="N",
    help="Commits older than the newest N go, too; default: all commits stay.",
)
@store_option
@json_option
def gc(run: str, yes: bool, keep: int | None, store: str | None, out: Output) -> None:
    """Delete leftovers in the object tier: uploads that were cut off, replaced commits, files of
    steps that were given up. Never the newest whole step, nor a pinned one.

    Without --yes nothing is deleted. --yes is refused while the run is alive.
    """
    checkpoints = checkpoints_of(run, store)
    found = checkpoints.garbage(keep)
    if yes:
        work = checkpoints.newest_bytes() + sum(garbage.num_bytes for garbage in found)
        with byte_bar("checking and deleting", work) as done:
            found = checkpoints.collect(keep, done)
    out.data({"deleted": yes, "steps": [garbage.to_json() for garbage in found]})
    for garbage in found:
        size = f"{len(garbage.keys)} files, {size_text(garbage.num_bytes)}"
        out.say(f"step {garbage.step} of generation {garbage.generation}: {garbage.reason}; {size}")
    total = size_text(sum(garbage.num_bytes for garbage in found))
    if yes:
        out.say(f"{total} deleted")
    else:
        out.say(f"{total} would go; --yes deletes it" if found else "nothing to delete")
