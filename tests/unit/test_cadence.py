"""Cadence: when a tier is due, by each policy and by several together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relit_platform.machines.cadence import (
    Cadence,
    Mode,
    every_seconds,
    every_steps,
    exponential,
    on_metric,
)


def saves(cadence: Cadence, steps: int, step_s: float = 1.0) -> list[int]:
    """The steps at which a loop of steady speed saves, each step asked about once."""
    found, last_s = [], 0.0
    for step in range(1, steps + 1):
        now_s = step * step_s
        if cadence.due(step, step - 1, now_s, last_s).due:
            found.append(step)
            last_s = now_s
    return found


@pytest.mark.parametrize(
    ("cadence", "step_s", "expected"),
    [
        (Cadence(), 1.0, []),
        (Cadence(every_steps=10), 1.0, [10, 20, 30]),
        (Cadence(every_s=7), 1.0, [7, 14, 21, 28]),
        (Cadence(every_s=7), 10.0, list(range(1, 33))),
        (Cadence(every_steps=10, every_s=7), 1.0, [7, 10, 17, 20, 27, 30]),
        (Cadence(every_steps=10, every_s=7), 0.1, [10, 20, 30]),
        (Cadence(first_steps=1), 1.0, [1, 3, 7, 15, 31]),
        (Cadence(first_steps=2, every_steps=8), 1.0, [2, 6, 14, 22, 30]),
        (Cadence(first_steps=2, every_steps=8, every_s=5), 1.0, [2, 6, 11, 14, 19, 22, 27, 30]),
        (Cadence(first_steps=3, growth=1.5, every_steps=9), 1.0, [3, 8, 16, 25]),
        (Cadence(first_steps=4, every_steps=4), 1.0, [4, 8, 12, 16, 20, 24, 28, 32]),
    ],
)
def test_when_a_loop_saves(cadence: Cadence, step_s: float, expected: list[int]) -> None:
    assert saves(cadence, 32, step_s) == expected
    assert cadence.on == bool(expected)


@pytest.mark.parametrize(
    ("step", "last", "due"), [(19, 0, False), (25, 0, True), (39, 25, False), (45, 25, True)]
)
def test_a_multiple_that_was_passed_over_is_made_up_for(step: int, last: int, due: bool) -> None:
    assert every_steps(step, last, 20).due is due


def test_a_clock_that_went_back_says_nothing() -> None:
    assert not every_seconds(100.0, 5000.0, 60.0).due
    assert not every_seconds(100.0, 0.0, 0.0).due


@pytest.mark.parametrize(
    ("value", "best", "mode", "due"),
    [
        (None, None, "min", False),
        (float("nan"), None, "min", False),
        (float("-inf"), None, "min", False),
        (1.0, 2.0, "min", True),
        (2.0, 2.0, "min", False),
        (3.0, 2.0, "min", False),
        (3.0, 2.0, "max", True),
        (float("nan"), 2.0, "max", False),
    ],
)
def test_only_what_is_better_improves(
    value: float | None, best: float | None, mode: Mode, due: bool
) -> None:
    found = on_metric(value, best, mode)
    assert found.due is due and found.reason


cadences = st.builds(
    Cadence,
    every_steps=st.integers(0, 40),
    every_s=st.sampled_from([0.0, 3.0, 50.0]),
    first_steps=st.integers(0, 20),
    growth=st.floats(1.01, 8.0),
)


@settings(max_examples=100, deadline=None)
@given(cadence=cadences, step_s=st.sampled_from([0.1, 1.0, 9.0]))
def test_whichever_comes_first_is_never_later_than_either(cadence: Cadence, step_s: float) -> None:
    found = saves(cadence, 200, step_s)
    gaps = [b - a for a, b in zip([0, *found], [*found, 200], strict=True)]
    if cadence.every_steps:
        assert max(gaps) <= cadence.every_steps
    if cadence.every_s:
        assert max(gaps) <= cadence.every_s / step_s + 1 + 1e-9
    if not cadence.on:
        assert not found


@settings(max_examples=100, deadline=None)
@given(
    first=st.integers(1, 50), growth=st.floats(1.01, 10), cap=st.integers(0, 80),
    asked=st.lists(st.integers(1, 5000), min_size=1, max_size=20, unique=True),
)  # fmt: skip
def test_a_growing_spacing_is_the_same_whoever_asks(
    first: int, growth: float, cap: int, asked: list[int]
) -> None:
    """Asked about every step or about some: a save is due whenever one lies in between."""
    last = 0
    for step in sorted(asked):
        each = any(exponential(s, s - 1, first, growth, cap).due for s in range(last + 1, step + 1))
        assert exponential(step, last, first, growth, cap).due is each
        last = step
