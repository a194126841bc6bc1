"""While a restore is under way, what it may read stays where it is.

A plan is made from what the nodes hold, which is more than the book counts as committed: a step
that was given up while only some of its nodes had the manifest is whole for a restore, and a step
that retention was about to take may be all that is left when the newer ones are refused. So from
the moment a restore is planned until the new generation shows a step of its own, retention rests
and deletions on the line are withheld; those of steps that the plan has taken wait until a later
generation no longer needs them.
"""

from __future__ import annotations

from dataclasses import replace

from relit_platform.facts import ShardPersisted
from relit_platform.machines.checkpoint_state import (
    CheckpointAction,
    CheckpointBook,
    CheckpointEvent,
    Discard,
    Finishing,
    GenerationFormed,
    Key,
    Outcome,
    Persisting,
    ReadPins,
)

MAX_WITHHELD = 1024  # what is forgotten is found again at the next start, as after a failed delete


def restoring(book: CheckpointBook, steps: frozenset[Key]) -> CheckpointBook:
    """A restore has begun, or its plan has taken `steps`.

    It is for a generation that has not formed: what the newest one so far still shows, late, is no
    sign that the restore is over.
    """
    newest = book.lineage.newest_generation
    protected = book.protected | steps
    return replace(book, restoring=True, restoring_after=newest, protected=protected)


def settled(book: CheckpointBook, event: CheckpointEvent) -> Outcome:
    """The restore is over if this event says so; what has committed meanwhile was not retained,
    so the pins are asked for again.
    """
    if not book.restoring or not _ends_restore(book, event):
        return book, []
    held = any(c.on_disk or c.on_object for c in book.steps.values())
    return replace(book, restoring=False), [ReadPins()] if held else []


def withholding(book: CheckpointBook, actions: list[CheckpointAction]) -> Outcome:
    """The actions without the deletions that have to wait, with those that need not any longer."""
    others = [action for action in actions if not isinstance(action, Discard)]
    deletions = (*book.withheld, *(action for action in actions if isinstance(action, Discard)))
    found = list({_identity(d): d for d in deletions}.values())
    later = [d for d in found if in_use(book, d)]
    now = [d for d in found if not in_use(book, d)]
    return replace(book, withheld=tuple(later[-MAX_WITHHELD:])), [*others, *now]


def _ends_restore(book: CheckpointBook, event: CheckpointEvent) -> bool:
    match event:
        case Persisting() | ShardPersisted():
            return event.generation > book.restoring_after
        case GenerationFormed():
            return not event.protected  # a member had the state, or there was none
        case Finishing():
            return True
        case _:
            return False


def in_use(book: CheckpointBook, wanted: Discard) -> bool:
    """True if a restore may read what this would delete."""
    key = wanted.step, wanted.generation
    on_line = book.lineage.on_line(wanted.generation, wanted.step)
    return key in book.protected or (book.restoring and on_line)


def _identity(wanted: Discard) -> tuple[object, ...]:
    return wanted.step, wanted.generation, wanted.tier, wanted.nodes
