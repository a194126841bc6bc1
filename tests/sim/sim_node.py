"""A node: its agent, and the files that outlive the agent. Speaks the AgentPort's verbs.

What a real agent does with slots, disk and processes is done here with dictionaries; the rules
that the manager relies on (create-once manifests, fences, refusing to publish what is not held,
never dropping the newest step) are the same, and its answers come late, twice, or are lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from sim_clock import Clock
from sim_state import checksum

from relit_platform.control.ports import AgentError
from relit_platform.errors import UsageError
from relit_platform.facts import (
    Fact,
    Heartbeat,
    NodeInventory,
    ShardFailed,
    ShardPersisted,
    ShardUploaded,
    SlotInfo,
    WorkerExited,
)
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.errors import CommitConflictError, FencedError, ManifestError, StoreError
from relit_storage.run.layout import extras_key, manifest_key, shard_key
from relit_storage.stores.protocol import ObjectStore

if TYPE_CHECKING:
    from sim_rank import SimRank

HEADER_BYTES, IMAGE_BYTES = 64, 72
SLOTS = 3
Place = tuple[int, int, int]  # step, generation, rank


@dataclass(slots=True)
class SimSlot:
    worker_id: str
    step: int
    generation: int
    rank: int
    world: int
    content: int
    pinned: bool = False

    @property
    def path(self) -> str:
        return f"{self.worker_id}/{self.step}/{self.generation}"


@dataclass(slots=True)
class SimNode:
    """alive: whether the agent's process runs; deliver hands a fact to the manager or raises."""

    node_id: str
    clock: Clock
    store: ObjectStore
    deliver: Callable[[object], None]
    alive: bool = True
    cut_until_s: float = 0.0
    epoch: int = 0
    generation: int = 0
    slots: list[SimSlot] = field(default_factory=list)
    disk: dict[Place, tuple[int, int, int]] = field(default_factory=dict)  # content, sum, world
    manifests: dict[tuple[int, int], bytes] = field(default_factory=dict)
    workers: dict[str, SimRank] = field(default_factory=dict)
    life: int = 0

    # ---- the agent's process ----

    def kill_agent(self) -> None:
        """Whatever it had not reported is lost; files stay."""
        self.alive = False
        self.life += 1
        self.clock.after(self.clock.between(0.3, 2.0), self._restart)

    def _restart(self) -> None:
        self.alive = True
        data = {"node_id": self.node_id, "pid": self.life}
        self.report(Fact(kind="agent.started", at_s=self.clock.now, src=self.node_id, data=data))
        for worker in list(self.workers.values()):
            if not worker.alive:
                self._exited(worker)
        for slot in [s for s in self.slots if s.pinned]:
            self._persist_soon(slot)

    def reach(self) -> None:
        if not self.alive or self.clock.now < self.cut_until_s:
            raise AgentError(f"{self.node_id} does not answer")

    def report(self, fact: object) -> None:
        """Deliver until the manager has it; sometimes twice; not at all if the agent dies."""
        life = self.life

        def attempt() -> None:
            if life != self.life:
                return
            try:
                if self.clock.now < self.cut_until_s:
                    raise ConnectionError
                self.deliver(fact)
                again = self.clock.chance(0.1)
            except ConnectionError:
                again = True
            if again:
                self.clock.after(self.clock.between(0.1, 0.5), attempt)

        self.clock.after(self.clock.between(0.001, 0.05), attempt)

    def worker_died(self, worker: SimRank) -> None:
        if self.alive:
            self.clock.after(self.clock.between(0.001, 0.05), lambda: self._exited(worker))

    def _exited(self, worker: SimRank) -> None:
        if not self.alive or self.workers.pop(worker.worker_id, None) is None:
            return
        self.report(
            WorkerExited(
                worker_id=worker.worker_id,
                node_id=self.node_id,
                pid=worker.number,
                at_s=worker.died_at_s,
                last_step=worker.step,
                last_phase=worker.phase,
                rank=worker.rank if worker.generation else -1,
                generation=worker.generation,
            )
        )

    # ---- slots and persisting ----

    def begin_slot(self, slot: SimSlot) -> bool:
        """Take a free slot of the worker that is not its newest; False if none is free."""
        own = [s for s in self.slots if s.worker_id == slot.worker_id]
        if len(own) >= SLOTS:
            free = [s for s in own[:-1] if not s.pinned]
            if not free:
                return False
            self.slots.remove(free[0])
        return True

    def complete_slot(self, slot: SimSlot) -> None:
        """The state word is flipped; a pinned slot is persisted whoever lives."""
        self.slots.append(slot)
        if slot.pinned:
            self._persist_soon(slot)

    def _persist_soon(self, slot: SimSlot) -> None:
        life = self.life
        self.clock.after(self.clock.between(0.05, 0.8), partial(self._if_alive, life, slot))

    def _if_alive(self, life: int, slot: SimSlot) -> None:
        if life == self.life:
            self._persist(slot)

    def _persist(self, slot: SimSlot) -> None:
        if not slot.pinned or not self.alive:
            return
        slot.pinned = False
        place = (slot.step, slot.generation, slot.rank)
        if slot.generation < self.generation or self.clock.chance(0.03):
            self.report(self._failure(place, "disk", "fenced or disk full"))
            return
        self.disk[place] = (slot.content, slot.content, slot.world)
        self.report(self._record(place))

    def _record(self, place: Place) -> ShardPersisted:
        step, generation, rank = place
        _, total, world = self.disk[place]
        tensor = {
            "name": f"w{rank}",
            "dtype": "F32",
            "shape": [2],
            "byte_range": [HEADER_BYTES, IMAGE_BYTES],
        }
        return ShardPersisted(
            step=step,
            generation=generation,
            rank=rank,
            world=world,
            node_id=self.node_id,
            file=shard_key(*place),
            num_bytes=IMAGE_BYTES,
            chunk_bytes=1 << 20,
            checksums=(checksum(total),),
            extras_file=extras_key(*place),
            extras_bytes=2,
            extras_checksum=checksum(0),
            tensors=(tensor,),
            seconds=0.1,
            at_s=float(step),
        )

    def _failure(self, place: Place, tier: Any, reason: str) -> ShardFailed:
        return ShardFailed(
            step=place[0],
            generation=place[1],
            rank=place[2],
            node_id=self.node_id,
            tier=tier,
            reason=reason,
            at_s=self.clock.now,
        )

    # ---- AgentPort ----

    def inventory(self) -> NodeInventory:
        memory = tuple(
            SlotInfo(
                path=s.path,
                worker_id=s.worker_id,
                node_id=self.node_id,
                generation=s.generation,
                step=s.step,
                rank=s.rank,
                world=s.world,
                image_bytes=IMAGE_BYTES,
                pinned=s.pinned,
            )
            for s in self.slots
        )
        served = [s.generation for s in self.slots] + [g for _, g, _ in self.disk]
        return NodeInventory(
            node_id=self.node_id,
            memory=memory,
            disk=tuple(self._record(place) for place in self.disk),
            manifests=tuple((s, g, raw) for (s, g), raw in self.manifests.items()),
            fence=max([self.generation, *served]),
            disk_root=self.node_id,
        )

    def heartbeats(self) -> list[Heartbeat]:
        return [
            Heartbeat(
                worker_id=w.worker_id,
                pid=w.number,
                rank=w.rank,
                generation=w.generation,
                step=w.step,
                phase=w.phase,
                at_s=self.clock.now,
            )
            for w in self.workers.values()
            if w.alive
        ]

    def publish(self, step: int, generation: int, raw: bytes) -> None:
        if generation < self.generation:
            raise FencedError(what="generation", ours=generation, newest=self.generation)
        if self.manifests.get((step, generation), raw) != raw:
            raise CommitConflictError(step=step, key=manifest_key(step, generation))
        for entry in Manifest.from_bytes(raw).shards:
            if (step, generation, entry.rank) not in self.disk:
                raise ManifestError(file=entry.file, reason="is not held here")
        self.manifests[step, generation] = raw

    def upload(self, step: int, generation: int, ranks: list[int]) -> None:
        for rank in ranks:
            upload = partial(self._upload, (step, generation, rank), self.life)
            self.clock.after(self.clock.between(0.1, 1.5), upload)

    def _upload(self, place: Place, life: int, tries: int = 1) -> None:
        if life != self.life:
            return
        if place not in self.disk or self.disk[place][0] != self.disk[place][1]:
            self.report(self._failure(place, "object", "not on this disk"))
            return
        try:
            self.store.put(shard_key(*place), checksum(self.disk[place][0]).encode())
            self.store.put(extras_key(*place), b"{}")
        except StoreError as error:
            if tries > 5:
                self.report(self._failure(place, "object", str(error)))
                return
            self.clock.after(0.7, partial(self._upload, place, life, tries + 1))
            return
        self.report(
            ShardUploaded(
                step=place[0],
                generation=place[1],
                rank=place[2],
                node_id=self.node_id,
                seconds=0.1,
                at_s=self.clock.now,
            )
        )

    def seal(self, epoch: int, generation: int) -> None:
        if epoch < self.epoch:
            raise FencedError(what="epoch", ours=epoch, newest=self.epoch)
        self.epoch, self.generation = epoch, max(generation, self.generation)
        for worker in list(self.workers.values()):
            if worker.epoch < epoch:
                worker.kill("sealed")

    def drop(self, steps: list[tuple[int, int]], tier: str) -> None:
        for step, generation in steps:
            if (generation, step) == max(((g, s) for s, g in self.manifests), default=None):
                raise UsageError(message=f"step {step} is the newest on disk")
            self.manifests.pop((step, generation), None)
            for place in [p for p in self.disk if p[:2] == (step, generation)]:
                del self.disk[place]
