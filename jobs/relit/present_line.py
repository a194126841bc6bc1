"""What a run would go back to is not what was cut off its line of history.

A committed step that a rollback has cut off stays on its tier until the new line has a commit
there. Where nobody names a step, the tools pass it over, as a restore does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from relit.errors import EventRefusedError
from relit.reading import RunReader
from relit_platform.control.history import History
from relit_platform.machines.lineage import Lineage
from relit_storage.checkpoint.copies import Inventory, Refusal, StepCopy
from relit_storage.run.layout import manifest_key

# The events by which History knows the line; all others may be of any version.
OF_THE_LINE = ("generation.formed", "generation.lost", "member.fault")


def read_line(reader: RunReader, named: int | None = None) -> Lineage:
    """The line as the event log tells it. Of a run without events nothing is cut off, nor for who
    has named a step. Blocks.
    """
    return line_of(reader.events()) if named is None else Lineage()


def line_of(events: Iterable[Mapping[str, Any]]) -> Lineage:
    """The line that the generations in an event log leave, as the next supervisor would see it.

    EventRefusedError for an event of theirs that is not what relit writes: what was cut off is
    not known then, and a tool that deletes must not guess.
    """
    history = History()
    for event in events:
        if event.get("kind") not in OF_THE_LINE:
            continue
        try:
            history.add(event)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            raise EventRefusedError(number=event.get("seq"), kind=event["kind"], why=why) from error
    return Lineage().merged(history.for_manager().lineage)


def off_the_line(copy: StepCopy, line: Lineage) -> list[Refusal]:
    """Why a restore would not take this copy, whatever its files are like; empty if it may."""
    cut = line.cut_by(copy.generation, copy.step)
    if cut is None:
        return []
    reason = f"off the line: generation {cut[0]} went back to step {cut[1]}"
    return [copy.refusal(manifest_key(copy.step, copy.generation), reason)]


def on_the_line(inventory: Inventory, line: Lineage) -> Inventory:
    """Without what was cut off."""
    return replace(
        inventory, copies=tuple(c for c in inventory.copies if not off_the_line(c, line))
    )
