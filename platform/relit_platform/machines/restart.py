"""What the end of a `fit()` means, and whether the supervisor starts Ray Train again. Pure.

the manager has given a verdict      the run has FAILED
it was stopped, and all are through  STOPPED, also where no rank ever started
every rank returned, and fit() too   SUCCEEDED
else it ended early:
progress since the last restart      go on, back-off at its beginning
none, fewer than `no_progress` times go on, back-off doubled
none, `no_progress` times in a row   give up: no_progress
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def ending(status: Mapping[str, Any], *, failed: bool) -> tuple[str, str] | None:
    """(state, reason) of a run whose `fit()` is over, by the manager's status; None: it goes on.

    failed: fit() has raised, as it does for a run that was stopped while it waited for resources.
    """
    if status.get("verdict"):
        return "FAILED", str(status["verdict"])
    if status.get("stopped"):
        return "STOPPED", str(status.get("stop_reason") or "stop asked for")
    if status.get("finished") and not failed:
        return "SUCCEEDED", ""
    return None


def tries_again(status: Mapping[str, Any], epoch: int, error_text: str) -> tuple[bool, str]:
    """(whether Ray Train replaces workers after this error, why), for its controller of `epoch`."""
    if status.get("verdict"):
        return False, str(status["verdict"])
    if status.get("stopped"):
        return False, "the run was stopped"
    if int(status.get("epoch") or 0) > epoch:
        return False, f"another supervisor runs the workers now, in epoch {status['epoch']}"
    return True, f"at step {status.get('step')}: {error_text[:200]}"


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
