"""A coordinator over agents in memory, a real commit log, and a clock moved by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from relit_platform.control.coordinator import Coordinator
from relit_platform.control.object_tier import ObjectTier
from relit_platform.control.ports import AgentError
from relit_platform.facts import (
    Drained,
    Endpoint,
    Fact,
    Heartbeat,
    JoinReply,
    JoinRequest,
    NodeInventory,
    RowBatch,
    WorkerExited,
)
from relit_platform.run_config import CheckpointConfig, RecoveryConfig, RunConfig, ScalingConfig
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.errors import CorruptShardError
from relit_storage.stores.memory import MemoryStore

NODE = "n1"


class FakeAgents:
    """Nodes that answer at once; every call is written down.

    away: nodes that do not answer. deaf: those that tell what they hold, and do nothing.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.stock: dict[str, NodeInventory] = {NODE: empty_inventory(NODE)}
        self.beats: dict[str, list[Heartbeat]] = {}
        self.away: set[str] = set()
        self.rows: dict[str, tuple[dict[str, Any], ...]] = {}  # by slot
        self.deaf: set[str] = set()
        self.lost: set[str] = set()

    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted(self.stock))

    def lost_nodes(self) -> frozenset[str]:
        return frozenset(self.lost)

    def inventory(self, node_id: str) -> NodeInventory:
        self._note(node_id, "inventory")
        return self.stock[node_id]

    def rows_beside(self, node_id: str, path: str) -> tuple[dict[str, Any], ...]:
        self._note(node_id, "rows_beside", path)
        if path not in self.rows:
            raise CorruptShardError(file=path, reason="holds nothing")
        return self.rows[path]

    def heartbeats(self, node_id: str) -> Sequence[Heartbeat]:
        self._note(node_id, "heartbeats")
        return self.beats.get(node_id, [])

    def publish(self, node_id: str, step: int, generation: int, manifest: bytes) -> None:
        self._note(node_id, "publish", step, generation, manifest)

    def persist(
        self, node_id: str, worker_id: str, path: str, step: int, generation: int, epoch: int
    ) -> None:
        self._note(node_id, "persist", worker_id, path, step, generation, epoch)

    def upload(self, node_id: str, step: int, generation: int, ranks: Sequence[int]) -> None:
        self._note(node_id, "upload", step, generation, tuple(ranks))

    def seal(self, node_id: str, epoch: int, generation: int) -> None:
        self._note(node_id, "seal", epoch, generation)

    def drop(self, node_id: str, steps: Sequence[tuple[int, int]], tier: str) -> None:
        self._note(node_id, "drop", tuple(steps), tier)

    def set_stop(self, node_id: str, number: int) -> None:
        self._note(node_id, "set_stop", number)

    def listen(self, node_id: str, secret: bytes, epoch: int) -> Endpoint:
        self._note(node_id, "listen", epoch)
        return (node_id, 1)

    def set_peer(self, node_id: str, peer: str, endpoint: Endpoint | None, epoch: int) -> None:
        self._note(node_id, "set_peer", peer, endpoint, epoch)

    def named(self, verb: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[1] == verb]

    def _note(self, node_id: str, verb: str, *args: Any) -> None:
        if node_id in self.away or (node_id in self.deaf and verb != "inventory"):
            raise AgentError(f"{node_id} does not answer")
        self.calls.append((node_id, verb, *args))


class Bench:
    """Background work is queued until `work` runs it, as deterministic as the rest."""

    def __init__(self, **config: Any) -> None:
        self.now = 1000.0
        self.set_by_s = 0.0
        self.queue: list[Callable[[], None]] = []
        self.agents = FakeAgents()
        self.store = MemoryStore()
        self.log = CommitLog(self.store)
        self.config = make_config(**config)
        self.coordinator = self.again()

    def again(self) -> Coordinator:
        """A coordinator as after the death of its process."""
        self.queue.clear()
        self.coordinator = Coordinator(
            config=self.config,
            agents=self.agents,
            objects=ObjectTier(self.store, self.log, lambda: self.now),
            background=self,
            clock=lambda: self.now,
            steady=lambda: self.now - self.set_by_s,
            sleep=self.sleep,
        )
        return self.coordinator

    def submit(self, work: Callable[[], None], delay_s: float = 0.0) -> None:
        self.queue.append(work)

    def close(self) -> None:
        self.queue.clear()

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def set_clock(self, by_s: float) -> None:
        """Somebody sets the clock; no time passes."""
        self.now += by_s
        self.set_by_s += by_s

    def work(self) -> Bench:
        for _ in range(100):
            if not self.queue:
                return self
            self.queue.pop(0)()
        raise AssertionError("background work never ends")

    def join(self, worker: str, rank: int | None = None, gen: int = 0, **k: Any) -> JoinReply:
        """One poll, and what it asks for in the background, and the answer after that."""
        wanted = request(worker, rank, gen, **k)
        reply = self.coordinator.join(wanted, 0.0)
        if self.queue:
            self.work()
            reply = self.coordinator.join(wanted, 0.0)
        return reply

    def start(self, *workers: str) -> Bench:
        """Epoch 1 and generation 1 with these workers."""
        self.coordinator.start_epoch(1)
        for worker in workers:
            self.join(worker)
        return self

    def gone(self, worker: str, last_step: int = 0) -> None:
        self.coordinator.fact(
            WorkerExited(
                worker_id=worker,
                node_id=NODE,
                pid=1,
                at_s=self.now,
                last_step=last_step,
                last_phase="forward",
            )
        )

    def rows(self, generation: int, *rows: tuple[int, float]) -> None:
        batch = tuple({"step": step, "loss": loss} for step, loss in rows)
        self.coordinator.rows(RowBatch(generation=generation, rank=0, rows=batch))

    def drain(self, after: int = 0) -> Drained:
        return self.coordinator.drain(after)

    def facts(self, kind: str) -> list[Fact]:
        return [fact for fact in self.drain().facts if fact.kind == kind]


def make_config(
    workers: int = 2, spares: int = 0, checkpoint: dict[str, Any] | None = None, **recovery: Any
) -> RunConfig:
    return RunConfig(
        run_id="r",
        name="r",
        experiment="e",
        store="memory://x",
        run_key="e/r",
        entry="m:f",
        code_key="",
        code_sha="",
        scaling=ScalingConfig(workers=workers, spares=spares),
        checkpoint=CheckpointConfig(**{"object_every_steps": 20, **(checkpoint or {})}),
        recovery=RecoveryConfig(**recovery),
    )


def empty_inventory(node: str, fence: int = 0) -> NodeInventory:
    return NodeInventory(node_id=node, memory=(), disk=(), manifests=(), fence=fence)


def request(
    worker: str, rank: int | None = None, gen: int = 0, step: int | None = None, epoch: int = 1
) -> JoinRequest:
    return JoinRequest(
        worker_id=worker,
        epoch=epoch,
        node_id=NODE,
        pid=1,
        rank=rank,
        generation=gen,
        step=step,
        endpoint=(worker, 1),
        at_s=0.0,
    )


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a call in a thread; its answer appears in the list."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    return thread, answers
