"""What the end of a fit() means for the run, and whether Ray Train tries again."""

from __future__ import annotations

from typing import Any

import pytest

from relit_platform.machines.restart import RestartState, advance, ending, tries_again
from relit_platform.run_config import RecoveryConfig

STOPPED = {"stopped": True, "stop_reason": "Ctrl-C"}
BAD = {"verdict": "bad_input: it cannot be"}


@pytest.mark.parametrize(
    ("status", "failed", "over"),
    [
        ({}, False, None),
        ({"finished": True}, False, ("SUCCEEDED", "")),
        ({"finished": True}, True, None),  # done again: every rank is told that it is through
        (STOPPED, False, ("STOPPED", "Ctrl-C")),
        (STOPPED, True, ("STOPPED", "Ctrl-C")),  # while it waited for resources
        ({"stopped": True}, True, ("STOPPED", "stop asked for")),
        ({"stopping": True}, True, None),
        (BAD, True, ("FAILED", BAD["verdict"])),
        ({**BAD, **STOPPED}, False, ("FAILED", BAD["verdict"])),
    ],
)
def test_the_end_of_a_fit(
    status: dict[str, Any], failed: bool, over: tuple[str, str] | None
) -> None:
    assert ending(status, failed=failed) == over


@pytest.mark.parametrize(
    ("status", "again", "words"),
    [
        ({"step": 7, "epoch": 2}, True, "at step 7: boom"),
        ({"step": 7, "epoch": 3}, False, "epoch 3"),
        (STOPPED, False, "stopped"),
        (BAD, False, "bad_input"),
    ],
)
def test_whether_ray_train_replaces_workers(
    status: dict[str, Any], again: bool, words: str
) -> None:
    found, why = tries_again(status, 2, "boom")
    assert found is again and words in why


def test_restarts_without_a_new_step_end() -> None:
    recovery, state = (
        RecoveryConfig(no_progress=3, backoff_s=1.0, backoff_max_s=3.0),
        RestartState(),
    )
    waits = []
    for step in (5, 5, 5, 9, 9, 9, 9):
        state, decision = advance(state, step, recovery)
        waits.append(decision.backoff_s if decision.go_on else None)
    assert waits == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, None]
