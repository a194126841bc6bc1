"""Batches as a pure function of (step, rank, world): resume and resize need no state but a step.

A Loader answers for any step, rank and world at any time, from any thread. Everything else here
is speed: steps are planned, read and gathered in chunks of up to 64, and one background thread
prepares the chunk after the one in use (prefetch.py). Right after a seek single steps are served
directly, so that the first batch does not wait for a whole chunk.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from relit_storage.data.ledger import LedgerRow, ids_digest
from relit_storage.data.order import ORDER_VERSION, Mode, Order, share_bounds
from relit_storage.data.permutation import Ints
from relit_storage.data.plan import StepPlan, plan_steps
from relit_storage.data.prefetch import Prefetcher
from relit_storage.data.schedule import Schedule, Tail
from relit_storage.errors import DatasetChangedError, LoaderStateError

Batch = dict[str, npt.NDArray[Any]]

STATE_VERSION = 1
_CHUNK_STEPS = 64
_CHUNK_ROWS = 1 << 16
_CHUNK_BYTES = 16 << 20
_KEPT_PLANS = 3  # in use, next, and one that a seek left
_KEPT_ORDERS = 2  # under tail "carry" a step may cover two epochs


class Dataset(Protocol):
    """What a Loader needs of a data set: TokenDataset, TableDataset, or a user's own.

    A block is the unit of reading; `rows_per_block` is int64. `fingerprint` must change whenever
    any sample or their order does. `row_bytes` is the stored size of a sample.
    """

    fingerprint: str
    rows_per_block: Ints
    row_bytes: int

    def gather(self, blocks: Ints, rows: Ints) -> Batch:
        """Samples (blocks[i], rows[i]) in stored form, in that order, as new arrays.

        May block on storage; called from the caller's and the prefetch thread.
        """
        ...

    def to_batch(self, columns: Batch) -> Batch:
        """Fresh arrays for the user, who may change them, from a slice of `gather`'s; cheap."""
        ...


@dataclass(frozen=True, slots=True)
class _Share:
    """One rank's samples of a chunk; bounds[i] is where step first + i lies in the columns."""

    first: int
    bounds: list[tuple[int, int]]
    columns: Batch


class Loader:
    """Serves the global batches of a data set; one per rank and process, from any thread.

    Arguments up to `tail` are the identity of the order: a resumed run must give the same, which
    `check_state` enforces. `prefetch=False` starts no thread and reads each step when asked.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch: int,
        seed: int,
        lanes: int = 48,
        window: int = 2000,
        mode: Mode = "block",
        tail: Tail = "carry",
        epochs: int | None = None,
        steps: int | None = None,
        prefetch: bool = True,
    ) -> None:
        self.dataset = dataset
        self.schedule = Schedule(
            num_rows=int(dataset.rows_per_block.sum()),
            global_batch=global_batch,
            tail=tail,
            epochs=epochs,
            steps=steps,
        )
        self._seed = seed
        self._lanes = lanes
        self._window = window
        self._mode: Mode = mode
        self._chunk_steps = _chunk_steps(global_batch, dataset.row_bytes)
        self._lock = threading.Lock()
        self._orders: dict[int, Order] = {}
        self._plans: dict[int, StepPlan] = {}
        self._shares = Prefetcher(self._gather_share) if prefetch else None

    @property
    def num_steps(self) -> int | None:
        """Steps in all, or None if neither epochs nor steps bound them."""
        return self.schedule.num_steps

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """Rank's share of step `step` (0-based: the number of completed steps), to keep and change.

        Joined in rank order the shares are the global batch in canonical order, whatever the
        world; sizes differ by one at most, so an array has 0 rows if the batch is too small.
        Some 20 us when prepared; blocks on storage otherwise. Raises IndexError beyond the end,
        CorruptShardError and StoreError from reading.
        """
        _check_rank(rank, world)
        self.schedule.check(step)
        share = self._prepared(step, rank, world)
        if share is None:
            return self._direct(step, rank, world)
        lo, hi = share.bounds[step - share.first]
        return self.dataset.to_batch({name: col[lo:hi] for name, col in share.columns.items()})

    def micro_batches(
        self, step: int, rank: int, world: int, micro: int | None = None
    ) -> list[Batch]:
        """`batch` in as few equal pieces of at most `micro` rows as possible (None: one piece).

        Pieces differ by one row at most: weigh each by its rows. [] for a share of 0 rows.
        """
        if micro is not None and micro < 1:
            raise ValueError(f"micro must be at least 1, not {micro}")
        num_rows = self.num_rows(step, rank, world)
        if num_rows == 0:
            return []
        batch = self.batch(step, rank, world)
        pieces = 1 if micro is None else -(-num_rows // micro)
        cuts = [share_bounds(num_rows, piece, pieces) for piece in range(pieces)]
        return [{name: col[lo:hi] for name, col in batch.items()} for lo, hi in cuts]

    def num_rows(self, step: int, rank: int = 0, world: int = 1) -> int:
        """Samples in rank's share of a step; with the defaults, in the global batch."""
        _check_rank(rank, world)
        lo, hi = share_bounds(self.schedule.step_rows(step), rank, world)
        return hi - lo

    def sample_ids(self, step: int) -> Ints:
        """Global ids of the step's samples in canonical order: row numbers of the data set."""
        plan = self._plan(step)
        lo, hi = plan.bounds(step)
        return plan.ids[lo:hi]

    def ledger_row(self, step: int, *, world: int, generation: int) -> LedgerRow:
        """The audit ledger's row for a completed step; called by one rank."""
        epoch, lo = self.schedule.place(step)
        return LedgerRow(
            step=step,
            epoch=epoch,
            lo=lo,
            hi=lo + self.schedule.step_rows(step),
            world=world,
            generation=generation,
            digest=ids_digest(self.sample_ids(step)),
        )

    def state(self, step: int) -> dict[str, Any]:
        """The position after `step` completed steps, as JSON under 1 KiB; equal on all ranks."""
        epoch, position = self.schedule.place(step)
        cursor = {"step": step, "cursor": self.schedule.cursor(step)}
        return self._identity() | cursor | {"epoch": epoch, "position": position}

    def check_state(self, state: dict[str, Any]) -> int:
        """The step at which a saved `state` stands, if it belongs to this order of this data.

        Raises DatasetChangedError, or LoaderStateError naming the field. A missing field is
        refused; it never means the beginning.
        """
        if state.get("fingerprint") != self.dataset.fingerprint:
            raise self._changed(state)
        step = state.get("step")
        if not isinstance(step, int) or step < 0:
            raise LoaderStateError(field="step", expected=step, found="a number of steps")
        for field, ours in self.state(step).items():
            if state.get(field) != ours:
                raise LoaderStateError(field=field, expected=state.get(field), found=ours)
        return step

    def close(self) -> None:
        """End the background thread, waiting for at most one chunk. The loader stays usable."""
        if self._shares is not None:
            self._shares.close()

    def _identity(self) -> dict[str, Any]:
        return {
            "v": STATE_VERSION,
            "fingerprint": self.dataset.fingerprint,
            "num_rows": self.schedule.num_rows,
            "order_version": ORDER_VERSION,
            "seed": self._seed,
            "lanes": self._lanes,
            "window": self._window,
            "mode": self._mode,
            "tail": self.schedule.tail,
            "global_batch": self.schedule.global_batch,
        }

    def _changed(self, state: dict[str, Any]) -> DatasetChangedError:
        before, now = state.get("num_rows"), self.schedule.num_rows
        diff = [f"{before} rows became {now}"] if before != now else ["same rows, other content"]
        found, expected = self.dataset.fingerprint, state.get("fingerprint")
        return DatasetChangedError(expected=expected, found=found, diff=diff)

    def _prepared(self, step: int, rank: int, world: int) -> _Share | None:
        if self._shares is None:
            return None
        chunk = step // self._chunk_steps
        first, end = self._chunk_range(chunk + 1)
        has_next = first < end
        return self._shares.get((rank, world), chunk, has_next=has_next)

    def _direct(self, step: int, rank: int, world: int) -> Batch:
        plan = self._plan(step)
        lo, hi = _share_of(plan, step, rank, world)
        return self.dataset.to_batch(self.dataset.gather(plan.blocks[lo:hi], plan.rows[lo:hi]))

    def _gather_share(self, stream: tuple[int, int], chunk: int) -> _Share:
        """All of a rank's samples of a chunk, each block read once. Runs in the thread."""
        rank, world = stream
        plan = self._plan(chunk * self._chunk_steps)
        steps = range(plan.first, plan.first + len(plan.starts) - 1)
        cuts = [_share_of(plan, step, rank, world) for step in steps]
        chosen = np.concatenate([np.arange(lo, hi) for lo, hi in cuts])
        columns = self.dataset.gather(plan.blocks[chosen], plan.rows[chosen])
        ends = np.cumsum([hi - lo for lo, hi in cuts]).tolist()
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        return _Share(plan.first, bounds, columns)

    def _plan(self, step: int) -> StepPlan:
        """The plan of the chunk that holds `step`. Raises IndexError beyond the end."""
        self.schedule.check(step)
        chunk = step // self._chunk_steps
        with self._lock:
            plan = self._plans.get(chunk)
        if plan is None:  # made outside the lock: the other thread's lookups must not wait for it
            plan = plan_steps(self.schedule, self._order, *self._chunk_range(chunk))
            with self._lock:
                _remember(self._plans, chunk, plan, _KEPT_PLANS)
        return plan

    def _chunk_range(self, chunk: int) -> tuple[int, int]:
        """The steps [first, end) of a chunk."""
        first, end = chunk * self._chunk_steps, (chunk + 1) * self._chunk_steps
        num_steps = self.schedule.num_steps
        return first, end if num_steps is None else min(end, num_steps)

    def _order(self, epoch: int) -> Order:
        with self._lock:
            order = self._orders.get(epoch)
        if order is None:
            order = Order(
                self.dataset.rows_per_block,
                seed=self._seed,
                epoch=epoch,
                lanes=self._lanes,
                window=self._window,
                mode=self._mode,
            )
            with self._lock:
                _remember(self._orders, epoch, order, _KEPT_ORDERS)
        return order


T = TypeVar("T")


def _remember(kept: dict[int, T], key: int, value: T, count: int) -> None:
    """Keep the `count` values that were added last."""
    kept[key] = value
    while len(kept) > count:
        del kept[next(iter(kept))]


def _share_of(plan: StepPlan, step: int, rank: int, world: int) -> tuple[int, int]:
    """Rank's slice of a plan's arrays for one step."""
    start, end = plan.bounds(step)
    lo, hi = share_bounds(end - start, rank, world)
    return start + lo, start + hi


def _chunk_steps(global_batch: int, row_bytes: int) -> int:
    by_rows = _CHUNK_ROWS // global_batch
    by_bytes = _CHUNK_BYTES // (global_batch * max(row_bytes, 1))
    return max(1, min(_CHUNK_STEPS, by_rows, by_bytes))


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not in [0, {world})")
