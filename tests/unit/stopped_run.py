"""A run that was stopped, without Ray: real files of a real keeper, and what a resume does to them.

Two ranks save through their snapshotters, the keeper persists and uploads, the coordinator commits;
then everything ends and shared memory is gone. `resume` is a second life on the same folders:
planned by a new coordinator, read by `load_plan`, and asked again after each refusal.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from coordinator_harness import make_config, request
from node_harness import Node
from torch import Tensor

from relit_platform.control.coordinator import Coordinator
from relit_platform.control.object_tier import ObjectTier
from relit_platform.facts import (
    Assignment,
    Dismissed,
    Endpoint,
    Fact,
    FaultReport,
    Heartbeat,
    JoinReply,
    JoinRequest,
    NodeInventory,
    RunHistory,
    Tier,
    WorkerExited,
)
from relit_platform.node.keeper import NodeKeeper
from relit_platform.node.kept_rows import rows_beside
from relit_platform.run_config import CheckpointConfig
from relit_platform.worker.restore import load_plan
from relit_platform.worker.snapshot import Snapshotter
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.errors import CorruptShardError
from relit_storage.stores.local import LocalStore

NODE, WORLD = "n1", 2
STEPS = (10, 20, 30)
ROUNDS = 12


def state_of(step: int) -> dict[str, Tensor]:
    """What every rank holds after a step."""
    source = torch.Generator().manual_seed(step)
    return {f"model.{name}": torch.randn(30, 50, generator=source) for name in "abcd"}


class OneNode:
    """The AgentPort of a single keeper in this process."""

    def __init__(self, keeper: NodeKeeper) -> None:
        self._keeper = keeper

    def nodes(self) -> tuple[str, ...]:
        return (NODE,)

    def lost_nodes(self) -> frozenset[str]:
        return frozenset()

    def inventory(self, node_id: str) -> NodeInventory:
        return self._keeper.inventory()

    def rows_beside(self, node_id: str, path: str) -> tuple[dict[str, Any], ...]:
        return rows_beside(path)

    def heartbeats(self, node_id: str) -> Sequence[Heartbeat]:
        return self._keeper.heartbeats()

    def publish(self, node_id: str, step: int, generation: int, manifest: bytes) -> None:
        self._keeper.publish(step, generation, manifest)

    def persist(
        self, node_id: str, worker_id: str, path: str, step: int, generation: int, epoch: int
    ) -> None:
        self._keeper.persist(worker_id, path, step, generation, True, epoch)

    def upload(self, node_id: str, step: int, generation: int, ranks: Sequence[int]) -> None:
        self._keeper.upload(step, generation, ranks)

    def seal(self, node_id: str, epoch: int, generation: int) -> None:
        self._keeper.seal(epoch, generation)

    def drop(self, node_id: str, steps: Sequence[tuple[int, int]], tier: Tier) -> None:
        self._keeper.drop(steps, tier)

    def set_stop(self, node_id: str, number: int) -> None:
        self._keeper.set_stop(number)

    def listen(self, node_id: str, secret: bytes, epoch: int) -> Endpoint:
        return self._keeper.peers.listen(secret, epoch)

    def set_peer(self, node_id: str, peer: str, endpoint: Endpoint | None, epoch: int) -> None:
        self._keeper.peers.set_peer(peer, endpoint, epoch)


class Life:
    """One epoch over the folders below `root`; background work runs when `settle` is called."""

    def __init__(self, root: Path, epoch: int, history: RunHistory | None = None) -> None:
        self.facts: list[object] = []
        self.queue: list[Callable[[], None]] = []
        self.shm = tempfile.mkdtemp(prefix="relit-life-", dir="/dev/shm")
        self.store = LocalStore(str(root / "store"))
        config = CheckpointConfig(
            shm_dir=self.shm,
            disk_dir=str(root / "disk"),
            chunk_bytes=4096,
            object_every_steps=20,
            disk_every_steps=10,
        )
        self.keeper = NodeKeeper(NODE, "r", config, self.store, self.facts.append, time.time)
        self.keeper.start()
        objects = ObjectTier(self.store, CommitLog(self.store), time.time)
        self.coordinator = Coordinator(
            config=replace(make_config(), checkpoint=config),
            agents=OneNode(self.keeper),
            objects=objects,
            background=self,
            clock=time.time,
            steady=time.monotonic,
            sleep=lambda seconds: None,
        )
        self.epoch = epoch
        self.coordinator.start_epoch(epoch, history)

    def submit(self, work: Callable[[], None], delay_s: float = 0.0) -> None:
        self.queue.append(work)

    def close(self) -> None:
        self.keeper.close(remove_disk=False)
        shutil.rmtree(self.shm, ignore_errors=True)

    def settle(self, done: Callable[[], bool] = lambda: True) -> None:
        """Pass facts and background work on until nothing is left and `done`."""
        deadline_s = time.monotonic() + 10.0
        while self.facts or self.queue or not done():
            assert time.monotonic() < deadline_s, self.coordinator.status()
            while self.facts:
                self.coordinator.fact(self.facts.pop(0))
            while self.queue:
                self.queue.pop(0)()
            if not done():
                time.sleep(0.001)

    def committed(self, tier: str) -> int | None:
        found: int | None = self.coordinator.status()["committed"][tier]
        return found

    def join(self, *requests: JoinRequest) -> list[JoinReply]:
        for wanted in requests:
            self.coordinator.join(wanted, 0.0)
        self.settle()
        return [self.coordinator.join(wanted, 0.0) for wanted in requests]

    def events(self, kind: str) -> list[Fact]:
        return [fact for fact in self.coordinator.drain(0).facts if fact.kind == kind]


@dataclass
class Resumed:
    """What the second life of a run came to. step 0, tensors None: it began from scratch."""

    step: int | None = None
    tier: str = ""
    tensors: dict[str, Tensor] | None = None
    verdict: str = ""
    refusals: list[dict[str, Any]] = field(default_factory=list)


def save(
    root: Path,
    steps: Sequence[int] = STEPS,
    held: Sequence[int] = (),
    rescue: bool = False,
    restores: int = 0,
) -> None:
    """The first life: each step on disk, each second one in the object tier, then the end.

    held: later steps that come into memory only. restores: so many generations begin with the
    newest of them and end before their first boundary. rescue: it is saved before all ends.
    """
    life = Life(root, epoch=1)
    node = Node.__new__(Node)  # only its child processes: the keeper wants pids it may end
    node.children = []
    try:
        snapshotters = []
        for rank in range(WORLD):
            name = f"w{rank}"
            life.keeper.hello(name, node.child(), epoch=1)
            snapshotters.append(Snapshotter(name, _opener(life.keeper, name)))
        life.join(*(request(f"w{rank}") for rank in range(WORLD)))
        for step in steps:
            _save_step(life, snapshotters, step)
        for step in held:
            _snapshot(snapshotters, step)
        for child in node.children:  # a slot outlives its rank
            child.kill()
            child.communicate()
        for number in range(restores):
            _restore_in_vain(life, number)
        if rescue:
            reason = life.coordinator.rescue()
            assert f"step {max(held)} is whole" in reason, reason
            life.settle(lambda: not life.coordinator.status()["saving"])
    finally:
        for child in node.children:
            child.kill()
            child.communicate()
        life.close()


def _restore_in_vain(life: Life, number: int) -> None:
    names = [f"again-{number}-{rank}" for rank in range(WORLD)]
    life.settle(lambda: {f.data["worker_id"] for f in life.events("worker.exited")} >= {"w0", "w1"})
    replies = life.join(*(request(name) for name in names))
    assert [isinstance(reply, Assignment) for reply in replies] == [True] * WORLD, replies
    for name in names:
        life.facts.append(
            WorkerExited(
                worker_id=name, node_id=NODE, pid=1, at_s=time.time(), last_step=0, last_phase=""
            )
        )
    life.settle()


def _opener(keeper: NodeKeeper, name: str) -> Callable[[int, int, int], Sequence[str]]:
    return lambda count, image, extras: keeper.open_slots(name, count, image, extras)


def _save_step(life: Life, snapshotters: Sequence[Snapshotter], step: int) -> None:
    for rank, path in enumerate(_snapshot(snapshotters, step)):
        snapshotters[rank].pin(path)
        life.coordinator.persisting(step, 1, rank, WORLD)
        life.keeper.persist(f"w{rank}", path, step, 1)
    life.settle(lambda: life.committed("disk") == step)
    if step % 20 == 0:
        life.settle(lambda: life.committed("object") == step)


def _snapshot(snapshotters: Sequence[Snapshotter], step: int) -> list[str]:
    """Every rank's share in shared memory; the slots' paths."""
    paths = []
    for rank, snapshotter in enumerate(snapshotters):
        taken = snapshotter.take(
            step=step,
            generation=1,
            rank=rank,
            world=WORLD,
            tensors=state_of(step),
            extras={"step": step, "rank": rank},
        )
        assert taken.path is not None, taken.reason
        paths.append(taken.path)
    return paths


def resume(root: Path, history: RunHistory | None = None) -> Resumed:
    """The second life, until two ranks hold a state or the run has its verdict."""
    life = Life(root, epoch=2, history=history)
    try:
        return _resume(life)
    finally:
        life.close()


def _resume(life: Life) -> Resumed:
    wanted = [request(name, epoch=life.epoch) for name in ("a", "b")]
    result = Resumed()
    for _ in range(ROUNDS):
        replies = life.join(*wanted)
        if all(isinstance(reply, Dismissed) for reply in replies):
            result.verdict = str(life.coordinator.status()["verdict"])
            return result
        loaded = [_load(life, reply, result) for reply in replies]
        if None not in loaded:
            formed = life.events("generation.formed")[-1]
            result.refusals += formed.data["refusals"]
            return result
        wanted = [
            replace(before, rank=reply.rank, generation=reply.generation, fault=_fault(result))
            for before, reply in zip(wanted, replies, strict=True)
            if isinstance(reply, Assignment)
        ]
    raise AssertionError(f"no end after {ROUNDS} rounds: {result}")


def _load(life: Life, reply: JoinReply, result: Resumed) -> int | None:
    """The step that this rank now holds, or None: its checkpoint was refused."""
    assert isinstance(reply, Assignment), reply
    plan = reply.source.plan
    result.step, result.tier = reply.source.step, plan.tier if plan else ""
    if plan is None:
        return result.step
    try:
        result.tensors, _ = load_plan(plan, life.store)
    except CorruptShardError as corrupt:
        result.refusals.append(dict(corrupt.fields))
        return None
    return result.step


def _fault(result: Resumed) -> FaultReport:
    refused = result.refusals[-1]
    return FaultReport(
        kind="restore_refused", message=str(refused), at_s=time.time(), refused=refused
    )


def damage(path: Path, how: str, seed: int = 0) -> None:
    """Delete a file, cut half of it off, or invert one bit at a place that the seed decides."""
    data = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        place = random.Random(f"{path.name} {seed}").randrange(len(data))
        data[place] ^= 1 << seed % 8
        path.write_bytes(data)
