"""Run state as Ray metrics, hence in the Ray dashboard and Prometheus; see user-experience B.6.

Exported from the supervisor, which lives as long as the run: a gauge of a process that ends
vanishes within 20 s, and a killed process loses its last interval. Ray prefixes names with `ray_`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge

STATES = ("PENDING", "RUNNING", "RECOVERING", "STOPPING", "SUCCEEDED", "FAILED", "STOPPED")


class Telemetry:
    """The gauges and counters of one run; `update` is called about twice a second."""

    def __init__(self, run_id: str) -> None:
        self._tags = {"run": run_id}
        self._step = Gauge("relit_step", "Completed steps", tag_keys=("run",))
        self._loss = Gauge("relit_loss", "Global mean loss of the newest step", tag_keys=("run",))
        self._world = Gauge("relit_world_size", "Ranks in the generation", tag_keys=("run",))
        self._generation = Gauge("relit_generation", "Number of the generation", tag_keys=("run",))
        self._committed = Gauge(
            "relit_committed_step", "Newest whole step of a tier", tag_keys=("run", "tier")
        )
        self._state = Gauge("relit_state", "1 for the present state", tag_keys=("run", "state"))
        self._recoveries = Counter(
            "relit_recoveries_total", "Recoveries", tag_keys=("run", "cause")
        )
        self._lost = Counter("relit_lost_steps_total", "Steps done again", tag_keys=("run",))
        self._down_s = Counter("relit_downtime_seconds_total", "Downtime", tag_keys=("run",))

    def update(self, status: Mapping[str, Any]) -> None:
        """Set the gauges from a status as in status.json."""
        for gauge, key in (
            (self._step, "step"),
            (self._loss, "loss"),
            (self._world, "world"),
            (self._generation, "generation"),
        ):
            if status.get(key) is not None:
                gauge.set(float(status[key]), tags=self._tags)
        for tier, step in (status.get("committed") or {}).items():
            if step is not None:
                self._committed.set(float(step), tags={**self._tags, "tier": tier})
        for state in STATES:
            value = 1.0 if status.get("state") == state else 0.0
            self._state.set(value, tags={**self._tags, "state": state})

    def incident(self, record: Mapping[str, Any]) -> None:
        """Count one closed incident."""
        cause = str(record.get("cause", {}).get("class", "unknown"))
        self._recoveries.inc(1.0, tags={**self._tags, "cause": cause})
        lost = float(record.get("lost", {}).get("steps") or 0)
        if lost > 0:
            self._lost.inc(lost, tags=self._tags)
        down_s = float(record.get("downtime_s") or 0.0)
        if down_s > 0:
            self._down_s.inc(down_s, tags=self._tags)
