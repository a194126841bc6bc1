"""The tool that takes over a checkpoint of another tool: the mirror of `export`."""

from __future__ import annotations

import contextlib

import click

from relit.cli.ckpt_progress import byte_bar, size_text
from relit.cli.options import Output, json_option, make_client, store_option


@click.command(short_help="Take over another tool's checkpoint.")
@click.argument("source", type=click.Path())
@click.option("--run", "run_id", required=True, help="A new run id, or a run that never started.")
@click.option("--step", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@click.option(
    "--as",
    "names",
    metavar="NAME | OLD=NEW",
    multiple=True,
    help="The object that tensors belong to (default: model), or new names for objects.",
)
@click.option("--name", default="", help="Of a new run, for people; default: its id.")
@click.option("--experiment", default="default", show_default=True, help="Of a new run.")
@click.option(
    "--scratch",
    type=click.Path(exists=True, file_okay=False, writable=True),
    help="Where 4 GB at a time are laid out; default: the system's temporary folder.",
)
@store_option
@json_option
def import_checkpoint(
    source: str,
    run_id: str,
    step: int,
    names: tuple[str, ...],
    name: str,
    experiment: str,
    scratch: str | None,
    store: str | None,
    out: Output,
) -> None:
    """Commit SOURCE as a step of a run: Hugging Face safetensors (a file, a folder, an index), a
    torch.distributed.checkpoint folder, or a torch.save file.

    Bytes stay as they are, and get checksums. No code of the file is run. Exits 0 once it is
    committed; 2 if the source or the run is refused, and nothing is committed then; 101 if the
    commit itself failed, and may have gone through.
    """
    from relit.import_source import Naming, bytes_to_check, open_source
    from relit.importing import Target
    from relit.importing import import_checkpoint as commit

    target = Target(run_id=run_id, step=step, name=name, experiment=experiment)
    with contextlib.ExitStack() as stack:
        with byte_bar("checking", bytes_to_check(source)) as done:
            found = stack.enter_context(open_source(source, Naming.of(names), done))
        with byte_bar(f"importing step {step}", found.num_bytes) as done:
            made = commit(found, target, make_client(store), scratch=scratch, on_bytes=done)
    objects = sorted(found.objects)
    out.data({**made.to_json(), "format": found.format, "objects": objects})
    out.say(
        f"step {step} of run {run_id}: {made.tensors} tensors, {size_text(made.num_bytes)}, "
        f"of {', '.join(objects)}"
    )
    out.say(f"  directory   {made.directory}")
