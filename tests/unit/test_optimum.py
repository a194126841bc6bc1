"""What a spacing costs, and which one costs least: against the papers' own numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relit_platform.machines.optimum import TierCosts, daly, loss, optimum, two_tiers

COSTS = TierCosts(save_s=0.5, durable_s=0.0, restore_s=10.0, rate=1 / 11_137)


@pytest.mark.parametrize(
    ("mtbf_s", "minutes"), [(24 * 3600.0, 117), (6 * 3600.0, 57), (15 * 60.0, 9.1)]
)
def test_dalys_examples(mtbf_s: float, minutes: float) -> None:
    """Five minutes a save, as in the paper."""
    assert daly(300.0, mtbf_s) / 60 == pytest.approx(minutes, rel=0.02)


def test_a_save_that_takes_longer_than_failures_are_apart() -> None:
    assert daly(300.0, 100.0) == 100.0


def test_two_tiers_of_a_large_run() -> None:
    """0.5 s and 1 s a save, one failure in 11,137 s, a hundredth of them cluster-wide."""
    near = replace(COSTS, rate=0.99 / 11_137)
    far = replace(COSTS, save_s=1.0, rate=0.01 / 11_137)
    first, second = two_tiers(near, far, step_s=1.0)
    assert first.every_s == pytest.approx(106, abs=1)
    assert second.every_s == pytest.approx(1492, rel=0.05)
    assert second.every_steps % first.every_steps == 0
    assert first.reason and second.reason.startswith(optimum(far, 1.0).reason)


@pytest.mark.parametrize(
    ("costs", "step_s", "most_s", "every_s", "words"),
    [
        (replace(COSTS, durable_s=500.0), 1.0, 1e5, 500.0, "until it counts"),
        (replace(COSTS, save_s=30.0, rate=1 / 300), 1.0, 1e5, 3000.0, "1% of the time"),
        (COSTS, 200.0, 1e5, 200.0, "a step"),
        (COSTS, 1.0, 60.0, 60.0, "at once"),
        (replace(COSTS, rate=0.0), 1.0, 900.0, 900.0, "no failure"),
        (replace(COSTS, durable_s=500.0), 1.0, 60.0, 500.0, "until it counts"),  # cannot be less
        (replace(COSTS, save_s=30.0, rate=1 / 300), 1.0, 900.0, 900.0, "at once"),
        (COSTS, 90.0, 60.0, 90.0, "a step"),
    ],
)
def test_clamped_and_said_why(
    costs: TierCosts, step_s: float, most_s: float, every_s: float, words: str
) -> None:
    found = optimum(costs, step_s, most_s)
    assert found.every_s == every_s and words in found.reason
    assert found.every_steps == max(1, round(every_s / step_s))


@pytest.mark.parametrize(
    ("far", "most_s", "times"),
    [
        (replace(COSTS, save_s=40.0), 900.0, 8),  # 9 would be nearer to its own optimum
        (replace(COSTS, durable_s=250.0, rate=1.0), 1e5, 3),  # two of them are too short
        (replace(COSTS, rate=1.0), 1e5, 1),
    ],
)
def test_the_far_tier_takes_whole_spacings_of_the_near_one_within_its_bounds(
    far: TierCosts, most_s: float, times: int
) -> None:
    first, second = two_tiers(COSTS, far, step_s=1.0, most_s=most_s)
    assert first.every_s == pytest.approx(105, abs=1)
    assert second.every_s == pytest.approx(times * first.every_s)
    assert second.every_steps == times * first.every_steps


@settings(max_examples=100, deadline=None)
@given(
    save_s=st.floats(1e-3, 10), mtbf_h=st.floats(0.1, 1000), factor=st.floats(0.1, 10),
)  # fmt: skip
def test_no_other_spacing_is_much_better(save_s: float, mtbf_h: float, factor: float) -> None:
    costs = TierCosts(save_s=save_s, durable_s=1.0, restore_s=5.0, rate=1 / (mtbf_h * 3600))
    best_s = daly(save_s, 1 / costs.rate)
    if save_s < 0.02 * mtbf_h * 3600:  # where the first order holds
        assert loss(costs, best_s).total <= loss(costs, best_s * factor).total * 1.02
    parts = loss(costs, best_s)
    assert math.isclose(parts.total, parts.saving + parts.redone + parts.restarts)
    assert parts.plus(parts).total == pytest.approx(2 * parts.total)
