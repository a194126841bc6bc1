"""Members whose node is no more.

The end of a process is reported by its node's agent, which ends with its node. Peers that were in
a collective with the dead come back and say so; where nobody was, all ranks on one lost node, say,
and the spares on another, the run would wait for ever. So Ray is asked now and then which nodes it
has declared dead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from relit_platform.control.ports import AgentError, AgentPort
from relit_platform.facts import WorkerExited

LOOK_EVERY_S = 5.0
FORMING_EVERY_S = 0.5  # a new worker comes soon after Ray has given the old one's node up


class NodeWatch:
    """For one run. `due` under the caller's lock; `ended` blocks for a call. clock is Unix time."""

    def __init__(
        self, agents: AgentPort, clock: Callable[[], float], steady: Callable[[], float]
    ) -> None:
        self._agents = agents
        self._clock = clock
        self._steady = steady
        self._looked_s = float("-inf")

    def due(self, *, forming: bool) -> bool:
        """True once in a while; forming: members are known to be missing."""
        now_s = self._steady()
        if now_s - self._looked_s < (FORMING_EVERY_S if forming else LOOK_EVERY_S):
            return False
        self._looked_s = now_s
        return True

    def ended(self, members: Iterable[Mapping[str, Any]], generation: int) -> list[WorkerExited]:
        """Those of a generation's members that went with their nodes; none if Ray is away.

        members: as generation.formed lists them.
        """
        try:
            lost = self._agents.lost_nodes()
        except AgentError:
            return []
        return [
            WorkerExited(
                worker_id=str(member["worker_id"]),
                node_id=str(member["node_id"]),
                pid=int(member["pid"]),
                at_s=self._clock(),
                last_step=0,
                last_phase="",
                rank=int(member["rank"]),
                generation=generation,
                node_lost=True,
            )
            for member in members
            if member["node_id"] in lost
        ]
