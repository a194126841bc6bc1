"""Which checkpoints belong to the surviving line of history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relit_platform.machines.lineage import Lineage


def line(*entries: tuple[int, int]) -> Lineage:
    return Lineage().merged(entries)


@pytest.mark.parametrize(
    ("entries", "generation", "step", "expected"),
    [
        ([], 1, 99, True),
        ([(1, 0)], 1, 99, True),
        ([(1, 0), (2, 10)], 1, 10, True),
        ([(1, 0), (2, 10)], 1, 11, False),
        ([(1, 0), (2, 10)], 2, 11, True),
        ([(1, 0), (2, 10), (3, 4)], 2, 5, False),
        ([(1, 0), (2, 10), (3, 4)], 1, 4, True),
        ([(1, 0), (2, 10), (3, 30)], 1, 11, False),
    ],
)
def test_on_line(
    entries: list[tuple[int, int]], generation: int, step: int, expected: bool
) -> None:
    assert line(*entries).on_line(generation, step) is expected


def test_cut_by_names_the_generation_that_went_back() -> None:
    assert line((1, 0), (2, 10), (3, 30)).cut_by(1, 11) == (2, 10)
    assert line((1, 0), (2, 10)).cut_by(1, 10) is None


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 12)), max_size=10), st.randoms())
def test_short_form_says_the_same_as_all_entries(
    raw: list[tuple[int, int]], random: object
) -> None:
    entries = list(dict(raw).items())
    random.shuffle(entries)  # type: ignore[attr-defined]
    short = line(*entries)
    for generation in range(9):
        for step in range(14):
            full = all(step <= s for g, s in entries if g > generation)
            assert short.on_line(generation, step) is full


def test_newest_start_and_repetition() -> None:
    lineage = line((1, 0), (2, 10), (2, 10))
    assert lineage.newest_start == 10
    assert lineage.entries == ((1, 0), (2, 10))
