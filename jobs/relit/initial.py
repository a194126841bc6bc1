"""Which step a run begins with: what `init` of a specification says, made exact at submit.

"newest" would mean another step an hour later, and on another rank. So the commit is looked up
once, and the run's configuration names it by step, generation and the manifest's sha256.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from relit.errors import (
    BadInputError,
    CheckpointBrokenError,
    CheckpointNotFoundError,
    RunNotFoundError,
)
from relit.import_source import detect
from relit.present_line import off_the_line, read_line
from relit.reading import RunReader
from relit.spec.model import Init
from relit_platform.run_config import InitConfig
from relit_storage.checkpoint.copies import StepCopy, take_inventory
from relit_storage.checkpoint.pins import read_reasons
from relit_storage.checkpoint.verifying import verify_copy

NEWEST = "newest"
FindRun = Callable[[str], RunReader]
FindInitial = Callable[[Init], InitConfig]


def find_initial(init: Init, find_run: FindRun) -> InitConfig:
    """The commit that `init` means; find_run gives the run of an id or a directory.

    Blocks for the store: the commit log, manifests, the sizes and headers of one step. Files are
    read whole when the run begins. RunNotFoundError, CheckpointNotFoundError,
    CheckpointBrokenError; BadInputError for a checkpoint that was not imported yet.
    """
    reader = _find(init, find_run)
    copy = _choose(reader, init.step)
    assert copy.manifest is not None
    return InitConfig(
        source=reader.store.url,
        run_id=reader.run_id,
        step=copy.step,
        generation=copy.generation,
        manifest_sha256=copy.manifest.sha256,
        weights_only=init.weights_only,
        strict=init.strict,
        rename=dict(init.rename),
    )


def _find(init: Init, find_run: FindRun) -> RunReader:
    try:
        return find_run(init.source)
    except RunNotFoundError:
        path = os.path.expanduser(init.source)
        if not os.path.exists(path):
            raise
        detect(os.path.abspath(path))  # what it is not says SourceRefusedError
        raise BadInputError(
            f"init.from {init.source!r} is another tool's checkpoint: take it over by `relit ckpt "
            f"import {init.source} --run NAME`, which the whole cluster can read and check, and "
            "set init.from to NAME."
        ) from None


def _choose(reader: RunReader, wanted: int | str) -> StepCopy:
    step = _step_of(reader, wanted)
    copies = take_inventory(reader.store, step=step).copies
    if not copies:
        what = "checkpoint" if step is None else f"step {step}"
        there = _there(reader)
        raise CheckpointNotFoundError(run=reader.run_id, what=what, there=there)
    refusals = []
    line = read_line(reader, step)
    for copy in copies:
        said = off_the_line(copy, line) or verify_copy(copy, deep=False)
        if not said:
            return copy
        refusals += said
    what = "any step" if step is None else f"step {step}"
    text = "; ".join(map(str, refusals))
    raise CheckpointBrokenError(run=reader.run_id, what=what, refusals=text)


def _step_of(reader: RunReader, wanted: int | str) -> int | None:
    """The number of a step; None for the newest."""
    if isinstance(wanted, int):
        return wanted
    if wanted == NEWEST:
        return None
    reasons = read_reasons(reader.store)
    found = [step for step, reason in reasons.items() if reason == wanted]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{step} {reason!r}" for step, reason in sorted(reasons.items())) or "none"
    raise CheckpointNotFoundError(
        run=reader.run_id,
        what=f"pin {wanted!r}" if not found else f"single pin {wanted!r}",
        there=f"its pins are {known}",
    )


def _there(reader: RunReader) -> str:
    steps = sorted({copy.step for copy in take_inventory(reader.store).copies})
    listed = ", ".join(map(str, steps[-8:]))
    return f"the newest steps of its object tier are {listed}" if steps else "nothing is committed"
