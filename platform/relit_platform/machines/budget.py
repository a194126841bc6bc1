"""The recovery budget, pure: when a run that keeps failing shall stop, and why.

    max_recoveries   so many recoveries in all
    no_progress      so many in a row without one new completed step
    poison_step      the same exception at the same step so often again
    bad_input        an exception by which relit refuses what it was given: once is enough

Every decision comes with its reason. A new completed step resets the streak and the back-off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from relit_platform.facts import Verdict
from relit_platform.run_config import RecoveryConfig

MAX_ERRORS = 256
BAD_INPUT = frozenset(
    {
        "DriftError",
        "InitialStateError",
        "LoaderStateError",
        "NotSavableError",
        "StateMismatchError",
        "UsageError",
    }
)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """What was used up. errors: times seen by (exception type, message, step,
    rank): one bug raises on every rank, and that is one time.
    """

    recoveries: int = 0
    streak: int = 0
    step: int = 0
    errors: Mapping[tuple[str, str, int, int], int] = field(default_factory=dict)


def note_recovery(
    state: BudgetState, config: RecoveryConfig, completed_step: int
) -> tuple[BudgetState, Verdict]:
    """Count one recovery. completed_step: the newest step that any generation has completed."""
    moved = completed_step > state.step
    streak = 1 if moved else state.streak + 1
    state = replace(
        state,
        recoveries=state.recoveries + 1,
        streak=streak,
        step=max(state.step, completed_step),
    )
    if state.recoveries > config.max_recoveries:
        reason = f"{state.recoveries} recoveries, {config.max_recoveries} are allowed"
        return state, Verdict(go_on=False, code="max_recoveries", reason=reason)
    if streak > config.no_progress:
        reason = f"{streak} recoveries in a row without a new step after step {state.step}"
        return state, Verdict(go_on=False, code="no_progress", reason=reason)
    backoff_s = min(config.backoff_s * 2 ** (streak - 1), config.backoff_max_s)
    reason = f"recovery {state.recoveries} at step {state.step}"
    return state, Verdict(go_on=True, reason=reason, backoff_s=0.0 if moved else backoff_s)


def note_user_error(
    state: BudgetState,
    config: RecoveryConfig,
    *,
    error_type: str,
    message: str,
    step: int,
    rank: int,
    processes: int,
) -> tuple[BudgetState, Verdict]:
    """Count one exception of the user's loop; the same one at the same step again is final.

    rank -1: raised before the worker had a rank, where each of `processes` may raise it once.
    """
    if error_type in BAD_INPUT:
        return state, Verdict(go_on=False, code="bad_input", reason=f"{error_type}: {message}")
    key = (error_type, _ADDRESS.sub("0x", message), step, max(rank, -1))
    seen = state.errors.get(key, 0) + 1
    times = seen if rank >= 0 else -(-seen // max(1, processes))
    errors = {**state.errors, key: seen}
    while len(errors) > MAX_ERRORS:
        del errors[next(iter(errors))]
    state = replace(state, errors=errors)
    if times > config.user_errors:
        reason = f"{error_type} at step {step} for the {_nth(times)} time: {message}"
        return state, Verdict(go_on=False, code="poison_step", reason=reason)
    reason = f"{error_type} at step {step}, first seen there"
    if times > 1:
        reason = f"{error_type} at step {step}, {times} of {config.user_errors + 1} times"
    return state, Verdict(go_on=True, reason=reason)


def _nth(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number if number < 20 else number % 10, "th")
    return f"{number}{suffix}"
