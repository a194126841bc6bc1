"""The seams of the coordinator: what it asks of agents, of the object tier, and of threads.

Real ones speak Ray (manager.py) and a store (object_tier.py); tests and the simulator bring
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from relit_platform.facts import Endpoint, Heartbeat, NodeInventory, Tier
from relit_platform.machines.restore import ObjectCommit


class AgentError(Exception):
    """An agent did not answer in time or is not there. The call may be repeated."""


class AgentPort(Protocol):
    """Calls to the node agents of this run. Each may block up to its timeout, may be repeated,
    and raises AgentError when the agent cannot be reached; errors of the agent itself
    (FencedError, CommitConflictError, ...) come through as they are.
    """

    def nodes(self) -> tuple[str, ...]:
        """Node ids that have an agent now."""
        ...

    def lost_nodes(self) -> frozenset[str]:
        """Nodes of the cluster that Ray has declared dead."""
        ...

    def inventory(self, node_id: str) -> NodeInventory:
        """What this node could contribute to a restore."""
        ...

    def rows_beside(self, node_id: str, path: str) -> tuple[dict[str, Any], ...]:
        """The metric rows beside a snapshot in this node's memory."""
        ...

    def heartbeats(self, node_id: str) -> Sequence[Heartbeat]:
        """Last sign of life of each worker process that is alive on this node."""
        ...

    def publish(self, node_id: str, step: int, generation: int, manifest: bytes) -> None:
        """Create the manifest on the node's disk tier, exclusively, synced."""
        ...

    def persist(
        self, node_id: str, worker_id: str, path: str, step: int, generation: int, epoch: int
    ) -> None:
        """Queue a slot for the node's disk, as its rank would; answers come as facts. The manager
        of this epoch vouches that it is on the line, should its generation be over.
        """
        ...

    def upload(self, node_id: str, step: int, generation: int, ranks: Sequence[int]) -> None:
        """Queue the upload of these ranks' shards; answers come as facts."""
        ...

    def seal(self, node_id: str, epoch: int, generation: int) -> None:
        """End all workers of older epochs and refuse older generations from now on."""
        ...

    def listen(self, node_id: str, secret: bytes, epoch: int) -> Endpoint:
        """Have the agent answer those of other nodes that know the secret; where it listens."""
        ...

    def set_peer(self, node_id: str, peer: str, endpoint: Endpoint | None, epoch: int) -> None:
        """Have the agent copy its ranks' snapshots to node `peer`; endpoint None: to none."""
        ...

    def drop(self, node_id: str, steps: Sequence[tuple[int, int]], tier: Tier) -> None:
        """Delete (step, generation) from a tier of this node, manifest first."""
        ...

    def set_stop(self, node_id: str, number: int) -> None:
        """Raise the stop request on the node's control page."""
        ...


class ObjectPort(Protocol):
    """The object tier's part of a commit. Blocks; raises StorageError or a subclass."""

    def commit(self, epoch: int, step: int, generation: int, manifest: bytes) -> None:
        """Write the manifest, then the next slot of the commit log. Repeating it is harmless."""
        ...

    def commits(self) -> Sequence[ObjectCommit]:
        """Commits in force, newest first, with their manifests (None: unreadable, and why)."""
        ...

    def retire(self, epoch: int, step: int, generation: int) -> None:
        """Take a commit out of force, then delete its files."""
        ...

    def pins(self) -> frozenset[int]:
        """Steps that retention leaves alone."""
        ...

    def open_epoch(self, epoch: int) -> int:
        """Fence older epochs off the log; returns the highest generation found in it."""
        ...


class BackgroundPort(Protocol):
    """Runs slow work somewhere else than under the coordinator's lock."""

    def submit(self, work: Callable[[], None], delay_s: float = 0.0) -> None:
        """Run `work` once, after `delay_s`. Bounded: refuses with OverflowError when full."""
        ...

    def close(self) -> None:
        """Start nothing new; does not wait for what runs."""
        ...
