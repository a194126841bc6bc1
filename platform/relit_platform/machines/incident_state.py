"""What the incident machine remembers: evidence, marks in time, and the incident that is open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_EVIDENCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One sign of a fault. weight: a higher one names the cause; of equal ones the earliest."""

    method: str  # a key of incident_record.CLASSES
    weight: int
    at_s: float
    noticed_at_s: float
    rank: int | None
    worker_id: str = ""
    node_id: str = ""
    pid: int = 0
    step: int | None = None
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        """For the record's `evidence`."""
        return {
            "method": self.method,
            "at_s": self.at_s,
            "rank": self.rank,
            "node_id": self.node_id,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIncident:
    """A fault whose first new step has not come yet. Times are Unix seconds.

    completed_step: the newest step that was complete before it. entered: rank -> when it had its
    state, of generation `formed`.
    """

    evidence: tuple[Evidence, ...]
    completed_step: int
    generation: int
    world_before: int
    noticed_at_s: float
    restarted: bool = False
    formed: int = 0
    filled_at_s: float = 0.0
    formed_at_s: float = 0.0
    formed_data: Mapping[str, Any] = field(default_factory=dict)
    entered: Mapping[int, float] = field(default_factory=dict)
    restore_s: float = 0.0
    budget: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentState:
    """Between incidents: where the run stands. open: the one that is not over.

    total_steps: 0 as long as nobody has said how long the run is.
    """

    step: int = 0
    total_steps: int = 0
    generation: int = 0
    world: int = 0
    open: OpenIncident | None = None


PHASES = ("detect", "wait", "rendezvous", "restore", "replay")
