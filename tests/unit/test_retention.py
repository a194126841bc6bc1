"""Retention: what may go, and what never goes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relit_storage.checkpoint.retention import Keep, Retention, StepOnTier, plan_retention


def tier(*steps: str) -> list[StepOnTier]:
    """ "100.2" is step 100 of generation 2; "100.2?" is not committed; "100.2=0.5" has a metric.
    Each takes 10 bytes.
    """
    found = []
    for text in steps:
        name, _, metric = text.partition("=")
        step, generation = name.rstrip("?").split(".")
        value = float(metric) if metric else None
        found.append(
            StepOnTier(int(step), int(generation), not name.endswith("?"), 10, metric=value)
        )
    return found


def dropped(plan: Retention) -> list[tuple[int, int]]:
    return [(step.step, step.generation) for step, _ in plan.dropped]


TEN = [f"{step}.1" for step in range(50, 550, 50)]


@pytest.mark.parametrize(
    ("steps", "keep", "protected", "pinned", "kept"),
    [
        ([], Keep(), [], [], []),
        (["100.1"], Keep(newest=0), [], [], [100]),
        (["100.1", "150.1"], Keep(newest=2), [], [], [100, 150]),
        (["100.1", "150.1", "200.1"], Keep(newest=2), [], [], [150, 200]),
        (["100.1", "150.1", "200.1"], Keep(), [], [], [200]),
        (["100.1", "150.1", "200.1"], Keep(), [(100, 1)], [], [100, 200]),
        (["100.1", "150.1", "200.1"], Keep(), [], [150], [150, 200]),
        (["100.1", "150.1?"], Keep(), [], [], [100, 150]),
        (["100.1?", "150.1"], Keep(), [], [], [150]),
        (["100.1?", "150.1?"], Keep(), [], [], [100, 150]),
        (["100.1", "60.2"], Keep(), [], [], [60]),
        (["100.1", "100.2"], Keep(), [], [], [100]),
        (["100.1?", "60.2"], Keep(), [], [], [60]),
        (TEN, Keep(every_steps=200), [], [], [200, 400, 500]),
        (["190.1", "210.1", "220.1", "390.1", "430.1"], Keep(every_steps=200), [], [], [210, 430]),
        (["1.1=3", "2.1=1", "3.1=2", "4.1"], Keep(best=2), [], [], [2, 3, 4]),
        (["1.1=3", "2.1=1", "3.1=2", "4.1"], Keep(best=1, mode="max"), [], [], [1, 4]),
        (["1.1=1", "2.1=1", "3.1=nan", "4.1"], Keep(best=1), [], [], [2, 4]),
        (TEN, Keep(newest=9, max_bytes=35), [], [], [400, 450, 500]),
        (TEN, Keep(newest=9, max_bytes=35, next_bytes=10), [], [], [450, 500]),
        (TEN, Keep(newest=9, max_bytes=35), [(50, 1)], [100], [50, 100, 500]),
        (TEN, Keep(newest=9, max_bytes=5), [], [], [500]),
        (["1.1=1", "2.1=2", "3.1", "4.1"], Keep(newest=4, best=2, max_bytes=20), [], [], [1, 4]),
    ],
)  # fmt: skip
def test_what_stays(
    steps: list[str], keep: Keep, protected: list[tuple[int, int]], pinned: list[int],
    kept: list[int],
) -> None:  # fmt: skip
    for order in itertools.islice(itertools.permutations(tier(*steps)), 200):
        plan = plan_retention(order, keep, protected=protected, pinned=pinned)
        assert [step.step for step, _ in plan.kept] == kept
        assert len(plan.kept) + len(plan.dropped) == len(steps)
        assert all(reason for _, reason in (*plan.kept, *plan.dropped))


def test_the_cap_says_when_it_cannot_hold() -> None:
    plan = plan_retention(tier("1.1", "2.1"), Keep(max_bytes=12, next_bytes=10), pinned=[1])
    assert (plan.num_bytes, plan.forecast_bytes, plan.short_bytes) == (20, 30, 18)
    assert plan_retention(tier("1.1"), Keep(max_bytes=20, next_bytes=10)).short_bytes == 0


def test_every_reason_names_the_rule() -> None:
    plan = plan_retention(
        tier("100.1=3", "150.1=9", "200.1=5", "250.1", "300.1"),
        Keep(newest=2, every_steps=200, best=1),
        pinned=[100],
    )
    assert [f"{step.step} {reason}" for step, reason in plan.kept] == [
        "100 pinned",
        "200 the first since step 200",
        "250 one of the newest 2",
        "300 the newest committed",
    ]
    assert [reason for _, reason in plan.dropped] == [
        "older than the newest 2 committed, not the first of 200 steps, not one of the best 1"
    ]


# ---- whatever lies on a tier, and whatever was asked ----

held = st.lists(
    st.builds(
        StepOnTier,
        step=st.integers(1, 60),
        generation=st.integers(1, 3),
        committed=st.booleans(),
        num_bytes=st.integers(0, 100),
        metric=st.none() | st.floats(width=16),
    ),
    max_size=12,
    unique_by=lambda step: step.order,
)
policies = st.builds(
    Keep,
    newest=st.integers(0, 5),
    every_steps=st.sampled_from([0, 1, 7, 20]),
    best=st.integers(0, 3),
    mode=st.sampled_from(["min", "max"]),
    max_bytes=st.integers(0, 600),
    next_bytes=st.integers(0, 100),
)
pins = st.sets(st.integers(1, 60), max_size=3)


@settings(max_examples=150, deadline=None)
@given(steps=held, keep=policies, pinned=pins, data=st.data())
def test_never_the_newest_a_pin_or_one_in_use(
    steps: list[StepOnTier], keep: Keep, pinned: set[int], data: st.DataObject
) -> None:
    names = [(s.step, s.generation) for s in steps]
    in_use = data.draw(st.sets(st.sampled_from(names))) if names else set[tuple[int, int]]()
    plan = plan_retention(steps, keep, protected=in_use, pinned=pinned)
    gone = {step.order for step, _ in plan.dropped}
    committed = [s for s in steps if s.committed]
    if committed:
        assert max(s.order for s in committed) not in gone
        newest = max(s.order for s in committed)
        assert all(o < newest for o in gone)
    else:
        assert not gone
    assert not any(s.committed and s.step in pinned for s, _ in plan.dropped)
    assert not gone & {(generation, step) for step, generation in in_use}
    if not keep.max_bytes:
        newest_n = sorted((s.order for s in committed), reverse=True)[: max(1, keep.newest)]
        assert not gone & set(newest_n), "not more than asked"


@settings(max_examples=100, deadline=None)
@given(steps=held, keep=policies, pinned=pins, data=st.data())
def test_deterministic_and_settled(
    steps: list[StepOnTier], keep: Keep, pinned: set[int], data: st.DataObject
) -> None:
    plan = plan_retention(steps, keep, pinned=pinned)
    shuffled = data.draw(st.permutations(steps))
    assert plan_retention(shuffled, keep, pinned=pinned) == plan
    again = plan_retention([step for step, _ in plan.kept], keep, pinned=pinned)
    assert not again.dropped, "what was kept is kept"
    assert plan.forecast_bytes == plan.num_bytes + keep.next_bytes


@settings(max_examples=100, deadline=None)
@given(
    steps=held, keep=policies, pinned=pins, more=st.integers(0, 3), room=st.integers(0, 200),
    pin=st.integers(1, 60),
)  # fmt: skip
def test_asking_for_more_never_loses_a_step(
    steps: list[StepOnTier], keep: Keep, pinned: set[int], more: int, room: int, pin: int
) -> None:
    def gone(keep: Keep, pinned: set[int]) -> set[tuple[int, int]]:
        return set(dropped(plan_retention(steps, keep, pinned=pinned)))

    if keep.max_bytes:
        roomier = replace(keep, max_bytes=keep.max_bytes + room)
        assert gone(roomier, pinned) <= gone(keep, pinned)
    free = replace(keep, max_bytes=0)
    assert gone(free, pinned) <= gone(keep, pinned)
    assert gone(replace(free, newest=free.newest + more), pinned) <= gone(free, pinned)
    assert gone(replace(free, best=free.best + more), pinned) <= gone(free, pinned)
    assert gone(free, {*pinned, pin}) <= gone(free, pinned)
