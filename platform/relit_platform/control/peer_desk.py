"""Tells the agents which node keeps their ranks' snapshots, whenever nodes come and go.

The run's secret is made here and lies nowhere else but in the memory of this process and of the
agents: a manager that is re-created makes another one and tells it. With fewer than two nodes
nobody is asked to listen.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

from relit_platform.control.ports import AgentError, AgentPort, BackgroundPort
from relit_platform.facts import Endpoint
from relit_platform.machines.peer_ring import peers_of
from relit_platform.run_config import RunConfig
from relit_storage.errors import RelitError

ARRANGE_EVERY_S = 10.0
GRACE_S = 15.0  # an agent that was killed is back by then
SECRET_BYTES = 32


class PeerDesk:
    """`tick` and `soon` never block; what they start runs in the background, one at a time.

    epoch() is the present one, 0 as long as there is none. say makes a fact of a ring that changed.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        agents: AgentPort,
        background: BackgroundPort,
        epoch: Callable[[], int],
        say: Callable[[str, dict[str, Any]], None],
        steady: Callable[[], float],
    ) -> None:
        self._on = config.checkpoint.peer != "off"
        self._agents = agents
        self._background = background
        self._epoch = epoch
        self._say = say
        self._steady = steady
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._looked_s = steady()
        self._lock = threading.Lock()
        self._busy = False
        self._again = False
        self._met: dict[str, tuple[Endpoint, float]] = {}
        self._ring: dict[str, str] = {}
        self._still: set[str] = set()  # have heard of this manager that they give to nobody

    def tick(self) -> None:
        """Time has passed: look at the nodes now and then."""
        if self._steady() - self._looked_s >= ARRANGE_EVERY_S:
            self.soon()

    def soon(self) -> None:
        """An agent has come: look at the nodes at once."""
        self._looked_s = self._steady()
        with self._lock:
            if not self._on or self._busy:
                self._again = self._busy
                return
            self._busy = True
        self._background.submit(self._work)

    def listen(self, node: str, epoch: int) -> None:
        """Have this agent answer the others, before its inventory is asked for: a restore may
        need what it holds on another node. Blocks for the agent; one that cannot is let be.
        """
        if self._on:
            self._endpoint(node, epoch)

    # ---- in the background ----

    def _work(self) -> None:
        try:
            epoch = self._epoch()
            if epoch:
                self._arrange(epoch)
        finally:
            with self._lock:
                self._busy, again, self._again = False, self._again, False
        if again:
            self.soon()

    def _arrange(self, epoch: int) -> None:
        try:
            nodes = self._agents.nodes()
        except AgentError:
            return  # the next round asks again
        self._met = {node: met for node, met in self._met.items() if node in nodes}
        found = {node: self._endpoint(node, epoch) for node in nodes} if len(nodes) > 1 else {}
        endpoints = {node: endpoint for node, endpoint in found.items() if endpoint is not None}
        ring = peers_of(endpoints)
        self._still &= set(nodes)
        for node in nodes:
            if node in ring:
                self._still.discard(node)
                self._tell(node, ring[node], endpoints[ring[node]], epoch)
            elif node not in self._still and self._tell(node, "", None, epoch):
                # Also one that this manager never had in a ring: an earlier manager may have.
                self._still.add(node)
        if ring != self._ring:
            self._ring = ring
            self._say("peer.ring", {"ring": ring})

    def _endpoint(self, node: str, epoch: int) -> Endpoint | None:
        """Where it listens; where it did lately if it does not answer just now."""
        try:
            endpoint = self._agents.listen(node, self._secret, epoch)
        except (AgentError, RelitError):
            known = self._met.get(node)
            return known[0] if known and self._steady() - known[1] < GRACE_S else None
        self._met[node] = (endpoint, self._steady())
        return endpoint

    def _tell(self, node: str, peer: str, endpoint: Endpoint | None, epoch: int) -> bool:
        """False if it did not hear it: then it is told again with the next round."""
        try:
            self._agents.set_peer(node, peer, endpoint, epoch)
        except (AgentError, RelitError):
            return False
        return True
