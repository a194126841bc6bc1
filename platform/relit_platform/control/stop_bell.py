"""Tells every node that the run is to stop; the ranks see it at their next boundary."""

from __future__ import annotations

import contextlib
import threading

from relit_platform.control.ports import AgentError, AgentPort
from relit_platform.errors import PlatformError

STOP_NUMBER = 1


class StopBell:
    """For one run. One rank that hears of it is enough, so no agent that hangs may keep it from
    the others; what fails is done when the supervisor asks again, which it does all the time.
    """

    def __init__(self, agents: AgentPort) -> None:
        self._agents = agents
        self._ringing = threading.Lock()

    def ring(self) -> None:
        """Raise the request on every node's control page; blocks for each of them in turn.

        Returns at once while another thread is at it.
        """
        if not self._ringing.acquire(blocking=False):
            return
        try:
            for node in self._nodes():
                with contextlib.suppress(AgentError, PlatformError):
                    self._agents.set_stop(node, STOP_NUMBER)
        finally:
            self._ringing.release()

    def _nodes(self) -> tuple[str, ...]:
        try:
            return tuple(self._agents.nodes())
        except (AgentError, PlatformError):
            return ()
