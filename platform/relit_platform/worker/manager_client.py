"""A rank's view of the manager and of its node's agent: calls that outlive their restarts.

The manager and the agents are re-created by Ray after a SIGKILL, under the same name. A call that
meets the gap is repeated until `patience_s` has passed; only then is the run's controller
considered gone and the error raised, which ends the worker and leaves recovery to the supervisor.
Calls that carry facts (rows, persist requests) are fire-and-forget: whoever they were for
finds out again from the slots or asks for the rows again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from relit_platform.facts import Fact, JoinReply, JoinRequest

NAMESPACE = "relit"
T = TypeVar("T")
Level = Literal["info", "warning", "error"]


def manager_name(run_id: str) -> str:
    """The named actor of a run's CheckpointManager."""
    return f"manager/{run_id}"


class ActorLink:
    """One named actor, looked up again whenever a call meets a dead or missing one.

    `send` may be called by a second thread at the same time.
    """

    def __init__(self, find: Callable[[], Any], patience_s: float) -> None:
        self._find = find
        self._patience_s = patience_s
        self._handle: Any = None

    def call(self, method: str, *args: Any, timeout_s: float = 30.0, **kwargs: Any) -> Any:
        """Call and wait; repeats over restarts. Raises the last error after patience_s."""
        deadline_s = time.monotonic() + self._patience_s
        pause_s = 0.05
        while True:
            try:
                ref = getattr(self._actor(), method).remote(*args, **kwargs)
                return ray.get(ref, timeout=timeout_s)
            except (RayActorError, GetTimeoutError, ValueError, RayError) as error:
                if isinstance(error, ray.exceptions.RayTaskError):
                    raise
                self._handle = None
                if time.monotonic() >= deadline_s:
                    raise
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.5)

    def send(self, method: str, *args: Any, **kwargs: Any) -> Any | None:
        """Call without waiting. Returns the reference, or None if the actor is away."""
        try:
            return getattr(self._actor(), method).remote(*args, **kwargs)
        except (RayActorError, ValueError, RayError):
            self._handle = None
            return None

    def answered(self, ref: Any) -> tuple[bool, Any]:
        """Whether what `send` returned is over, without waiting, and its answer, None if it failed.

        Some 100 us.
        """
        try:
            done, _ = ray.wait([ref], timeout=0, fetch_local=False)
            return (True, ray.get(ref)) if done else (False, None)
        except RayError:
            return True, None

    def _actor(self) -> Any:
        handle = self._handle  # read once: another thread may forget it
        if handle is None:
            handle = self._handle = self._find()
        return handle


def tell(
    manager: ActorLink, member: Any, kind: str, data: dict[str, Any], level: Level = "info"
) -> None:
    """Send the manager an event of this rank, at its step and generation; waits for nothing."""
    manager.send(
        "fact",
        Fact(
            kind=kind,
            at_s=time.time(),
            src=f"rank:{member.rank}",
            generation=member.generation,
            step=member.step,
            level=level,
            data=data,
        ),
    )


class ManagerClient:
    """The manager's calls that a rank makes."""

    def __init__(self, run_id: str, patience_s: float = 120.0) -> None:
        name = manager_name(run_id)
        self.link = ActorLink(lambda: ray.get_actor(name, namespace=NAMESPACE), patience_s)

    def join(self, request: JoinRequest, wait_s: float = 5.0) -> JoinReply:
        """One long poll: answers within about wait_s, with Waiting if nothing was decided."""
        reply: JoinReply = self.link.call("join", request, wait_s, timeout_s=wait_s + 30.0)
        return reply

    def lost(self, generation: int, wait_s: float = 1.0) -> bool:
        """True if that generation is known to be over; False too if nobody answers in time."""
        ref = self.link.send("lost", generation)
        try:
            return ref is not None and bool(ray.get(ref, timeout=wait_s))
        except RayError:
            return False
