"""What a run that ends early has in memory, and no tier has: the emergency save, as a pure choice.

A boundary's state survives its processes in the slots of the agents. When the run is over for good,
by an exception of the user's say, those go with the agents, and the steps since the last disk
checkpoint with them. So the newest boundary that is whole in memory is saved first. State is
replicated and each rank staged its share, so `whole` means a slot of every rank of its world; whose
processes live does not matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from relit_platform.facts import NodeInventory, SlotInfo
from relit_platform.machines.checkpoint_state import TERMINAL, CheckpointBook
from relit_platform.machines.lineage import Lineage

Moment = tuple[int, int, int]  # generation, step, world: newer is greater


@dataclass(frozen=True, slots=True)
class Rescue:
    """slots: one of each rank, of one step; empty if there is nothing to save. reason says why."""

    slots: tuple[SlotInfo, ...]
    reason: str

    @property
    def step(self) -> int:
        """The step that is saved, 0 without one."""
        return self.slots[0].step if self.slots else 0


def choose_rescue(inventories: Iterable[NodeInventory], book: CheckpointBook) -> Rescue:
    """The newest whole step in memory, if it is on the line and no tier has one as new."""
    found: dict[Moment, dict[int, SlotInfo]] = defaultdict(dict)
    for inventory in inventories:
        for slot in inventory.memory:
            if _may_commit(book, slot):
                found[slot.generation, slot.step, slot.world].setdefault(slot.rank, slot)
    whole = [moment for moment, slots in found.items() if set(slots) == set(range(moment[2]))]
    if not whole:
        return Rescue((), _why_none(found))
    generation, step, world = max(whole, key=lambda moment: (moment[1], moment[0]))
    saved = max(book.newest("disk") or 0, book.newest("object") or 0)
    if step <= saved:
        return Rescue((), f"step {saved} is committed, memory has nothing newer than step {step}")
    known = book.steps.get((step, generation))
    if known is not None and known.final:
        return Rescue((), f"step {step} is on its way already")
    slots = found[generation, step, world]
    return Rescue(
        tuple(slots[rank] for rank in range(world)),
        f"step {step} is whole in memory, the newest that is committed is step {saved}",
    )


def newest_kept(inventories: Iterable[NodeInventory], lineage: Lineage) -> list[SlotInfo]:
    """The snapshots of the newest step that is in memory and on the line: beside each of them are
    the metric rows that its rank had not seen written. One is enough, should it be readable.
    """
    found = [slot for inventory in inventories for slot in inventory.memory]
    found = [slot for slot in found if lineage.on_line(slot.generation, slot.step)]
    newest = max(((slot.step, slot.generation) for slot in found), default=None)
    return [slot for slot in found if (slot.step, slot.generation) == newest]


def _may_commit(book: CheckpointBook, slot: SlotInfo) -> bool:
    """On the line, and not given up: what comes late of such a step is deleted."""
    known = book.steps.get((slot.step, slot.generation))
    given_up = known is not None and known.phase in TERMINAL
    return not given_up and book.lineage.on_line(slot.generation, slot.step)


def _why_none(found: dict[Moment, dict[int, SlotInfo]]) -> str:
    if not found:
        return "no snapshot in memory"
    generation, step, world = max(found)
    missing = sorted(set(range(world)) - set(found[generation, step, world]))
    return f"step {step} in memory lacks the snapshots of ranks {missing}"
