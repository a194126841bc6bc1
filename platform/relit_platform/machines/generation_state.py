"""The generation machine's vocabulary: its state, what it hears, what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from relit_platform.facts import Assignment, JoinRequest, StateSource
from relit_platform.machines.lineage import Lineage

MAX_GONE = 4096
MAX_EXCLUDED = 256
HEARD_SLACK_S = 10.0


class Phase(StrEnum):
    """Where the newest generation stands."""

    IDLE = "idle"
    FORMING = "forming"
    PLANNING = "planning"
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """A worker that asks for a place. heard_s: its newest request; heard_until_s: after it, without
    a new one, it counts as dead.
    """

    request: JoinRequest
    since_s: float
    heard_s: float
    heard_until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationState:
    """All that the machine remembers. holders: rank -> worker id of the newest generation;
    assigned: what its members were told, in answer to the requests in `answered`.

    floor: a number that may have been given out unseen, so the next one is above it.
    broken_at_s is when the first holder came back with a fault; spares only tells how many
    processes the run has besides `world`.
    """

    world: int
    spares: int = 0
    silent_s: float = 0.25
    straggler_s: float = 60.0
    epoch: int = 0
    newest: int = 0
    floor: int = 0
    phase: Phase = Phase.IDLE
    holders: Mapping[int, str] = field(default_factory=dict)
    waiting: Mapping[str, Waiter] = field(default_factory=dict)
    gone: Mapping[str, None] = field(default_factory=dict)
    finished: Mapping[int, str] = field(default_factory=dict)
    assigned: Mapping[str, Assignment] = field(default_factory=dict)
    answered: Mapping[str, JoinRequest] = field(default_factory=dict)
    chosen: Mapping[int, str] = field(default_factory=dict)
    excluded: tuple[dict[str, Any], ...] = ()
    lineage: Lineage = field(default_factory=Lineage)
    plan_id: int = 0
    broken_at_s: float | None = None
    filled_at_s: float = 0.0
    reason: str = "start"
    stopping: str = ""
    done_reason: str = ""

    def rank_of(self, worker_id: str) -> int | None:
        """The rank that this worker holds in the newest generation, or None."""
        for rank, holder in self.holders.items():
            if holder == worker_id:
                return rank
        return None

    def unfinished(self) -> list[int]:
        """Ranks whose function has not returned yet, ascending."""
        return [rank for rank in range(self.world) if rank not in self.finished]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A member asks (again) for a place. hold_s: how long this request stays open."""

    request: JoinRequest
    hold_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    """A worker's process is known to have ended."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The answer to PlanRestore `plan_id`; answers to older plans are ignored."""

    plan_id: int
    source: StateSource


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStarted:
    """A supervisor life began.

    holders and finished: members of this epoch that a manager found when it was re-created. floor:
    the number that its predecessor may have announced without a trace.
    """

    epoch: int
    seen_generation: int = 0
    floor: int = 0
    holders: Mapping[int, str] = field(default_factory=dict)
    finished: Mapping[int, str] = field(default_factory=dict)
    lineage: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFinished:
    """A member's function returned."""

    worker_id: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The run shall end at its next boundary; members see that for themselves."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Halted:
    """The run is over whatever the members think: budget used up, nothing restorable."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Joined | WorkerGone | Planned | EpochStarted | MemberFinished | StopRequested | Halted | Tick
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRestore:
    """Find where the state comes from and answer with Planned(plan_id). nodes: of the ranks.

    epoch and generation: what every agent has to be sealed at before it is asked.
    """

    plan_id: int
    epoch: int
    generation: int
    nodes: tuple[str, ...]
    excluded: tuple[dict[str, Any], ...]
    lineage: Lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Answer these members' requests, by worker id."""

    assignments: Mapping[str, Assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """These workers have nothing left to do."""

    worker_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """This worker is fenced off."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Something for the event log."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    level: str = "info"


Action = PlanRestore | Announce | Dismiss | Refuse | Emit
Step = tuple[GenerationState, list[Action]]
