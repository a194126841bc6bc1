"""Tools that look at checkpoints and change nothing: ls, show, verify, diff."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from relit.cli.ckpt_progress import byte_bar, size_text
from relit.cli.options import Output, find_run, json_option, run_argument, store_option

if TYPE_CHECKING:
    from relit.checkpoints import Checkpoints
    from relit_storage.checkpoint.comparing import TensorChange
    from relit_storage.checkpoint.copies import Refusal, StepCopy
    from relit_storage.checkpoint.copy_reading import CopyReader

F = TypeVar("F", bound=Callable[..., Any])
_MAX_LINES = 50
_SHOWN_STAMP = "%Y-%m-%d %H:%M:%S"


def disk_option(command: F) -> F:
    """--disk, once for each folder."""
    help_text = "A node's disk folder of the run; default: those of this machine."
    option = click.option("--disk", "disks", metavar="DIR", multiple=True, help=help_text)
    return option(command)


def checkpoints_of(run: str, store: str | None, disks: tuple[str, ...] = ()) -> Checkpoints:
    """The checkpoints of RUN; imports what it needs only now."""
    from relit.checkpoints import Checkpoints

    return Checkpoints(find_run(run, store).reader, disks)


@click.command(short_help="List committed steps.")
@run_argument
@disk_option
@store_option
@json_option
def ls(run: str, disks: tuple[str, ...], store: str | None, out: Output) -> None:
    """List a run's committed steps, newest first: one line for each tier that has one."""
    from rich.markup import escape
    from rich.table import Table

    checkpoints = checkpoints_of(run, store, disks)
    inventory, pins = checkpoints.inventory(), checkpoints.pins()
    rows = [_summary(copy, copy.step in pins) for copy in inventory.copies]
    out.data(rows)
    if out.as_json:
        return
    table = Table("STEP", "GEN", "TIER", "WORLD", "SIZE", "COMMITTED", "", box=None, pad_edge=False)
    for row in rows:
        note = row["problem"] or ("pinned" if row["pinned"] else "")
        stamp = time.strftime(_SHOWN_STAMP, time.localtime(row["committed_at_s"]))
        cells = (row["step"], row["generation"], row["tier"], row["world"] or "?")
        table.add_row(*map(str, cells), size_text(row["bytes"]), stamp, escape(note))
    out.console().print(table)
    for refusal in inventory.log_refusals:
        out.say(str(refusal))


@click.command(short_help="Show what a step holds.")
@run_argument
@click.argument("step", type=int)
@click.option("--tensors", is_flag=True, help="Every tensor, not the sums of registered objects.")
@disk_option
@store_option
@json_option
def show(
    run: str, step: int, tensors: bool, disks: tuple[str, ...], store: str | None, out: Output
) -> None:
    """Show a step: where it lies, its position in the data, its ids and its tensors."""
    checkpoints = checkpoints_of(run, store, disks)
    copies, pins = checkpoints.copies(step), checkpoints.pins()
    found = [_details(copy, step in pins, tensors) for copy in copies]
    out.data(found)
    if out.as_json:
        return
    for copy in found:
        _say_details(copy, out)


@click.command(short_help="Check that checkpoints are whole.")
@run_argument
@click.argument("step", type=int, required=False)
@click.option("--deep", is_flag=True, help="Read every byte and check every checksum.")
@disk_option
@store_option
@json_option
def verify(
    run: str,
    step: int | None,
    deep: bool,
    disks: tuple[str, ...],
    store: str | None,
    out: Output,
) -> None:
    """Check a step, or all: manifests against the commit log, sizes, headers; --deep every byte.

    Names each file that is refused and why. Exits 0 if all is whole, 100 if something is broken,
    102 if there is no such run or step.
    """
    from relit.errors import FAILED

    checkpoints = checkpoints_of(run, store, disks)
    copies = checkpoints.copies(step)
    refusals = list(checkpoints.log_refusals()) if step is None else []
    refusals += checkpoints.still_broken(_verified(copies, deep))
    checked = [{"tier": c.tier, "step": c.step, "generation": c.generation} for c in copies]
    out.data(
        {
            "whole": not refusals,
            "deep": deep,
            "checked": checked,
            "refused": [refusal.to_json() for refusal in refusals],
        }
    )
    for refusal in refusals:
        out.say(str(refusal))
    how = "every byte was read" if deep else "sizes and headers; --deep reads every byte"
    verdict = f"{len(refusals)} refused" if refusals else "all whole"
    out.say(f"{len(copies)} copies of {len({c.step for c in copies})} steps: {verdict} ({how})")
    sys.exit(FAILED if refusals else 0)


def _verified(copies: tuple[StepCopy, ...], deep: bool) -> list[Refusal]:
    from relit_storage.checkpoint.verifying import verify_copy

    refusals: list[Refusal] = []
    with byte_bar("verifying", sum(copy.num_bytes for copy in copies)) as done:
        for copy in copies:
            refusals += verify_copy(copy, deep=deep, on_bytes=done)
    return refusals


@click.command(short_help="Compare two steps.")
@run_argument
@click.argument("a", type=int)
@click.argument("b", type=int)
@click.option("--with", "other", metavar="RUN", help="B is a step of this run.")
@disk_option
@store_option
@json_option
def diff(
    run: str,
    a: int,
    b: int,
    other: str | None,
    disks: tuple[str, ...],
    store: str | None,
    out: Output,
) -> None:
    """Compare step A with step B, tensor by tensor, and their positions and ids.

    Every byte that is compared is checked. The exit code is 0 whether they differ or not.
    """
    from relit_storage.checkpoint.comparing import compare_fields, compare_tensors

    mine = checkpoints_of(run, store, disks).readable(a)
    theirs = checkpoints_of(other or run, store, () if other else disks).readable(b)
    with byte_bar("comparing", mine.copy.num_bytes) as done:
        changes = list(compare_tensors(mine, theirs, done))
    fields = compare_fields(mine.manifest, theirs.manifest)
    out.data(
        {
            "equal": not changes,
            "a": _place(mine),
            "b": _place(theirs),
            "fields": fields,
            "tensors": [change.to_json() for change in changes],
            "compared": len(mine.manifest.tensors),
        }
    )
    if out.as_json:
        return
    for name, (ours, other_one) in fields.items():
        out.say(f"  {name}: {ours} -> {other_one}")
    _say_changes(changes, len(mine.manifest.tensors), out)


def _say_changes(changes: list[TensorChange], total: int, out: Output) -> None:
    for change in changes[:_MAX_LINES]:
        if change.what == "values":
            most = "" if change.max_abs is None else f", at most by {change.max_abs:.6g}"
            count = f"{change.differing} of {change.elements} elements differ"
            out.say(f"  {change.name} {change.a}: {count}{most}")
        else:
            kinds = " -> ".join(kind for kind in (change.a, change.b) if kind)
            out.say(f"  {change.name}: {change.what} ({kinds})")
    if len(changes) > _MAX_LINES:
        out.say(f"  and {len(changes) - _MAX_LINES} more; --json lists all")
    differing = sum(change.what != "only in B" for change in changes)
    out.say(f"{differing} of {total} tensors differ" if changes else f"all {total} tensors equal")


def _place(reader: CopyReader) -> dict[str, Any]:
    manifest = reader.manifest
    where = {"run_id": manifest.run_id, "step": manifest.step, "generation": manifest.generation}
    return {**where, "tier": reader.copy.tier}


def _summary(copy: StepCopy, pinned: bool) -> dict[str, Any]:
    return {
        "step": copy.step,
        "generation": copy.generation,
        "tier": copy.tier,
        "world": copy.manifest.world if copy.manifest else None,
        "tensors": len(copy.manifest.tensors) if copy.manifest else None,
        "bytes": copy.num_bytes,
        "committed_at_s": copy.committed_at_s,
        "pinned": pinned and copy.tier == "object",
        "problem": copy.problem,
    }


def _details(copy: StepCopy, pinned: bool, tensors: bool) -> dict[str, Any]:
    found = _summary(copy, pinned)
    if copy.manifest is None:
        return found
    objects: dict[str, dict[str, int]] = {}
    for tensor in copy.manifest.tensors:
        begin_end = [piece.byte_range for piece in tensor.pieces]
        name = tensor.name.partition(".")[0]
        sums = objects.setdefault(name, {"tensors": 0, "bytes": 0})
        sums["tensors"] += 1
        sums["bytes"] += sum(end - begin for begin, end in begin_end)
    found |= {
        "run_id": copy.manifest.run_id,
        "epoch": copy.manifest.epoch,
        "cursor": copy.manifest.cursor,
        "ids": dict(copy.manifest.ids),
        "where": [store.url for store in copy.stores],
        "shards": [
            {"rank": s.rank, "node": s.node_id, "file": s.file, "bytes": s.num_bytes}
            for s in copy.manifest.shards
        ],
        "objects": objects,
    }
    if tensors:
        found["tensor_list"] = [
            {
                "name": t.name,
                "dtype": t.dtype,
                "shape": list(t.global_shape),
                "pieces": len(t.pieces),
            }
            for t in copy.manifest.tensors
        ]
    return found


def _say_details(copy: dict[str, Any], out: Output) -> None:
    pinned = ", pinned" if copy["pinned"] else ""
    size = size_text(copy["bytes"])
    out.say(
        f"step {copy['step']} of generation {copy['generation']} in tier {copy['tier']}{pinned}: "
        f"{copy['problem'] or size}"
    )
    if "shards" not in copy:
        return
    for url in copy["where"]:
        out.say(f"  lies in   {url}")
    out.say(f"  position  {copy['cursor']}")
    for name, value in copy["ids"].items():
        out.say(f"  {name:<9} {value}")
    for shard in copy["shards"]:
        out.say(f"  rank {shard['rank']:<4} {size_text(shard['bytes'])}, node {shard['node']}")
    for name, sums in copy["objects"].items():
        out.say(f"  object {name}: {sums['tensors']} tensors, {size_text(sums['bytes'])}")
    for tensor in copy.get("tensor_list", ()):
        cut = f", {tensor['pieces']} pieces" if tensor["pieces"] > 1 else ""
        out.say(f"    {tensor['name']} {tensor['dtype']} {tensor['shape']}{cut}")
