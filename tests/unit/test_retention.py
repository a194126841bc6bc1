"""Retention: what may go, and what never goes."""

import itertools

import pytest

from relit_storage.checkpoint.retention import StepOnTier, plan_expiry


def tier(*steps: str) -> list[StepOnTier]:
    """ "100.2" is step 100 of generation 2; "100.2?" is not committed."""
    found = []
    for text in steps:
        step, generation = text.rstrip("?").split(".")
        found.append(StepOnTier(int(step), int(generation), not text.endswith("?")))
    return found


@pytest.mark.parametrize(
    ("steps", "keep", "protected", "drop"),
    [
        ([], 2, [], []),
        (["100.1"], 0, [], []),
        (["100.1", "150.1"], 2, [], []),
        (["100.1", "150.1", "200.1"], 2, [], ["100.1"]),
        (["100.1", "150.1", "200.1"], 1, [], ["100.1", "150.1"]),
        (["100.1", "150.1", "200.1"], 1, [(100, 1)], ["150.1"]),
        (["100.1", "150.1?"], 1, [], []),
        (["100.1?", "150.1"], 1, [], ["100.1?"]),
        (["100.1?", "150.1?"], 1, [], []),
        (["100.1", "60.2"], 1, [], ["100.1"]),
        (["100.1", "100.2"], 1, [], ["100.1"]),
        (["100.1?", "60.2"], 1, [], ["100.1?"]),
    ],
)
def test_what_goes(
    steps: list[str], keep: int, protected: list[tuple[int, int]], drop: list[str]
) -> None:
    for order in itertools.permutations(tier(*steps)):
        found, reasons = plan_expiry(order, keep, frozenset(protected))
        assert list(found) == sorted(tier(*drop), key=lambda s: s.order)
        assert len(reasons) == len(found) and all(reasons)
