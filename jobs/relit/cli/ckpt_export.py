"""The tool that writes a step in other formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from relit.cli.ckpt_looking import checkpoints_of, disk_option
from relit.cli.ckpt_progress import byte_bar, size_text
from relit.cli.options import Output, json_option, run_argument, store_option

if TYPE_CHECKING:
    from relit.exporting import Selection
    from relit_storage.checkpoint.copy_reading import CopyReader


@click.command(short_help="Write a step for other tools.")
@run_argument
@click.argument("step", type=int, required=False)
@click.option(
    "--to",
    "target",
    type=(click.Choice(["hf", "dcp", "torch"]), click.Path()),
    metavar="FORMAT DIR",
    required=True,
    help="FORMAT is hf, dcp or torch; DIR must be new or empty.",
)
@click.option("--weights-only", is_flag=True, help="Without optimizers and all that is no weight.")
@click.option(
    "--max-file-gb",
    type=click.FloatRange(min=0.0, min_open=True),
    default=5.0,
    show_default=True,
    help="hf: larger weights become several files and an index.",
)
@disk_option
@store_option
@json_option
def export(
    run: str,
    step: int | None,
    target: tuple[str, str],
    weights_only: bool,
    max_file_gb: float,
    disks: tuple[str, ...],
    store: str | None,
    out: Output,
) -> None:
    """Write a step, by default the newest whole one, into a folder: --to hf DIR.

    hf: model.safetensors for safetensors and transformers. dcp: a directory for
    torch.distributed.checkpoint.load. torch: checkpoint.pt for torch.load. All bytes are checked.
    """
    from relit.exporting import export as export_copy
    from relit.exporting import select

    to, folder = target

    def write(reader: CopyReader) -> tuple[Selection, list[str]]:
        selection = select(reader, weights_only=weights_only)
        with byte_bar(f"exporting step {reader.manifest.step}", selection.num_bytes) as done:
            files = export_copy(
                reader,
                selection,
                folder,
                to,  # type: ignore[arg-type]  # click.Choice has checked it
                max_file_bytes=int(max_file_gb * 10**9),
                on_bytes=done,
            )
        return selection, files

    used = checkpoints_of(run, store, disks).first_whole(step, write)
    for refusal in used.refusals:
        click.echo(f"passed over: {refusal}", err=True)
    (selection, files), manifest = used.answer, used.reader.manifest
    out.data(
        {
            "step": manifest.step,
            "generation": manifest.generation,
            "tier": used.reader.copy.tier,
            "to": to,
            "directory": folder,
            "files": files,
            "bytes": selection.num_bytes,
            "tensors": len(selection.tensors),
        }
    )
    size = size_text(selection.num_bytes)
    out.say(f"step {manifest.step}: {len(selection.tensors)} tensors, {size}, in {folder}")
