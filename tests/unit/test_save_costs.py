"""What saves cost the loop: found again in the times of steps, whatever else happens among them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relit_platform.machines.save_costs import (
    Ended,
    Sample,
    Span,
    apart,
    cost_s,
    ends_of,
    plain_step_s,
    sample,
    steps_of,
)


def run(lengths: list[float], generation: int = 1) -> list[Ended]:
    """Steps 1, 2, ... that took so long, after step 0 at 0 s."""
    ends = [Ended(0, generation, 0.0)]
    for step, length in enumerate(lengths, 1):
        ends.append(Ended(step, generation, ends[-1].at_s + length))
    return ends


def test_a_step_lies_between_two_rows_of_one_generation_that_follow_each_other() -> None:
    rows = [
        {"step": 1, "generation": 1, "at_s": 1.0},
        {"step": 2, "generation": 1, "at_s": 2.0},
        {"step": 4, "generation": 1, "at_s": 9.0},  # one is missing before it
        {"step": 5, "generation": 2, "at_s": 10.0},  # downtime
        {"step": 6, "generation": 2, "at_s": 11.5},
        {"step": 7, "generation": 2, "at_s": 11.0},  # a clock went back
    ]
    assert steps_of(ends_of(rows)) == [Span(1.0, 2.0), Span(10.0, 11.5)]
    assert steps_of([]) == []


@pytest.mark.parametrize(
    ("save", "found"),
    [
        (Span(2.0, 2.1), Sample(1.0, 0.0, 0.0)),  # over with the first step after the boundary
        (Span(2.0, 4.5), Sample(1.0, 1.0, 1.5)),  # two others, the last of them half
        (Span(2.0, 3.0), Sample(1.0, 0.0, 0.0)),  # the next one begins as it ends
        (Span(0.5, 1.5), Sample(1.0, 1.0, 1.0)),
        (Span(9.0, 9.9), None),
        (Span(-3.0, 0.0), None),
    ],
)
def test_the_steps_that_one_save_met(save: Span, found: Sample | None) -> None:
    assert sample(steps_of(run([1.0] * 9)), save) == found


def test_a_long_save_counts_by_its_time_when_most_steps_are_forgotten() -> None:
    steps = steps_of(run([1.0] * 5))
    found = sample(steps, Span(1.0, 101.0))
    assert found is not None and found.others == 99.0


@pytest.mark.parametrize(
    ("samples", "cost"),
    [
        ([], None),
        ([Sample(1.5, 0.0, 0.0)], 0.5),
        ([Sample(0.5, 0.0, 0.0)], 0.0),  # faster than a plain step: noise
        ([Sample(1.5, 1.1, 10.0)], 0.5 + 10 * 0.1),
        ([Sample(1.5, 0.9, 10.0)], 0.5),
        ([Sample(1.2, 1.0, 3.0)] * 2 + [Sample(60.0, 60.0, 3.0)], 0.2),  # an evaluation in between
    ],
)
def test_what_one_save_costs_is_the_median_of_all(
    samples: list[Sample], cost: float | None
) -> None:
    found = cost_s(samples, 1.0)
    assert found == (None if cost is None else pytest.approx(cost))


def test_a_plain_step_has_nothing_under_way() -> None:
    steps = steps_of(run([1.0, 1.0, 4.0, 4.0, 1.0]))
    assert plain_step_s(steps, [Span(2.0, 9.0)]) == 1.0
    assert plain_step_s(steps, []) == 1.0
    assert plain_step_s([], []) is None
    always = [Span(0.0, 6.5), Span(6.0, 99.0)]
    assert plain_step_s(steps, always) == 1.0, "the steps that are disturbed least"


spans = st.lists(
    st.tuples(st.floats(0, 30), st.floats(0.01, 9)).map(lambda pair: Span(pair[0], sum(pair))),
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.floats(0.1, 3.0), max_size=20), busy=spans)
def test_bisection_finds_what_looking_at_each_pair_finds(
    lengths: list[float], busy: list[Span]
) -> None:
    steps = steps_of(run(lengths))

    def meets(one: Span, other: Span) -> bool:
        return one.begin_s < other.end_s and other.begin_s < one.end_s

    assert apart(steps, busy) == [s for s in steps if not any(meets(s, one) for one in busy)]
    for save in busy:
        during = [step.seconds for step in steps if meets(step, save)]
        found = sample(steps, save)
        assert (found is None) == (not during)
        assert found is None or found.first_s == during[0]


@settings(max_examples=50, deadline=None)
@given(
    copy_s=st.floats(0.0, 2.0), slower=st.floats(0.0, 0.5), during=st.integers(1, 6),
    noise=st.lists(st.floats(-0.01, 0.01), min_size=200, max_size=200),
)  # fmt: skip
def test_the_cost_that_was_put_in_is_found_again(
    copy_s: float, slower: float, during: int, noise: list[float]
) -> None:
    """Every 20th step is saved: the copy delays the next one, the writing the `during` ones."""
    lengths, begun = [], []
    for step, wobble in enumerate(noise):
        since = step % 20
        busy = since < during and step >= 20
        if since == 0 and step >= 20:
            begun.append(step)
        lengths.append(1.0 + wobble + (copy_s if busy and since == 0 else 0) + slower * busy)
    ends = run(lengths)
    saves = [Span(ends[step].at_s, ends[step + during].at_s) for step in begun]
    steps = steps_of(ends)
    step_s = plain_step_s(steps, saves)
    assert step_s == pytest.approx(1.0, abs=0.011)
    samples = [taken for save in saves if (taken := sample(steps, save))]
    assert len(samples) == len(saves) and step_s
    assert cost_s(samples, step_s) == pytest.approx(copy_s + slower * during, abs=0.03 * during)
