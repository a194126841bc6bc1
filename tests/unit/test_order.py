"""The order visits each sample once per epoch and the shares of any world make up each step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relit_storage.data.order import Mode, Order, lane_major, share, share_bounds
from relit_storage.data.schedule import Schedule, StepSpan, Tail
from relit_storage.errors import DataError

MODES = st.sampled_from(["block", "global", "sequential"])
TAILS = st.sampled_from(["carry", "short", "drop"])
ROWS = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda rows: sum(rows) > 0)


@given(ROWS, MODES, st.integers(1, 60), st.integers(1, 50), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_each_row_once(rows: list[int], mode: Mode, lanes: int, window: int, epoch: int) -> None:
    blocks_rows = np.array(rows)
    order = Order(blocks_rows, seed=3, epoch=epoch, lanes=lanes, window=window, mode=mode)
    blocks, places = order(np.arange(order.num_rows))
    assert (places >= 0).all() and (places < blocks_rows[blocks]).all()
    assert np.array_equal(np.sort(order.ids(blocks, places)), np.arange(sum(rows)))


@given(ROWS, MODES, st.data())
@settings(max_examples=60, deadline=None)
def test_a_seek_gives_what_a_scan_gives(rows: list[int], mode: Mode, data: st.DataObject) -> None:
    order = Order(np.array(rows), seed=1, epoch=0, lanes=5, window=7, mode=mode)
    at = np.array([data.draw(st.integers(0, order.num_rows - 1))])
    blocks, places = order(np.arange(order.num_rows))
    block, place = order(at)
    assert (block[0], place[0]) == (blocks[at[0]], places[at[0]])


def test_golden() -> None:
    order = Order(np.array([5, 3, 8, 1, 0, 7]), seed=11, epoch=2, lanes=4, window=3)
    ids = order.ids(*order(np.arange(24)))
    assert ids.tolist() == [
        5,
        20,
        9,
        15,
        6,
        21,
        11,
        1,
        7,
        19,
        10,
        0,
        18,
        23,
        13,
        3,
        16,
        22,
        14,
        4,
        17,
        8,
        12,
        2,
    ]


def test_epochs_and_seeds_differ() -> None:
    def ids(seed: int, epoch: int, mode: Mode) -> tuple[int, ...]:
        order = Order(np.full(20, 50), seed=seed, epoch=epoch, mode=mode)
        return tuple(order.ids(*order(np.arange(1000))))

    modes: list[Mode] = ["block", "global"]
    for mode in modes:
        orders = [ids(seed, epoch, mode) for seed in (0, 1) for epoch in (0, 1)]
        assert len(set(orders)) == 4


def test_block_mode_reads_few_blocks_at_a_time() -> None:
    order = Order(np.full(1000, 100), seed=0, epoch=0, lanes=8, window=200)
    blocks, _ = order(np.arange(40_000, 41_600))  # one window of each lane
    assert len(np.unique(blocks)) <= 8 * 4


@given(st.integers(0, 500), st.integers(0, 200), st.integers(1, 50), st.integers(1, 9))
def test_shares_join_to_the_canonical_order(lo: int, num: int, lanes: int, world: int) -> None:
    shares = [share(lo, lo + num, lanes, rank, world) for rank in range(world)]
    whole = lane_major(np.arange(lo, lo + num), lanes)
    assert np.array_equal(np.concatenate(shares), whole)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert np.array_equal(np.sort(whole), np.arange(lo, lo + num))


def test_world_that_divides_lanes_keeps_lanes_apart() -> None:
    lanes_of = [set((share(0, 480, 48, rank, 4) % 48).tolist()) for rank in range(4)]
    assert [len(lanes) for lanes in lanes_of] == [12, 12, 12, 12]
    assert len(set.union(*lanes_of)) == 48
    assert share_bounds(10, 1, 3) == (3, 6)


@given(st.integers(1, 60), st.integers(1, 90), TAILS, st.integers(1, 4))
@settings(max_examples=300)
def test_schedule_tiles_every_epoch(rows: int, batch: int, tail: Tail, epochs: int) -> None:
    if tail == "drop" and rows < batch:
        with pytest.raises(DataError):
            Schedule(num_rows=rows, global_batch=batch, tail=tail, epochs=epochs)
        return
    schedule = Schedule(num_rows=rows, global_batch=batch, tail=tail, epochs=epochs)
    assert schedule.num_steps is not None
    seen: dict[int, list[int]] = {}
    for step in range(schedule.num_steps):
        spans = schedule.spans(step)
        assert (spans[0].epoch, spans[0].lo) == schedule.place(step)
        assert 0 < sum(span.hi - span.lo for span in spans) == schedule.step_rows(step) <= batch
        for span in spans:
            seen.setdefault(span.epoch, []).extend(range(span.lo, span.hi))
    assert seen == {epoch: list(range(schedule.rows_per_epoch)) for epoch in range(epochs)}
    assert schedule.place(schedule.num_steps) == (epochs, 0)
    with pytest.raises(IndexError):
        schedule.spans(schedule.num_steps)


SPANS: list[tuple[Tail, int, tuple[StepSpan, ...]]] = [
    ("carry", 2, (StepSpan(0, 8, 10), StepSpan(1, 0, 2))),
    ("carry", 5, (StepSpan(2, 0, 4),)),
    ("short", 2, (StepSpan(0, 8, 10),)),
    ("short", 3, (StepSpan(1, 0, 4),)),
    ("drop", 1, (StepSpan(0, 4, 8),)),
    ("drop", 2, (StepSpan(1, 0, 4),)),
]


@pytest.mark.parametrize(("tail", "step", "spans"), SPANS)
def test_tails(tail: Tail, step: int, spans: tuple[StepSpan, ...]) -> None:
    assert Schedule(num_rows=10, global_batch=4, tail=tail).spans(step) == spans


def test_batch_larger_than_an_epoch_covers_several() -> None:
    spans = Schedule(num_rows=3, global_batch=8).spans(0)
    assert spans == (StepSpan(0, 0, 3), StepSpan(1, 0, 3), StepSpan(2, 0, 2))


BAD: list[dict[str, object]] = [
    {"global_batch": 0},
    {"epochs": 0},
    {"steps": 0},
    {"tail": "pad"},
    {"num_rows": 0},
]


@pytest.mark.parametrize("change", BAD)
def test_impossible_schedules_are_refused(change: dict[str, object]) -> None:
    arguments: dict[str, object] = {"num_rows": 10, "global_batch": 4} | change
    with pytest.raises((ValueError, DataError), match="|".join(change) + "|rows"):
        Schedule(**arguments)  # type: ignore[arg-type]


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode"):
        Order(np.array([3]), seed=0, epoch=0, mode="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lanes"):
        Order(np.array([3]), seed=0, epoch=0, lanes=0)
