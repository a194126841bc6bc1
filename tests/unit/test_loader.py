"""A batch depends on (step, rank, world) only, whatever was asked for before."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relit_storage.data.ledger import audit
from relit_storage.data.loader import Batch, Loader
from relit_storage.data.order import Mode
from relit_storage.data.permutation import Ints
from relit_storage.data.schedule import Tail
from relit_storage.data.table import TableDataset, prepare_table
from relit_storage.data.tokens import TokenDataset, prepare_text
from relit_storage.errors import DatasetChangedError, LoaderStateError, StoreUnavailableError
from relit_storage.stores.memory import MemoryStore


class Ids:
    """A data set whose samples are their own global ids."""

    row_bytes = 8

    def __init__(self, rows_per_block: list[int], fingerprint: str = "f" * 64) -> None:
        self.rows_per_block = np.array(rows_per_block)
        self.first = np.cumsum(self.rows_per_block) - self.rows_per_block
        self.fingerprint = fingerprint
        self.gathers = 0
        self.fault: Callable[[], None] = lambda: None

    def gather(self, blocks: Ints, rows: Ints) -> Batch:
        self.gathers += 1
        self.fault()
        return {"id": self.first[blocks] + rows}

    def to_batch(self, columns: Batch) -> Batch:
        return {"id": columns["id"].copy()}


def rows_of(loader: Loader, step: int, world: int) -> list[int]:
    """The global batch of a step, put together from its shares."""
    return [
        int(sample) for rank in range(world) for sample in loader.batch(step, rank, world)["id"]
    ]


BLOCKS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda rows: sum(rows) > 0)
MODES = st.sampled_from(["block", "global", "sequential"])
TAILS = st.sampled_from(["carry", "short"])


@given(BLOCKS, MODES, TAILS, st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_exactly_once_over_lives_of_any_world(
    blocks: list[int], mode: Mode, tail: Tail, batch: int, data: st.DataObject
) -> None:
    ledger, step, generation, seen = [], 0, 0, list[int]()
    done = False
    while not done:
        generation += 1
        world = data.draw(st.integers(1, 5))
        loader = Loader(  # a new process each life
            Ids(blocks), global_batch=batch, seed=5, lanes=4, window=6, mode=mode, tail=tail,
            epochs=2, prefetch=False,
        )  # fmt: skip
        assert loader.num_steps is not None
        life = data.draw(st.integers(1, loader.num_steps)) if generation < 4 else loader.num_steps
        for step in range(step, min(step + life, loader.num_steps)):  # noqa: B020
            shares = rows_of(loader, step, world)
            assert shares == loader.sample_ids(step).tolist()
            seen += shares
            ledger.append(loader.ledger_row(step, world=world, generation=generation))
        step += 1
        done = step >= loader.num_steps
    assert sorted(seen) == sorted(2 * list(range(sum(blocks))))
    assert audit(ledger, sum(blocks), 2, sample_ids=loader.sample_ids).exact


@given(BLOCKS, MODES, st.integers(1, 20), st.lists(st.integers(0, 200), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None)
def test_order_of_asking_does_not_matter(
    blocks: list[int], mode: Mode, batch: int, steps: list[int]
) -> None:
    def loader(prefetch: bool) -> Loader:
        data = Ids(blocks)
        return Loader(
            data, global_batch=batch, seed=1, lanes=3, window=5, mode=mode, prefetch=prefetch
        )

    one = loader(prefetch=True)
    asked = {step: rows_of(one, step, 2) for step in steps}
    one.close()
    other = loader(prefetch=False)
    assert asked == {step: rows_of(other, step, 3) for step in sorted(steps)}


def test_prefetched_steps_are_those_read_directly() -> None:
    ahead = Loader(Ids([50] * 9), global_batch=7, seed=3, steps=300)
    direct = Loader(Ids([50] * 9), global_batch=7, seed=3, steps=300, prefetch=False)
    for step in range(300):
        expected = direct.batch(step, 1, 2)["id"].tolist()
        assert ahead.batch(step, 1, 2)["id"].tolist() == expected
    ahead.close()
    assert ahead.batch(5, 0, 1)["id"].tolist() == direct.batch(5, 0, 1)["id"].tolist()
    ahead.close()


def settle(loader: Loader, step: int) -> None:
    """Ask until the chunk of `step` is prepared."""
    deadline = time.monotonic() + 10
    while loader._prepared(step, 0, 2) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_prepared_step_reads_nothing_and_a_batch_is_the_users_own() -> None:
    data = Ids([100] * 20)
    loader = Loader(data, global_batch=8, seed=0, steps=64)
    settle(loader, 0)
    gathers = data.gathers
    first = loader.batch(0, 0, 2)["id"]
    kept = first.tolist()
    first[:] = -1
    assert loader.batch(0, 0, 2)["id"].tolist() == kept  # a step that is redone gets the same
    assert all(len(loader.batch(step, 0, 2)["id"]) == 4 for step in range(64))
    assert data.gathers == gathers
    loader.close()


def test_what_was_prepared_is_bounded_and_dropped_on_a_seek() -> None:
    before = set(threading.enumerate())  # of other tests
    loader = Loader(Ids([100] * 200), global_batch=8, seed=0)
    prefetcher = loader._shares
    assert prefetcher is not None
    for step in (0, 64, 640, 128, 0):
        loader.batch(step, 0, 2)
        assert len(prefetcher._pending) <= 2
    loader.close()
    assert len(prefetcher._pending) == 0
    assert not any(t.name.startswith("relit-data") for t in set(threading.enumerate()) - before)


def test_a_failed_read_is_raised_and_tried_again() -> None:
    data = Ids([100] * 20)
    loader = Loader(data, global_batch=8, seed=0, steps=200)
    expected = [rows_of(loader, step, 1) for step in range(200)]

    def down() -> None:
        raise StoreUnavailableError(url="memory://", key="k", cause="down")

    loader.close()
    data.fault = down
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            loader.batch(70, 0, 1)
    data.fault = lambda: None
    deadline = time.monotonic() + 10
    while True:
        try:
            assert rows_of(loader, 70, 1) == expected[70]
            break
        except StoreUnavailableError:  # the failure of the background thread's last try
            assert time.monotonic() < deadline
    loader.close()


@pytest.mark.parametrize(
    ("micro", "sizes"), [(None, [11]), (4, [3, 4, 4]), (1, [1] * 11), (99, [11])]
)
def test_micro_batches_are_the_batch_in_pieces(micro: int | None, sizes: list[int]) -> None:
    loader = Loader(Ids([100]), global_batch=22, seed=0, prefetch=False)
    pieces = loader.micro_batches(3, 1, 2, micro)
    assert [len(piece["id"]) for piece in pieces] == sizes
    joined = np.concatenate([piece["id"] for piece in pieces])
    assert np.array_equal(joined, loader.batch(3, 1, 2)["id"])


def test_shares_of_a_batch_smaller_than_the_world() -> None:
    loader = Loader(Ids([100]), global_batch=2, seed=0, prefetch=False)
    assert [loader.num_rows(0, rank, 3) for rank in range(3)] == [0, 1, 1]
    assert [len(loader.micro_batches(0, rank, 3)) for rank in range(3)] == [0, 1, 1]
    assert loader.batch(0, 0, 3)["id"].shape == (0,)


ENDS: list[tuple[dict[str, int | str], int | None, int]] = [
    ({}, None, 0),
    ({"steps": 7}, 7, 4),
    ({"epochs": 2}, 5, 4),
    ({"epochs": 2, "tail": "short"}, 6, 2),
    ({"epochs": 2, "tail": "drop"}, 4, 4),
    ({"epochs": 9, "steps": 3}, 3, 4),
]


@pytest.mark.parametrize(("bounds", "num_steps", "last_rows"), ENDS)
def test_ends(bounds: dict[str, int | str], num_steps: int | None, last_rows: int) -> None:
    loader = Loader(Ids([10]), global_batch=4, seed=0, prefetch=False, **bounds)  # type: ignore[arg-type]
    assert loader.num_steps == num_steps
    if num_steps is not None:
        assert len(loader.batch(num_steps - 1, 0, 1)["id"]) == last_rows
        for call in (loader.sample_ids, loader.num_rows, lambda step: loader.batch(step, 0, 1)):
            with pytest.raises(IndexError, match=f"step {num_steps} is not in"):
                call(num_steps)
    with pytest.raises(IndexError):
        loader.batch(-1, 0, 1)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_impossible_places_are_refused(rank: int, world: int) -> None:
    loader = Loader(Ids([10]), global_batch=4, seed=0, prefetch=False)
    with pytest.raises(ValueError, match=f"rank {rank}"):
        loader.batch(0, rank, world)
    with pytest.raises(ValueError, match="micro"):
        loader.micro_batches(0, 0, 1, 0)


def test_state_is_small_and_gives_the_step_back() -> None:
    loader = Loader(Ids([10**12]), global_batch=4096, seed=2**31, prefetch=False)
    for step in (0, 1, 244_140_625, 10**12):
        text = json.dumps(loader.state(step))
        assert len(text) < 1024
        assert loader.check_state(json.loads(text)) == step
    assert loader.state(244_140_625)["epoch"] == 1  # the end of an epoch is the next one's begin
    assert loader.state(244_140_625)["position"] == 0


CHANGES: list[tuple[str, object]] = [
    ("v", 2),
    ("order_version", 99),
    ("seed", 8),
    ("lanes", 47),
    ("window", 1),
    ("mode", "global"),
    ("tail", "drop"),
    ("global_batch", 5),
    ("cursor", 41),
    ("epoch", 7),
    ("position", 3),
    ("step", -1),
    ("step", "10"),
]


@pytest.mark.parametrize(("field", "value"), CHANGES)
def test_a_state_of_another_order_is_refused(field: str, value: object) -> None:
    loader = Loader(Ids([100]), global_batch=4, seed=0, prefetch=False)
    with pytest.raises(LoaderStateError) as caught:
        loader.check_state(loader.state(10) | {field: value})
    assert caught.value.field == field and repr(value) in str(caught.value)


def test_a_state_with_a_field_missing_is_refused() -> None:
    loader = Loader(Ids([100]), global_batch=4, seed=0, prefetch=False)
    state = loader.state(10)
    for field in state:
        with pytest.raises((LoaderStateError, DatasetChangedError)):
            loader.check_state({key: value for key, value in state.items() if key != field})


def test_another_data_set_is_refused_with_what_is_known() -> None:
    state = Loader(Ids([100]), global_batch=4, seed=0, prefetch=False).state(10)
    for rows, diff in (([200], "100 rows became 200"), ([100], "same rows, other content")):
        other = Loader(Ids(rows, "e" * 64), global_batch=4, seed=0, prefetch=False)
        with pytest.raises(DatasetChangedError, match=diff):
            other.check_state(state)


def token_loader(steps: int) -> Loader:
    store = MemoryStore()
    text = np.random.default_rng(0).integers(0, 256, 500_000, np.uint8).tobytes()
    prepare_text([text], store, block_len=64, rows_per_group=500)
    return Loader(TokenDataset.open(store), global_batch=32, seed=0, steps=steps)


def test_a_prepared_token_batch_is_cheap() -> None:
    loader = token_loader(64)
    settle(loader, 0)
    times = []
    for step in range(64):
        start = time.perf_counter()
        loader.batch(step, 0, 2)
        times.append(time.perf_counter() - start)
    loader.close()
    assert sorted(times)[32] < 500e-6  # 40 us on a quiet core; the bar leaves room for a busy one


def test_real_data_sets_behind_a_loader() -> None:
    loader, store = token_loader(10), MemoryStore()
    batch = loader.batch(9, 0, 2)
    assert batch["x"].shape == (16, 64) and np.array_equal(batch["x"][:, 1:], batch["y"][:, :-1])
    loader.close()
    prepare_table({"x": np.ones((30, 4), np.float32), "y": np.arange(30)}, store, rows_per_group=7)
    table = Loader(TableDataset.open(store), global_batch=6, seed=0, epochs=1, prefetch=False)
    labels = [table.batch(step, rank, 3)["y"] for step in range(5) for rank in range(3)]
    assert sorted(np.concatenate(labels).tolist()) == list(range(30))
