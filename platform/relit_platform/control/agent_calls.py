"""The AgentPort over Ray: named actors, short timeouts, errors of the agents as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import list_named_actors

from relit_platform.control.ports import AgentError
from relit_platform.facts import Endpoint, Heartbeat, NodeInventory, Tier
from relit_storage.errors import RelitError

NAMESPACE = "relit"
CALL_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 60.0  # publish and drop wait for the disk
SEAL_TIMEOUT_S = 25.0  # an agent gives a worker 20 s to die


class RayAgents:
    """Thread-safe. Looks an actor up again after each failure, for Ray may have re-created it."""

    def __init__(self, run_id: str) -> None:
        self._prefix = f"agent/{run_id}/"
        self._handles: dict[str, Any] = {}

    def nodes(self) -> tuple[str, ...]:
        """See AgentPort.nodes. Raises AgentError when Ray's head does not answer."""
        try:
            named = list_named_actors(all_namespaces=True)
        except RayError as error:
            raise AgentError(f"the cluster does not list its actors: {error}") from error
        ours = [str(a["name"]) for a in named if a["namespace"] == NAMESPACE]
        return tuple(
            sorted(n.removeprefix(self._prefix) for n in ours if n.startswith(self._prefix))
        )

    def lost_nodes(self) -> frozenset[str]:
        """See AgentPort.lost_nodes. Raises AgentError when Ray's head does not answer."""
        try:
            return frozenset(str(n["NodeID"]) for n in ray.nodes() if not n["Alive"])
        except (RayError, OSError) as error:
            raise AgentError(f"the cluster does not list its nodes: {error}") from error

    def inventory(self, node_id: str) -> NodeInventory:
        """See AgentPort.inventory."""
        inventory: NodeInventory = self._call(node_id, CALL_TIMEOUT_S, "inventory")
        return inventory

    def rows_beside(self, node_id: str, path: str) -> tuple[dict[str, Any], ...]:
        """See AgentPort.rows_beside."""
        rows: tuple[dict[str, Any], ...] = self._call(node_id, CALL_TIMEOUT_S, "rows_beside", path)
        return rows

    def heartbeats(self, node_id: str) -> Sequence[Heartbeat]:
        """See AgentPort.heartbeats."""
        beats: Sequence[Heartbeat] = self._call(node_id, CALL_TIMEOUT_S, "heartbeats")
        return beats

    def publish(self, node_id: str, step: int, generation: int, manifest: bytes) -> None:
        """See AgentPort.publish."""
        self._call(node_id, WRITE_TIMEOUT_S, "publish", step, generation, manifest)

    def persist(
        self, node_id: str, worker_id: str, path: str, step: int, generation: int, epoch: int
    ) -> None:
        """See AgentPort.persist."""
        # Asked for when ranks have died: nothing may hold it back.
        wanted = (worker_id, path, step, generation, True, epoch)
        self._call(node_id, CALL_TIMEOUT_S, "persist", *wanted)

    def upload(self, node_id: str, step: int, generation: int, ranks: Sequence[int]) -> None:
        """See AgentPort.upload."""
        self._call(node_id, CALL_TIMEOUT_S, "upload", step, generation, list(ranks))

    def seal(self, node_id: str, epoch: int, generation: int) -> None:
        """See AgentPort.seal."""
        self._call(node_id, SEAL_TIMEOUT_S, "seal", epoch, generation)

    def listen(self, node_id: str, secret: bytes, epoch: int) -> Endpoint:
        """See AgentPort.listen."""
        host, port = self._call(node_id, CALL_TIMEOUT_S, "listen", secret, epoch)
        return str(host), int(port)

    def set_peer(self, node_id: str, peer: str, endpoint: Endpoint | None, epoch: int) -> None:
        """See AgentPort.set_peer."""
        self._call(node_id, CALL_TIMEOUT_S, "set_peer", peer, endpoint, epoch)

    def drop(self, node_id: str, steps: Sequence[tuple[int, int]], tier: Tier) -> None:
        """See AgentPort.drop."""
        self._call(node_id, WRITE_TIMEOUT_S, "drop", list(steps), tier)

    def set_stop(self, node_id: str, number: int) -> None:
        """See AgentPort.set_stop."""
        self._call(node_id, CALL_TIMEOUT_S, "set_stop", number)

    def _call(self, node_id: str, timeout_s: float, method: str, *args: Any) -> Any:
        try:
            handle = self._handles.get(node_id)
            if handle is None:
                handle = ray.get_actor(self._prefix + node_id, namespace=NAMESPACE)
                self._handles[node_id] = handle
            return ray.get(getattr(handle, method).remote(*args), timeout=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, RelitError):
                raise error.cause from error
            raise AgentError(f"{method} on node {node_id[:8]}: {error}") from error
        except (RayError, GetTimeoutError, ValueError) as error:
            self._handles.pop(node_id, None)
            raise AgentError(f"{method} on node {node_id[:8]}: {error}") from error
