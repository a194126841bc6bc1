"""A rank's snapshots: its share of the state copied into slots that the node's agent owns.

`take` copies at a step boundary into a slot whose header was laid out once; no serialisation, no
allocation, one fused copy. It never waits for a slot: with none free the snapshot is skipped and
says why. Three slots suffice for that: one may be pinned by a persist, one holds the newest
complete snapshot and is never overwritten, one is free. Ranks are at most one step apart, so
while every rank keeps its newest complete snapshot, the step before a broken one stays whole.

Replicated state is staged once over all ranks: `owned` deals the tensors out evenly by bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relit_platform.facts import Json
from relit_platform.node.slots import Slot, SlotState
from relit_platform.worker.state_tree import DTYPES, dtype_name
from relit_storage.checkpoint.image import ImageLayout, TensorSpec

NUM_SLOTS = 3
MIN_EXTRAS_BYTES = 256 << 10
RETRY_OPEN_S = 5.0  # after the agent refused or failed to give slots
_METADATA = {"relit": "1"}

OpenSlots = Callable[[int, int, int], Sequence[str]]
Signature = tuple[tuple[str, torch.dtype, torch.Size], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotResult:
    """What `take` did. path is None if it was skipped, and reason then says why."""

    num_bytes: int
    seconds: float
    path: str | None
    reason: str = ""


class _Stage:
    """One mapped slot, and its image as tensors under the present layout."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.step = _complete_step(slot)  # -1: nothing whole in it
        self._layout: ImageLayout | None = None
        self.targets: list[Tensor] = []

    def lay_out(self, layout: ImageLayout) -> None:
        """Write the image's header and cut the image into tensors; once per layout.

        Call between the slot's `begin` and `commit`: it changes the image.
        """
        if layout is self._layout:
            return
        image = torch.frombuffer(self.slot.image, dtype=torch.uint8)
        self.slot.image[: layout.header_bytes] = layout.header
        self.targets = []
        for spec in layout.specs:
            if spec.num_bytes:
                start = layout.offset(spec.name)
                raw = image[start : start + spec.num_bytes]
                self.targets.append(raw.view(DTYPES[spec.dtype]).view(spec.shape))
        self._layout = layout

    def close(self) -> None:
        """Let go of the mapping; the file stays, it is the agent's."""
        self.targets, self._layout = [], None
        self.slot.close()


class Snapshotter:
    """The slots of one worker process, and what lies in them. Used by its training thread only.

    open_slots(count, image_bytes, extras_capacity) asks the node's agent for slot files and may
    block or raise; release_slots(paths) gives them back and must do neither.
    """

    def __init__(
        self,
        worker_id: str,
        open_slots: OpenSlots,
        release_slots: Callable[[Sequence[str]], object] = lambda paths: None,
    ) -> None:
        self._worker_id = worker_id
        self._open_slots = open_slots
        self._release_slots = release_slots
        self._stages: list[_Stage] = []
        self._retired: list[_Stage] = []  # of an older geometry; kept until a new one is whole
        self._newest: _Stage | None = None
        self._geometry = (-1, 0)  # image bytes, extras capacity of self._stages
        self._signature: tuple[int, int, Signature] | None = None
        self._layout: ImageLayout | None = None
        self._planned: Mapping[str, Tensor] | None = None
        self._retry_at_s = 0.0

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
    ) -> SnapshotResult:
        """Copy this rank's share of `tensors` and its extras into a slot; blocks for the copy.

        tensors and extras are what `flatten` gave at this boundary, the same names on every
        rank; the same mapping as last time holds tensors of the same shapes. extras may be JSON
        bytes already. before_commit is called when all is copied and
        nothing counts yet (drills). A skipped snapshot is reported, never raised.
        """
        began_s = time.perf_counter()
        layout = self._plan(tensors, rank, world)
        data = extras if isinstance(extras, bytes) else json.dumps(extras).encode()
        problem = self._ensure_slots(layout, len(data))
        stage = None if problem else self._free_stage()
        if stage is None:
            seconds = time.perf_counter() - began_s
            reason = problem or "no free slot: earlier snapshots are still being persisted"
            return SnapshotResult(num_bytes=0, seconds=seconds, path=None, reason=reason)
        slot = stage.slot
        stage.step = -1
        slot.begin(generation, step, rank, world)
        stage.lay_out(layout)
        sources = [tensors[spec.name] for spec in layout.specs if spec.num_bytes]
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(stage.targets, sources)
        slot.set_extras(data)
        if before_commit is not None:
            before_commit()
        slot.commit()
        stage.step = step
        self._newest = stage
        self._release_retired()
        return SnapshotResult(
            num_bytes=layout.total_bytes, seconds=time.perf_counter() - began_s, path=slot.path
        )

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
        """Unmap everything; the files and their content stay with the agent."""
        for stage in [*self._stages, *self._retired]:
            stage.close()
        self._stages, self._retired, self._newest = [], [], None
        self._geometry, self._planned = (-1, 0), None

    def _plan(self, tensors: Mapping[str, Tensor], rank: int, world: int) -> ImageLayout:
        """The layout of this rank's share, planned anew only if structure or place changed."""
        place = (rank, world)
        known = self._signature is not None and self._signature[:2] == place
        if tensors is self._planned and known and self._layout is not None:
            return self._layout
        shape = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        signature = (*place, shape)
        if self._layout is None or signature != self._signature:
            specs = [
                TensorSpec(name, dtype_name(tensor), tuple(tensor.shape))
                for name, tensor in tensors.items()
            ]
            self._layout = ImageLayout.plan(owned(specs, rank, world), _METADATA)
            self._signature = signature
        self._planned = tensors
        return self._layout

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
            stages = [_Stage(Slot.open(path, prefault=True)) for path in paths]
        except Exception as error:
            # Whatever befell the agent: a failed save is never a reason to stop training.
            self._retry_at_s = now_s + RETRY_OPEN_S
            return f"no slots from the agent: {error}"
        self._retired += self._stages
        self._stages = stages
        self._geometry = (layout.total_bytes, wanted)
        return ""

    def _free_stage(self) -> _Stage | None:
        free = [s for s in self._stages if s is not self._newest and not s.slot.pinned]
        # An empty slot before one that holds an older snapshot, which may still be of use.
        return min(free, key=lambda stage: stage.step, default=None)

    def _release_retired(self) -> None:
        """Give back slots of an older geometry, now that a newer snapshot is complete."""
        if not self._retired:
            return
        gone = [stage for stage in self._retired if not stage.slot.pinned]
        self._retired = [stage for stage in self._retired if stage not in gone]
        for stage in gone:
            stage.close()
        if gone:
            self._release_slots([stage.slot.path for stage in gone])


def owned(specs: Iterable[TensorSpec], rank: int, world: int) -> list[TensorSpec]:
    """The tensors that `rank` saves for all: greedy by bytes, the largest first.

    Pure and the same on every rank: each tensor belongs to exactly one. Ties go to the lower
    rank, equal sizes by name.
    """
    loads = [0] * world
    mine: list[TensorSpec] = []
    for spec in sorted(specs, key=lambda spec: (-spec.num_bytes, spec.name)):
        least = loads.index(min(loads))
        loads[least] += spec.num_bytes
        if least == rank:
            mine.append(spec)
    return mine


def _complete_step(slot: Slot) -> int:
    header = slot.info()
    return header.step if header.state is SlotState.COMPLETE else -1
