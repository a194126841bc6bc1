"""Whether the supervisor starts Ray Train again after a `fit()` ended early. Pure.

progress since the last restart      go on, back-off at its beginning
none, fewer than `no_progress` times go on, back-off doubled
none, `no_progress` times in a row   give up: no_progress
"""

from __future__ import annotations

from dataclasses import dataclass

from relit_platform.run_config import RecoveryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartState:
    """What was seen at the last restart: the newest completed step, and restarts since it moved."""

    step: int = -1
    stuck: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartDecision:
    """go_on after `backoff_s`, or give up; reason is one sentence for the event log."""

    go_on: bool
    backoff_s: float
    reason: str


def advance(
    state: RestartState, step: int, recovery: RecoveryConfig
) -> tuple[RestartState, RestartDecision]:
    """Judge one early end of `fit()`; step is the newest completed step now."""
    stuck = 0 if step > state.step else state.stuck + 1
    after = RestartState(step=max(step, state.step), stuck=stuck)
    if stuck >= recovery.no_progress:
        reason = f"{stuck} full restarts in a row without a new step after step {step}"
        return after, RestartDecision(go_on=False, backoff_s=0.0, reason=reason)
    backoff_s = min(recovery.backoff_s * 2**stuck, recovery.backoff_max_s)
    reason = f"full restart {stuck + 1} at step {step}"
    return after, RestartDecision(go_on=True, backoff_s=backoff_s, reason=reason)
