"""Which steps of the disk tier go on to the object tier: asked once a step is committed there.

One place decides, the manager, from the steps of the line that go or went before: so no two ranks
can differ about it, and a step whose upload failed no longer counts, the next one takes its turn.
"""

from __future__ import annotations

from dataclasses import replace

from relit_platform.machines.cadence import on_metric
from relit_platform.machines.checkpoint_state import (
    Checkpoint,
    CheckpointBook,
    CheckpointPhase,
    Measured,
)


def object_due(book: CheckpointBook, step: int, now: float) -> bool:
    """True if this step of the line goes on: by steps, by time, by metric, or as the last one."""
    cadence = book.limits.object
    if not cadence.on or book.finishing:
        return cadence.on
    ahead = [c for c in book.on_line() if c.step < step and (c.wants_object or c.on_object)]
    last_step = max((c.step for c in ahead), default=0)
    last_s = max((c.outward_s for c in ahead), default=book.began_s)
    return cadence.due(step, last_step, now, last_s).due or improves(book, step)


def improves(book: CheckpointBook, step: int) -> bool:
    """True if improvements go to the object tier and this step's metric beats all before it."""
    cadence = book.limits.object
    earlier = [v for s, v in book.metrics.items() if s < step and v == v]  # without NaN
    best = (max if cadence.mode == "max" else min)(earlier, default=None)
    return cadence.on_metric and on_metric(book.metrics.get(step), best, cadence.mode).due


def outward(known: Checkpoint, now: float) -> Checkpoint:
    """The step as one that waits for its upload."""
    return replace(known, wants_object=True, outward_s=now)


def measured(book: CheckpointBook, event: Measured, now: float) -> CheckpointBook:
    """A metric row says how good a step is; it may come before or after the step's commit."""
    metrics = {**book.metrics, event.step: event.value}
    while len(metrics) > book.limits.max_metrics:
        del metrics[min(metrics)]
    book = replace(book, metrics=metrics)
    for known in book.on_line():
        rests = known.phase is CheckpointPhase.COMMITTED and not known.saving and not known.reason
        if known.step == event.step and rests and improves(book, known.step):
            book = book.having(outward(known, now))
    return book
