"""When a run that keeps failing stops, and with which reason."""

from __future__ import annotations

import pytest

from relit_platform.facts import Verdict
from relit_platform.machines.budget import BudgetState, note_recovery, note_user_error
from relit_platform.run_config import RecoveryConfig

CONFIG = RecoveryConfig(max_recoveries=5, no_progress=3, user_errors=1, backoff_s=0.5)


def recover(steps: list[int], config: RecoveryConfig = CONFIG) -> list[Verdict]:
    state, verdicts = BudgetState(), []
    for step in steps:
        state, verdict = note_recovery(state, config, step)
        verdicts.append(verdict)
    return verdicts


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        ([0, 0, 0], ""),
        ([0, 0, 0, 0], "no_progress"),
        ([5, 5, 5, 6, 6], ""),
        ([9, 5, 5, 5], "no_progress"),
        ([1, 2, 3, 4, 5], ""),
        ([1, 2, 3, 4, 5, 6], "max_recoveries"),
    ],
)
def test_recoveries(steps: list[int], code: str) -> None:
    verdicts = recover(steps)
    assert [v.go_on for v in verdicts[:-1]] == [True] * (len(steps) - 1)
    assert verdicts[-1].code == code and verdicts[-1].reason


def test_backoff_doubles_without_progress_and_resets_with_it() -> None:
    assert [v.backoff_s for v in recover([0, 0, 0])] == [0.5, 1.0, 2.0]
    assert recover([0, 0, 4])[-1].backoff_s == 0.0


def errors(seen: list[tuple[str, str, int, int]], processes: int = 2) -> list[str]:
    state, codes = BudgetState(), []
    for error_type, message, step, rank in seen:
        state, verdict = note_user_error(
            state,
            CONFIG,
            error_type=error_type,
            message=message,
            step=step,
            rank=rank,
            processes=processes,
        )
        codes.append(verdict.code)
    return codes


@pytest.mark.parametrize(
    ("seen", "codes"),
    [
        ([("E", "m", 5, 0), ("E", "m", 5, 0)], ["", "poison_step"]),
        ([("E", "m", 5, 0), ("E", "m", 5, 1)], ["", ""]),
        ([("E", "m", 5, 0), ("E", "m", 6, 0)], ["", ""]),
        ([("E", "m", 5, 0), ("F", "m", 5, 0)], ["", ""]),
        ([("E", "at 0x7f01", 5, 0), ("E", "at 0x7f02", 5, 0)], ["", "poison_step"]),
        ([("E", "m", 0, -1)] * 3, ["", "", "poison_step"]),
        ([("DriftError", "m", 5, 0)], ["bad_input"]),
    ],
)
def test_user_errors(seen: list[tuple[str, str, int, int]], codes: list[str]) -> None:
    assert errors(seen) == codes
