"""The NodeAgent: a keeper inside a detached Ray actor, one per run and node.

Found by name ("agent/<run_id>/<node_id>", namespace "relit"), bound to its node, without CPUs,
re-created by Ray as often as it dies; it then takes over its files and goes on. Created by
whoever needs it first: a worker's hello, or the manager. It does nothing on its own but report;
facts go to the manager "manager/<run_id>".
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relit_platform.facts import (
    Endpoint,
    Fact,
    Heartbeat,
    NodeInventory,
    ShardSource,
    Tier,
)
from relit_platform.node.keeper import NodeKeeper
from relit_platform.node.kept_rows import rows_beside
from relit_platform.node.outbox import Outbox
from relit_platform.node.paths import NodePaths
from relit_platform.node.standby import Seed, Standby
from relit_platform.ray_train.prestart import no_rank_env, prestart
from relit_platform.run_config import RunConfig
from relit_storage.stores.opening import open_store
from relit_storage.stores.prefixed import PrefixedStore

NAMESPACE = "relit"
DELIVERY_TIMEOUT_S = 10.0
OUTBOX_CLOSE_S = 2.0
CONCURRENCY = 16


def agent_name(run_id: str, node_id: str) -> str:
    """Name of the actor that keeps one run on one node."""
    return f"agent/{run_id}/{node_id}"


def agent_options(run_id: str, node_id: str) -> dict[str, Any]:
    """How Ray has to run it: outliving jobs and workers, ending with its node."""
    return {
        "name": agent_name(run_id, node_id),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,  # callers repeat calls themselves; see worker.manager_client
        "max_concurrency": CONCURRENCY,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        "runtime_env": {"env_vars": no_rank_env()},
    }


def get_or_create_agent(config: RunConfig, node_id: str) -> Any:
    """The handle of a run's agent on a node; does not wait for it to be up. Racing is harmless."""
    actor = ray.remote(NodeAgent)
    options = agent_options(config.run_id, node_id)
    return actor.options(**options).remote(config.to_json(), node_id)


class NodeAgent:
    """The actor's class. Every method may be repeated; see NodeKeeper for what they do and raise.

    Its constructor does work, against the rule of the house, because it is the only thing that
    Ray calls when it re-creates the actor.
    """

    def __init__(self, config: dict[str, Any], node_id: str) -> None:
        run = RunConfig.from_json(config)
        self._node_id = node_id
        self._outbox = Outbox(ManagerDelivery(run.run_id).deliver)
        self._keeper = NodeKeeper(
            node_id=node_id,
            run_id=run.run_id,
            config=run.checkpoint,
            store=PrefixedStore(open_store(run.store), run.run_key),
            report=self._outbox.put,
            clock=time.time,
            owner_pid=os.getppid(),  # the raylet: it outlives this actor's own restarts
            host=str(ray.util.get_node_ip_address()),
        )
        self._standby = Standby(
            run_id=run.run_id,
            wanted=run.recovery.standby_processes,
            ranks=lambda: {beat.pid for beat in self._keeper.heartbeats()},
            ask=functools.partial(prestart, node_id),
            say=self._no_standby,
            clock=time.monotonic,
        )
        self._outbox.start()
        self._keeper.start()
        self._standby.start()
        self._outbox.put(
            Fact(
                kind="agent.started",
                at_s=time.time(),
                src=f"agent:{node_id[:8]}",
                data={"node_id": node_id, "pid": os.getpid()},
            )
        )

    def ping(self) -> dict[str, Any]:
        """Who and where this is; also says how many facts were lost."""
        return {"node_id": self._node_id, "pid": os.getpid(), "dropped": self._outbox.dropped}

    def hello(self, worker_id: str, pid: int, epoch: int, seed: Seed | None = None) -> NodePaths:
        """A worker process introduces itself, and says how Ray has started it."""
        paths = self._keeper.hello(worker_id, pid, epoch)
        self._standby.offer(seed, epoch)
        return paths

    def open_slots(
        self, worker_id: str, count: int, image_bytes: int, extras_capacity: int
    ) -> tuple[str, ...]:
        """New snapshot slots for a worker."""
        return self._keeper.open_slots(worker_id, count, image_bytes, extras_capacity)

    def release_slots(self, worker_id: str, paths: Sequence[str]) -> None:
        """A worker gives up slots."""
        self._keeper.release_slots(worker_id, paths)

    def persist(
        self,
        worker_id: str,
        path: str,
        step: int,
        generation: int,
        last: bool = False,
        vouched: int = 0,
    ) -> None:
        """Queue a pinned slot for this node's disk; last: nothing holds it back. vouched: the epoch
        of the manager, if it is that who asks.
        """
        self._keeper.persist(worker_id, path, step, generation, last, vouched)

    def persist_growing(self, worker_id: str, path: str, step: int, generation: int) -> None:
        """Begin to write a snapshot that a worker is still copying."""
        self._keeper.persist_growing(worker_id, path, step, generation)

    def publish(self, step: int, generation: int, manifest: bytes) -> None:
        """Publish a step on this node's disk."""
        self._keeper.publish(step, generation, manifest)

    def upload(self, step: int, generation: int, ranks: Sequence[int]) -> None:
        """Queue shards for the object tier."""
        self._keeper.upload(step, generation, ranks)

    def rows_beside(self, path: str) -> tuple[dict[str, Any], ...]:
        """The metric rows that were left beside a snapshot."""
        return rows_beside(path)

    def inventory(self) -> NodeInventory:
        """What this node could give to a restore."""
        return self._keeper.inventory()

    def seal(self, epoch: int, generation: int) -> None:
        """End all workers of older epochs; blocks until they are gone. Their successors' processes
        begin to load meanwhile.
        """
        self._standby.sealed(epoch)
        self._keeper.seal(epoch, generation)

    def set_stop(self, number: int) -> None:
        """Ask all workers of this node to stop at their next boundary."""
        self._keeper.set_stop(number)

    def listen(self, secret: bytes, epoch: int) -> Endpoint:
        """Answer agents of other nodes that know this secret; where."""
        return self._keeper.peers.listen(secret, epoch)

    def set_peer(self, node_id: str, endpoint: Endpoint | None, epoch: int) -> None:
        """Copy snapshots to this node from now on."""
        self._keeper.peers.set_peer(node_id, endpoint, epoch)

    def fetch(self, source: ShardSource, step: int, generation: int, world: int) -> ShardSource:
        """Bring a shard of another node to this one; blocks for the network."""
        return self._keeper.peers.fetch(source, step, generation, world)

    def heartbeats(self) -> list[Heartbeat]:
        """Newest sign of life of each worker."""
        return self._keeper.heartbeats()

    def drop(self, steps: Sequence[tuple[int, int]], tier: Tier) -> None:
        """Delete steps, each (step, generation), from a tier."""
        self._keeper.drop(steps, tier)

    def close(self, remove_disk: bool) -> None:
        """End of the run: give back shared memory, and the disk tier if asked. Kill it after."""
        try:
            self._standby.close()
        finally:
            self._keeper.close(remove_disk)
        self._outbox.close(OUTBOX_CLOSE_S)

    def _no_standby(self, refusal: str) -> None:
        self._outbox.put(
            Fact(
                kind="standby.refused",
                at_s=time.time(),
                src=f"agent:{self._node_id[:8]}",
                level="warning",
                data={"node_id": self._node_id, "error": refusal},
            )
        )


class ManagerDelivery:
    """Hands one fact to the manager, looked up again whenever it was not there."""

    def __init__(self, run_id: str) -> None:
        self._name = f"manager/{run_id}"
        self._manager: Any = None

    def deliver(self, fact: object) -> None:
        """Blocks until the manager has it. Raises whatever Ray raises if it may not have it."""
        try:
            if self._manager is None:
                self._manager = ray.get_actor(self._name, namespace=NAMESPACE)
            ray.get(self._manager.fact.remote(fact), timeout=DELIVERY_TIMEOUT_S)
        except Exception:
            self._manager = None
            raise
