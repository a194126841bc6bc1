"""A rank's snapshots: its share of the state copied into slots that the node's agent owns.

`take` copies at a step boundary into a slot whose header was laid out once; no serialisation, no
allocation, one fused copy. Of a large state it copies only what the forward pass may change, and
leaves the rest to a thread (staging.py) that `settle` waits for. It never waits for a slot: with
none free the snapshot is skipped and says why. Three slots suffice for that: one may be pinned by a
persist, one holds the newest complete snapshot and is never overwritten, one is free. Ranks are at
most one step apart, so while every rank keeps its newest complete snapshot, the step before a
broken one stays whole.

What several ranks hold is staged once: ownership.py deals tensors and pieces out by bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relit_platform.facts import Json
from relit_platform.node.slots import Slot, SlotState
from relit_platform.worker.copying import copy_into
from relit_platform.worker.overlap import Overlap, Part, Staging
from relit_platform.worker.ownership import ShareLayout
from relit_platform.worker.staging import HostMemory
from relit_platform.worker.state_tree import DTYPES
from relit_storage.checkpoint.image import ImageLayout

NUM_SLOTS = 3
CUTS_KEPT = 2  # the newest that is whole on another node, and the next one
MIN_EXTRAS_BYTES = 256 << 10
RETRY_OPEN_S = 5.0  # after the agent refused or failed to give slots
RETRY_ADD_S, RETRY_ADD_MAX_S = 60.0, 3600.0  # the one more that cuts would like: the loop waits

OpenSlots = Callable[[int, int, int], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotResult:
    """What `take` or `settle` did. path is None if there is no snapshot; reason says why.

    pending: the copy goes on, and `settle` has the outcome. seconds: how long the loop stood still.
    """

    num_bytes: int
    seconds: float
    path: str | None
    reason: str = ""
    pending: bool = False


class _Stage:
    """One mapped slot, and its image as tensors under the present layout."""

    def __init__(self, slot: Slot, memory: HostMemory) -> None:
        self.slot = slot
        self.step = _complete_step(slot)  # -1: nothing whole in it
        self._layout: ImageLayout | None = None
        self._memory = memory
        self._image = torch.frombuffer(slot.image, dtype=torch.uint8)
        memory.register(self._image)
        self.targets: list[Tensor] = []

    def lay_out(self, layout: ImageLayout) -> None:
        """Write the image's header and cut the image into tensors; once per layout.

        Call between the slot's `begin` and `commit`: it changes the image.
        """
        if layout is self._layout:
            return
        self.slot.image[: layout.header_bytes] = layout.header
        self.targets = []
        for spec in layout.specs:
            if spec.num_bytes:
                start = layout.offset(spec.name)
                raw = self._image[start : start + spec.num_bytes]
                self.targets.append(raw.view(DTYPES[spec.dtype]).view(spec.shape))
        self._layout = layout

    def close(self) -> None:
        """Let go of the mapping; the file stays, it is the agent's."""
        self.targets, self._layout = [], None
        self._memory.forget(self._image)
        self._image = torch.empty(0, dtype=torch.uint8)
        self.slot.close()


@dataclass(frozen=True, slots=True)
class _Pending:
    """A snapshot that is being copied."""

    stage: _Stage
    step: int
    num_bytes: int


class Snapshotter:
    """The slots of one worker process, and what lies in them. Used by its training thread only.

    open_slots(count, image_bytes, extras_capacity) asks the node's agent for slot files and may
    block or raise; release_slots(paths) gives them back and must do neither. staging: see Overlap.
    """

    def __init__(
        self,
        worker_id: str,
        open_slots: OpenSlots,
        release_slots: Callable[[Sequence[str]], object] = lambda paths: None,
        staging: Staging = "sync",
    ) -> None:
        self._worker_id = worker_id
        self._open_slots = open_slots
        self._release_slots = release_slots
        self._stages: list[_Stage] = []
        self._retired: list[_Stage] = []  # of an older geometry; kept until a new one is whole
        self._newest: _Stage | None = None
        self._cut: _Stage | None = None  # the last one, unless something else is in its slot now
        self._geometry = (-1, 0)  # image bytes, extras capacity of self._stages
        self._share = ShareLayout()
        self._retry_at_s = 0.0
        self._add_at_s, self._add_pause_s = 0.0, RETRY_ADD_S
        self._memory = HostMemory()
        self._overlap = Overlap(staging)
        self._pending: _Pending | None = None

    def take(
        self,
        *,
        step: int,
        generation: int,
        rank: int,
        world: int,
        tensors: Mapping[str, Tensor],
        extras: Json,
        before_commit: Callable[[], object] | None = None,
        still: frozenset[str] = frozenset(),
        cut: bool = False,
        on_begun: Callable[[str], object] = lambda path: None,
        on_whole: Callable[[str], object] = lambda path: None,
    ) -> SnapshotResult:
        """Copy this rank's share of `tensors` and its extras into a slot; blocks for the copy.

        tensors and extras are what `flatten` gave at this boundary, the same names on every
        rank; the same mapping as last time holds tensors of the same shapes. extras may be JSON
        bytes already. before_commit is called when all is copied that is copied here, and
        nothing counts yet (drills). still: names of tensors that nothing changes before `settle`;
        when they are copied beside the loop the result is pending. cut: see cuts.py. on_begun gets
        the slot's path before such a copy begins, on_whole once the snapshot counts, then from the
        copying thread. A skipped snapshot is reported, never raised.
        """
        began_s = time.perf_counter()
        self.settle()
        layout = self._share.of(tensors, rank, world)
        data = extras if isinstance(extras, bytes) else json.dumps(extras).encode()
        problem = self._ensure_slots(layout, len(data))
        if (cut or self._cut is not None) and not problem:
            self._add_slot()
        stage = None if problem else self._free_stage()
        if stage is None:
            reason = problem or "no free slot: earlier snapshots are still being persisted"
            return _result(0, began_s, None, reason)
        slot = stage.slot
        stage.step = -1
        slot.begin(generation, step, rank, world, cut=cut)
        if cut or stage is self._cut:
            self._cut = stage if cut else None
        stage.lay_out(layout)
        names = [spec.name for spec in layout.specs if spec.num_bytes]
        whole = Part(stage.targets, [tensors[name] for name in names], names)
        now, later = self._overlap.divide(whole, layout, still)
        look = bool(later.names) and self._overlap.look_due()
        at_once = whole if look else now
        copy_into(at_once.targets, at_once.sources)
        slot.set_extras(data)
        if before_commit is not None:
            before_commit()
        if later.names and not look:
            self._pending = _Pending(stage, step, layout.total_bytes)
            copied = _final_marker(slot, layout, later.names)
            copied(0)
            on_begun(slot.path)
            self._overlap.begin(later, lambda: _commit(slot, on_whole), copied)
            return _result(layout.total_bytes, began_s, slot.path, pending=True)
        _commit(slot, on_whole)
        self._whole(stage, step)
        if look:
            self._overlap.remember(later)
        return _result(layout.total_bytes, began_s, slot.path)

    def settle(self) -> SnapshotResult | None:
        """The outcome of a pending snapshot, or None without one; blocks until it is copied.

        Call before this rank's part of the next step's sum goes out (no rank is then two
        snapshots ahead of another), and before anything changes a tensor that stands still.
        """
        began_s = time.perf_counter()
        reason = self._overlap.settle()
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        if reason:
            if pending.stage is self._cut:
                self._cut = None
            return _result(0, began_s, None, reason)
        self._whole(pending.stage, pending.step)
        return _result(pending.num_bytes, began_s, pending.stage.slot.path)

    @property
    def replicated(self) -> bool:
        """True if the last cut is whole on another node, or there is none: time for the next."""
        return self._cut is None or self._cut.slot.sent

    @property
    def moving(self) -> str:
        """Why nothing is copied beside the loop any more; "" while all is well."""
        return self._overlap.refused

    def _whole(self, stage: _Stage, step: int) -> None:
        stage.step = step
        self._newest = stage
        self._release_retired()

    def pin(self, path: str) -> None:
        """Keep a slot from being overwritten until the agent has persisted and unpinned it.

        Call before the agent is asked to persist. Raises KeyError for a slot not in use.
        """
        for stage in self._stages:
            if stage.slot.path == path:
                stage.slot.pin()
                return
        raise KeyError(path)

    def close(self) -> None:
        """Unmap everything, after the present copy; files and content stay with the agent."""
        self._overlap.close()
        self._pending = None
        for stage in [*self._stages, *self._retired]:
            stage.close()
        self._stages, self._retired, self._newest, self._cut = [], [], None, None
        self._geometry = (-1, 0)
        self._share.forget()

    def _ensure_slots(self, layout: ImageLayout, extras_bytes: int) -> str:
        """Slots of the right geometry are there, or the reason why not."""
        image_bytes, capacity = self._geometry
        if image_bytes == layout.total_bytes and extras_bytes <= capacity:
            return ""
        now_s = time.monotonic()
        if now_s < self._retry_at_s:
            return "the agent gave no slots a moment ago"
        wanted = MIN_EXTRAS_BYTES
        while wanted < 2 * extras_bytes:
            wanted *= 2
        try:
            paths = self._open_slots(NUM_SLOTS, layout.total_bytes, wanted)
            stages = [_Stage(Slot.open(path, prefault=True), self._memory) for path in paths]
        except Exception as error:
            # Whatever befell the agent: a failed save is never a reason to stop training.
            self._retry_at_s = now_s + RETRY_OPEN_S
            return f"no slots from the agent: {error}"
        self._retired += self._stages
        self._stages = stages
        self._geometry = (layout.total_bytes, wanted)
        return ""

    def _add_slot(self) -> None:
        """Cuts keep two slots: one more than without them, if the agent has room for it.

        Refused, it is asked for ever more rarely: budgets hardly change, and the call may block.
        """
        if len(self._stages) != NUM_SLOTS or time.monotonic() < self._add_at_s:
            return
        try:
            [path] = self._open_slots(1, *self._geometry)
            if path not in [stage.slot.path for stage in self._stages]:  # one that is unused yet
                self._stages.append(_Stage(Slot.open(path, prefault=True), self._memory))
        except Exception:  # as above; with three the older cut goes first
            self._add_at_s = time.monotonic() + self._add_pause_s
            self._add_pause_s = min(2 * self._add_pause_s, RETRY_ADD_MAX_S)

    def _free_stage(self) -> _Stage | None:
        free = [s for s in self._stages if s is not self._newest and not s.slot.pinned]
        # An empty slot before one that holds an older snapshot, which may still be of use, and
        # last of all a cut that is on another node, or on its way.
        cuts = sorted((s for s in self._stages if s.slot.cut and s.step >= 0), key=lambda s: s.step)
        return min(free, key=lambda s: (s in cuts[-CUTS_KEPT:], s.step), default=None)

    def _release_retired(self) -> None:
        """Give back slots of an older geometry, now that a newer snapshot is complete."""
        if not self._retired:
            return
        gone = [stage for stage in self._retired if not stage.slot.pinned]
        self._retired = [stage for stage in self._retired if stage not in gone]
        for stage in gone:
            if stage is self._cut:
                self._cut = None
            stage.close()
        if gone:
            self._release_slots([stage.slot.path for stage in gone])


def _commit(slot: Slot, on_whole: Callable[[str], object]) -> None:
    slot.commit()
    on_whole(slot.path)


def _final_marker(slot: Slot, layout: ImageLayout, later: Sequence[str]) -> Callable[[int], object]:
    """Tells readers of a slot how far its image is final, by how many of `later` are copied.

    All else has been copied, and `later` is in the order of the image.
    """

    def copied(count: int) -> None:
        done = count == len(later)
        slot.mark_final(layout.total_bytes if done else layout.offset(later[count]))

    return copied


def _result(
    num_bytes: int, began_s: float, path: str | None, reason: str = "", *, pending: bool = False
) -> SnapshotResult:
    seconds = time.perf_counter() - began_s
    return SnapshotResult(
        num_bytes=num_bytes, seconds=seconds, path=path, reason=reason, pending=pending
    )


def _complete_step(slot: Slot) -> int:
    header = slot.info()
    return header.step if header.state is SlotState.COMPLETE else -1
