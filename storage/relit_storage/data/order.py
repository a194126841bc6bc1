"""The order of samples as a pure function: position in an epoch -> (block, row).

A *block* is a row group of the data set's manifest; a *position* counts samples of one epoch in
the order in which they are consumed. Nothing is stored and a seek costs nothing, so one integer is
the whole state. Three modes:

    block        blocks are permuted and laid end to end; the stream is cut into `lanes` contiguous
                 lanes whose sizes differ by one at most; position p is element p // lanes of lane
                 p % lanes, permuted inside its lane's window of `window` rows. Reads stay local:
                 about two blocks a lane are open at a time. lanes x window of some 150,000 rows
                 shuffles as well as `global`.
    global       one permutation of all rows: for data that is fast at random.
    sequential   as written.

ORDER_VERSION names this function; a change of any bit of its output must raise it.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from relit_storage.data.permutation import Ints, derive_key, mix, permutation, permute

ORDER_VERSION = 1
Mode = Literal["block", "global", "sequential"]


class Order:
    """The order of one epoch. Immutable, safe to share between threads.

    Building costs O(number of blocks): 35 ms for a million. `num_rows` is the epoch's length;
    `lanes` is the number in effect (1 unless mode is "block").
    """

    def __init__(
        self,
        rows_per_block: Ints,
        *,
        seed: int,
        epoch: int,
        lanes: int = 48,
        window: int = 2000,
        mode: Mode = "block",
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, not {mode!r}")
        if lanes < 1 or window < 1:
            raise ValueError(f"lanes and window must be at least 1, not {lanes} and {window}")
        self.mode = mode
        self.lanes = lanes if mode == "block" else 1
        self.window = window
        self.num_rows = int(rows_per_block.sum())
        self._blocks = self._block_order(len(rows_per_block), seed, epoch)
        self._ends = np.cumsum(rows_per_block[self._blocks])
        self._starts = self._ends - rows_per_block[self._blocks]
        self._first_ids = np.cumsum(rows_per_block) - rows_per_block
        self._key = np.array([derive_key(ORDER_VERSION, "rows", seed, epoch)], np.uint64)

    def __call__(self, positions: Ints) -> tuple[Ints, Ints]:
        """(block, row in block) of each position; positions must lie in [0, num_rows)."""
        offsets = self._offsets(positions)
        # An empty block ends where it starts, so "right" on the ends never chooses one.
        slot = np.searchsorted(self._ends, offsets, side="right")
        return self._blocks[slot], offsets - self._starts[slot]

    def ids(self, blocks: Ints, rows: Ints) -> Ints:
        """The global id of each sample: its row number in the manifest's own order."""
        return self._first_ids[blocks] + rows

    def _block_order(self, num_blocks: int, seed: int, epoch: int) -> Ints:
        if self.mode != "block":
            return np.arange(num_blocks, dtype=np.int64)
        return permutation(num_blocks, derive_key(ORDER_VERSION, "blocks", seed, epoch))

    def _offsets(self, positions: Ints) -> Ints:
        """Row number in the stream of permuted blocks."""
        if self.mode == "sequential":
            return positions
        if self.mode == "global":
            return permute(positions, np.array([self.num_rows], np.int64), self._key)
        quota, longer = divmod(self.num_rows, self.lanes)
        lane, index = positions % self.lanes, positions // self.lanes
        lane_start = lane * quota + np.minimum(lane, longer)
        lane_rows = quota + (lane < longer)
        number = index // self.window
        window_start = number * self.window
        window_rows = np.minimum(self.window, lane_rows - window_start)
        key = mix(mix(self._key + lane.astype(np.uint64)) + number.astype(np.uint64))
        return lane_start + window_start + permute(index - window_start, window_rows, key)


def lane_major(positions: Ints, lanes: int) -> Ints:
    """One step's positions in canonical order: by lane, so that a rank's share is few lanes."""
    if lanes == 1:
        return positions
    return positions[np.argsort(positions % lanes, kind="stable")]


def share_bounds(num_rows: int, rank: int, world: int) -> tuple[int, int]:
    """Rank's slice [lo, hi) of a step's canonical order; sizes differ by one at most.

    Joined in rank order the slices are the canonical order, whatever the world.
    """
    return rank * num_rows // world, (rank + 1) * num_rows // world


def share(lo: int, hi: int, lanes: int, rank: int, world: int) -> Ints:
    """Rank's positions of a step that owns [lo, hi) of one epoch, in canonical order."""
    ordered = lane_major(np.arange(lo, hi, dtype=np.int64), lanes)
    first, last = share_bounds(hi - lo, rank, world)
    return ordered[first:last]
