"""How often failures come: between what was expected and what was seen."""

from __future__ import annotations

import math

import pytest

from relit_platform.machines.failure_rates import (
    DAY_S,
    KINDS,
    SHARES,
    Kind,
    expected_mtbf_s,
    kind_of,
    rates,
)

HOUR_S = 3600.0


def test_shares_are_shares() -> None:
    assert set(SHARES) == set(KINDS) and math.isclose(sum(SHARES.values()), 1.0)


@pytest.mark.parametrize(
    ("ranks", "given_s", "days"), [(1, 0.0, 200), (100, 0.0, 2), (0, 0.0, 200), (8, DAY_S, 1)]
)
def test_what_is_expected(ranks: int, given_s: float, days: float) -> None:
    assert expected_mtbf_s(ranks, given_s) == days * DAY_S


@pytest.mark.parametrize(
    ("tier", "kind"),
    [("", "memory"), ("memory", "memory"), ("disk", "disk"), ("object", "object"), ("?", "memory")],
)
def test_the_nearest_tier_that_survived_names_the_kind(tier: str, kind: Kind) -> None:
    assert kind_of(tier) == kind


def test_before_anything_was_seen_the_expectation_holds() -> None:
    found = rates(10 * HOUR_S, {}, 0.0)
    assert sum(found.values()) == pytest.approx(1 / (10 * HOUR_S))
    assert found["disk"] == pytest.approx(0.2 / (10 * HOUR_S))


def test_a_calm_time_lowers_the_rate_and_failures_raise_theirs_alone() -> None:
    before, calm = rates(10 * HOUR_S, {}, 0.0), rates(10 * HOUR_S, {}, 10 * HOUR_S)
    assert all(calm[kind] == pytest.approx(before[kind] / 2) for kind in KINDS)
    seen = rates(10 * HOUR_S, {"disk": 3}, 10 * HOUR_S)
    assert seen["disk"] == pytest.approx(3.2 / (20 * HOUR_S))
    assert seen["object"] == calm["object"]


def test_what_is_seen_outweighs_a_wrong_expectation() -> None:
    """Expected once in 200 days, and there is one every hour: after a week it is known."""
    found = rates(200 * DAY_S, {"memory": 7 * 24}, 7 * DAY_S)
    assert 1 / found["memory"] < 30 * HOUR_S
    wrong_way = rates(HOUR_S, {}, 7 * DAY_S)
    assert 1 / sum(wrong_way.values()) > 7 * DAY_S


def test_a_clock_that_went_back_is_no_time_trained() -> None:
    assert rates(HOUR_S, {}, -5.0) == rates(HOUR_S, {}, 0.0)
