"""A run's checkpoints as a person handles them: looked at, chosen, pinned and given up.

Works on the run directory and on folders of nodes' disks, without a cluster and without torch.
What deletes takes the run's lease first: a supervisor that is alive refuses it that way, and one
that starts meanwhile waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from relit.driving import driving, renewing
from relit.errors import BadInputError, CheckpointBrokenError, CheckpointNotFoundError
from relit.present_line import off_the_line, on_the_line, read_line
from relit.reading import RunReader
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.checkpoint.copies import (
    Inventory,
    Refusal,
    StepCopy,
    refused_slots,
    take_inventory,
)
from relit_storage.checkpoint.copy_reading import CopyReader
from relit_storage.checkpoint.pins import read_pins, remove_pin, write_pin
from relit_storage.checkpoint.sweeping import (
    Garbage,
    Place,
    files_of,
    garbage_of,
    give_up,
    plan_sweep,
)
from relit_storage.checkpoint.verifying import newest_whole, verify_copy
from relit_storage.errors import CorruptShardError, RetentionError
from relit_storage.run.layout import STEPS_PREFIX
from relit_storage.stores.local import LocalStore

OnBytes = Callable[[int], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Used(Generic[T]):
    """What came of reading a copy; by which reader, and what was passed over before it."""

    answer: T
    reader: CopyReader
    refusals: tuple[Refusal, ...]


class Checkpoints:
    """The checkpoints of one run. disks are folders given by hand; by default those of this
    machine that the run's configuration names. Every method blocks for the store (StoreError).
    """

    def __init__(self, reader: RunReader, disks: Sequence[str] = ()) -> None:
        self._reader = reader
        self._disks = [LocalStore(path) for path in self._disk_folders(disks)]

    def inventory(self) -> Inventory:
        """Everything committed, newest first."""
        return take_inventory(self._reader.store, self._disks)

    def copies(self, step: int | None) -> tuple[StepCopy, ...]:
        """Copies of a step, of all steps without one. CheckpointNotFoundError if there is none."""
        found = take_inventory(self._reader.store, self._disks, step=step).copies
        if not found:
            raise self._not_found(step)
        return found

    def log_refusals(self) -> tuple[Refusal, ...]:
        """Slots of the commit log that cannot be read."""
        return refused_slots(self._reader.store)

    def pins(self) -> frozenset[int]:
        """The pinned steps."""
        return read_pins(self._reader.store)

    def readable(self, step: int) -> CopyReader:
        """A reader of the nearest copy of a step that is whole by sizes and headers.

        CheckpointNotFoundError, CheckpointBrokenError.
        """
        return self.first_whole(step, lambda reader: reader).reader

    def first_whole(self, step: int | None, use: Callable[[CopyReader], T]) -> Used[T]:
        """Hand the newest whole copy to `use`, of this step if one is given; what it answered.
        Without one, what is off the run's present line is passed over, as a restore would.

        A copy that is refused, before or while it is used, gives way to the next one; so `use`
        leaves nothing behind when it raises. CheckpointNotFoundError, CheckpointBrokenError.
        """
        refusals: list[Refusal] = []
        copies = self.copies(step)
        line = read_line(self._reader, step)
        for copy in copies:
            said = off_the_line(copy, line) or verify_copy(copy, deep=False)
            if not said:
                reader = CopyReader(copy)
                try:
                    return Used(use(reader), reader, tuple(refusals))
                except CorruptShardError as error:
                    file, reason = str(error.fields["file"]), str(error.fields["reason"])
                    said = [copy.refusal(file, reason)]
            refusals += said
        what = "any step" if step is None else f"step {step}"
        raise CheckpointBrokenError(
            run=self._reader.run_id, what=what, refusals="; ".join(map(str, refusals))
        )

    def still_broken(self, refusals: Sequence[Refusal]) -> list[Refusal]:
        """Without those of steps that retention has taken away while they were read."""
        if not refusals:
            return []
        there = {(copy.tier, copy.step, copy.generation) for copy in self.inventory().copies}
        return [r for r in refusals if r.step < 0 or (r.tier, r.step, r.generation) in there]

    # ---- what changes a run ----

    def pin(self, step: int, reason: str) -> bool:
        """Keep a step of the object tier for ever; False if it was pinned already.

        CheckpointNotFoundError if it is not committed there, also if retention is faster.
        """
        self._require_commit(step)
        new = write_pin(self._reader.store, step, reason=reason, at_s=time.time())
        try:
            self._require_commit(step)
        except CheckpointNotFoundError:
            remove_pin(self._reader.store, step)
            raise
        return new

    def unpin(self, step: int) -> bool:
        """Let retention decide again; False if the step was not pinned."""
        return remove_pin(self._reader.store, step)

    def newest_bytes(self) -> int:
        """Size of the newest step of the object tier, which is read before anything is deleted."""
        copies = take_inventory(self._reader.store).copies
        return copies[0].num_bytes if copies else 0

    def remove(self, step: int, on_bytes: OnBytes = lambda count: None) -> tuple[Garbage, ...]:
        """Give up a step of the object tier; what was deleted. Reads the newest step whole, of
        which on_bytes hears.

        Commits of the step by older generations, long replaced, go with it.
        CheckpointNotFoundError; RunAliveError; RetentionError if it must stay.
        """
        self._require_commit(step)  # before anything is written
        with driving(self._reader, "rm") as lease:
            place = self._require_commit(step)
            log = CommitLog(self._reader.store)
            view = log.replay()
            if step in self.pins():
                raise RetentionError(step=step, reason="it is pinned")
            if view.newest is not None and view.newest.identity == place:
                raise RetentionError(step=step, reason="it is the newest commit")
            if place in self._spared(deep=True, on_bytes=renewing(lease, on_bytes)):
                raise RetentionError(step=step, reason="it is the newest one that is whole")
            older = [record.identity for record in view.superseded if record.step == step]
            store = self._reader.store
            found = tuple(
                garbage_of(store, one, "asked for", True, files_of(store, one))
                for one in (*sorted(older), place)
            )
            for garbage in found:
                lease.renew()
                give_up(store, log, garbage, epoch=lease.epoch, at_s=time.time())
            return found

    def garbage(
        self, keep: int | None, *, deep: bool = False, on_bytes: OnBytes = lambda count: None
    ) -> tuple[Garbage, ...]:
        """What `gc` would delete. deep: the newest step, which is spared, is read whole."""
        store = self._reader.store
        view = CommitLog(store).replay()
        spared = self._spared(deep=deep, on_bytes=on_bytes)
        return plan_sweep(store, view, keep=keep, spared=spared, pins=read_pins(store))

    def collect(self, keep: int | None, on_bytes: OnBytes) -> tuple[Garbage, ...]:
        """Delete the garbage of a run that is not alive; what was deleted. RunAliveError.

        on_bytes hears of what was read of the newest step, and of what was deleted.
        """
        with driving(self._reader, "gc --yes") as lease:
            log = CommitLog(self._reader.store)
            found = self.garbage(keep, deep=True, on_bytes=renewing(lease, on_bytes))
            for garbage in found:
                lease.renew()
                give_up(self._reader.store, log, garbage, epoch=lease.epoch, at_s=time.time())
                on_bytes(garbage.num_bytes)
            return found

    # ---- inside ----

    def _spared(self, *, deep: bool, on_bytes: OnBytes) -> frozenset[Place]:
        """The newest step that is whole, and the newest that the run would go back to."""
        inventory = take_inventory(self._reader.store)
        whole = newest_whole(inventory, deep=deep, tier="object", on_bytes=on_bytes)
        line = read_line(self._reader)
        if whole is not None and off_the_line(whole, line):
            left = on_the_line(inventory, line)
            older = newest_whole(left, deep=deep, tier="object", on_bytes=on_bytes)
        else:
            older = whole
        return frozenset((c.step, c.generation) for c in (whole, older) if c is not None)

    def _require_commit(self, step: int) -> Place:
        for record in CommitLog(self._reader.store).replay().commits:
            if record.step == step:
                return record.identity
        raise self._not_found(step)

    def _not_found(self, step: int | None) -> CheckpointNotFoundError:
        steps = sorted({copy.step for copy in self.inventory().copies})
        listed = ", ".join(map(str, steps[-8:]))
        there = f"the newest steps are {listed}" if steps else "nothing was committed yet"
        what = "checkpoint" if step is None else f"step {step}"
        return CheckpointNotFoundError(run=self._reader.run_id, what=what, there=there)

    def _disk_folders(self, given: Sequence[str]) -> list[str]:
        found = []
        for path in given:
            inside = _node_folders(path) or _node_folders(os.path.join(path, self._reader.run_id))
            if not inside:
                raise BadInputError(f"{path} holds no checkpoints of a node's disk.")
            found += inside
        if given:
            return found
        config = self._reader.config()
        if config is None:
            return []
        home = os.path.expanduser(config.checkpoint.disk_dir)
        return _node_folders(os.path.join(home, self._reader.run_id))


def _node_folders(path: str) -> list[str]:
    """The folder itself if it is a node's, else the node folders in it."""
    path = os.path.expanduser(path)
    if os.path.isdir(os.path.join(path, STEPS_PREFIX)):
        return [path]
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return []  # no such folder here, or not ours to read
    inside = (os.path.join(path, name) for name in names)
    return [folder for folder in inside if os.path.isdir(os.path.join(folder, STEPS_PREFIX))]
