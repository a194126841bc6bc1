"""A rank's saves: a snapshot into shared memory, and the agent asked to persist one.

    save     at a boundary; the copy of a large state may go on beside the next pass, and the agent
             may begin to write what is copied of it
    persist  as soon as the snapshot is whole, if it is due on disk. The slot is pinned first, so
             that an agent that is killed in between finds it when it comes back
    settle   the snapshot is whole, or known not to be

Nothing here waits for another process. One per rank, driven by its own thread, which touches
nothing between a save that goes on in the copying thread and `settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from relit_platform.run_config import CheckpointConfig
from relit_platform.worker.drill import Drill
from relit_platform.worker.manager_client import ActorLink, tell
from relit_platform.worker.snapshot import Snapshotter
from relit_platform.worker.staging import still_names
from relit_platform.worker.state_memo import StateMemo

ExtrasText = Callable[[bytes], bytes]  # the JSON beside a snapshot, by the state's skeleton


class Saver:
    """The snapshots of one worker process. manager is told of persists and skips, by messages."""

    def __init__(
        self, config: CheckpointConfig, worker_id: str, agent: ActorLink, manager: ActorLink
    ) -> None:
        self._config = config
        self._worker_id = worker_id
        self._agent = agent
        self._manager = manager
        self._snapshotter = Snapshotter(
            worker_id=worker_id,
            open_slots=lambda count, image, extras: self._agent.call(
                "open_slots", worker_id, count, image, extras
            ),
            release_slots=lambda paths: self._agent.send("release_slots", worker_id, paths),
            staging=config.staging,
        )
        self._objects: Mapping[str, Any] = {}
        self._memo = StateMemo()
        self._still: tuple[Mapping[str, Any], frozenset[str]] = ({}, frozenset())
        self._newest_slot = (0, 0, "")  # step, generation and path of the newest snapshot
        self._on_disk = (0, 0)  # newest step, and its generation, that was asked to be persisted
        self._skips = 0
        self._moving = ""
        self.memory_step: int | None = None  # of the newest whole snapshot
        self.drill: Drill | None = None

    def bind(self, objects: Mapping[str, Any]) -> None:
        """The registered objects, before the first generation is entered."""
        self._objects = objects

    def save(
        self,
        member: Any,
        extras: ExtrasText,
        step: int,
        *,
        to_disk: bool,
        last: bool,
        cut: bool = False,
    ) -> None:
        """A snapshot if memory or disk is due. last: it is whole, and asked for, on return.

        cut: if there is one it belongs on another node, too; see cuts.py.
        """
        to_disk = to_disk or last
        every = self._config.memory_every_steps
        if not to_disk and not (every > 0 and step % every == 0):
            return

        def whole(path: str) -> None:
            self._hold(member, step, path)
            if to_disk:
                self.persist(member, step, last=last)

        def begun(path: str) -> None:
            place = step, member.generation
            self._agent.send("persist_growing", self._worker_id, path, *place)

        self._snapshot(
            member,
            extras,
            step,
            whole,
            *([begun] if to_disk else []),
            drill=self.drill,
            overlap=not last,
            cut=cut,
        )

    @property
    def replicated(self) -> bool:
        """True if the last cut is whole on another node, or there is none."""
        return self._snapshotter.replicated

    def settle(self, member: Any) -> None:
        """Wait until the newest snapshot is whole; afterwards its state may be changed.

        Called before this rank's part of a step's sum goes out, before an update, and before a
        recovery. Blocks for what is left of a copy, usually not at all.
        """
        outcome = self._snapshotter.settle()
        self._warn_of_moving(member)
        if outcome is not None and outcome.path is None:
            self._skipped(member, outcome.reason)

    def rejoined(self, member: Any, extras: ExtrasText) -> None:
        """A generation begins at a boundary that is not the first: put its state into a slot.

        A newcomer has none of this step yet. If all ranks died before the next boundary, the
        newest step that is whole in memory would lie two steps back.
        """
        if member.step > 0 and self._config.memory_every_steps > 0:
            hold = partial(self._hold, member, member.step)
            self._snapshot(member, extras, member.step, hold, drill=None, overlap=False)

    def asked(self, member: Any) -> bool:
        """True if this step of this generation was asked to be persisted."""
        return self._on_disk == (member.step, member.generation)

    def persist(self, member: Any, step: int, *, last: bool = False) -> None:
        """Ask for the newest snapshot to go to disk, if it is this step's of this generation."""
        held, generation, path = self._newest_slot
        place = (step, member.generation)
        if (held, generation) != place or (self._on_disk == place and not last):
            return
        self._snapshotter.pin(path)
        self._manager.send("persisting", *place, member.rank, member.world, last)
        self._agent.send("persist", self._worker_id, path, *place, last)
        self._on_disk = place

    def close(self) -> None:
        """After the present copy; the agent owns the files."""
        self._snapshotter.close()

    def _snapshot(
        self,
        member: Any,
        extras: ExtrasText,
        step: int,
        on_whole: Callable[[str], object],
        on_begun: Callable[[str], object] = lambda path: None,
        *,
        drill: Drill | None,
        overlap: bool,
        cut: bool = False,
    ) -> None:
        """Into a slot of shared memory, if there is room; on return, unless `overlap`."""
        self.settle(member)
        tensors, skeleton = self._memo.flatten(self._objects)
        rank = member.rank
        taken = self._snapshotter.take(
            step=step,
            generation=member.generation,
            rank=rank,
            world=member.world,
            tensors=tensors,
            extras=extras(skeleton),
            before_commit=(lambda: drill.check(rank, step, "snapshot")) if drill else None,
            still=self._still_names(tensors) if overlap else frozenset(),
            on_begun=on_begun,
            on_whole=on_whole,
            cut=cut,
        )
        if taken.path is None:
            self._skipped(member, taken.reason)

    def _hold(self, member: Any, step: int, path: str) -> None:
        self.memory_step = step
        self._newest_slot = (step, member.generation, path)

    def _still_names(self, tensors: Mapping[str, Any]) -> frozenset[str]:
        """Looked up anew only when the tensors are not those of the last time."""
        if self._config.staging == "sync":
            return frozenset()
        if self._still[0] is not tensors:
            self._still = (tensors, still_names(self._objects, tensors))
        return self._still[1]

    def _skipped(self, member: Any, reason: str) -> None:
        self._skips += 1
        if self._skips & (self._skips - 1) == 0:  # 1, 2, 4, 8, ...: said, never flooding
            data = {"reason": reason, "skips": self._skips}
            tell(self._manager, member, "ckpt.skipped", data, "warning")

    def _warn_of_moving(self, member: Any) -> None:
        """Say once that snapshots hold up the loop from now on, and why."""
        reason = self._snapshotter.moving
        if reason and reason != self._moving:
            self._moving = reason
            data = {"staging": "sync", "reason": reason}
            tell(self._manager, member, "ckpt.staging", data, "warning")
