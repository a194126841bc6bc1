"""Slots of a node: a successor always gets its own, and one more only if copies have room, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from node_harness import LAYOUT
from peer_nodes import fill

from relit_platform.errors import BudgetError
from relit_platform.node.slot_pool import SlotPool
from relit_platform.node.slots import Slot, slot_file_bytes

EXTRAS_BYTES = 1000
SIZE = slot_file_bytes(LAYOUT.total_bytes, EXTRAS_BYTES)


def pool_of(tmpfs: Path, count: int) -> SlotPool:
    """Room for so many slots."""
    (tmpfs / "slots").mkdir()
    return SlotPool(str(tmpfs / "slots"), count * SIZE)


def opened(
    pool: SlotPool, worker: str, *others: str, count: int = 3, busy: tuple[str, ...] = ()
) -> list[Slot]:
    """What a worker gets that is alive, with others."""
    paths = pool.open_for(
        worker,
        count,
        LAYOUT.total_bytes,
        EXTRAS_BYTES,
        alive=frozenset({worker, *others}),
        busy=frozenset(busy),
    )
    return [Slot.open(path) for path in paths]


def fill_all(slots: list[Slot], generation: int = 1, rank: int = 0) -> None:
    for step, slot in enumerate(slots, 1):
        fill(slot, step, generation=generation, rank=rank)


def left(pool: SlotPool) -> list[tuple[int, int, int]]:
    return sorted((i.rank, i.generation, i.step) for i in pool.infos("n")[0])


def test_a_rank_that_dies_again_and_again_gets_slots_each_time(tmpfs: Path) -> None:
    """Of two nodes' ranks, so none of it is whole here, and no commit is newer than it."""
    pool = pool_of(tmpfs, 5)
    kept: list[list[tuple[int, int, int]]]
    kept = [[], [(0, 1, 2), (0, 1, 3)], [(0, 1, 3), (0, 2, 3)], [(0, 3, 3)]]
    for life, expected in enumerate(kept):
        slots = opened(pool, f"w{life}")
        assert len(slots) == 3 and left(pool) == expected
        fill_all(slots, generation=life + 1)


def test_each_ranks_newest_snapshot_is_never_given_up(tmpfs: Path) -> None:
    pool = pool_of(tmpfs, 6)
    for rank in (0, 1):
        fill_all(opened(pool, f"w{rank}", "w0"), rank=rank)
    with pytest.raises(BudgetError):
        opened(pool, "w2", count=5)
    assert left(pool) == [(0, 1, 3), (1, 1, 3)]
    assert len(opened(pool, "w2", count=4)) == 4


def test_what_is_being_persisted_or_belongs_to_the_living_stays(tmpfs: Path) -> None:
    pool = pool_of(tmpfs, 8)
    slots = opened(pool, "w0")
    fill_all(slots)
    fill_all(opened(pool, "w1", "w0"), rank=1)
    slots[0].pin()
    with pytest.raises(BudgetError):
        opened(pool, "w2", "w1", busy=(slots[1].path,))
    assert len(left(pool)) == 6
    slots[0].unpin()
    opened(pool, "w2", "w1", busy=(slots[1].path,))
    assert left(pool) == [(0, 1, 2), (0, 1, 3), (1, 1, 1), (1, 1, 2), (1, 1, 3)]


@pytest.mark.parametrize(("room", "granted"), [(5, False), (6, True)])
def test_one_more_slot_leaves_room_for_two_copies(tmpfs: Path, room: int, granted: bool) -> None:
    pool = pool_of(tmpfs, room)
    fill_all(opened(pool, "w0"))
    if granted:
        assert len(opened(pool, "w0", count=1)) == 1
    else:
        with pytest.raises(BudgetError):
            opened(pool, "w0", count=1)
    assert pool.used_bytes() == (4 if granted else 3) * SIZE


def test_one_more_slot_leaves_room_for_the_copies_of_as_many_ranks(tmpfs: Path) -> None:
    pool = pool_of(tmpfs, 11)
    fill_all(opened(pool, "w0", "w1"))
    fill_all(opened(pool, "w1", "w0"))
    assert len(opened(pool, "w0", "w1", "spare", count=1)) == 1
    with pytest.raises(BudgetError):
        opened(pool, "w1", "w0", "spare", count=1)


def test_nothing_is_given_up_for_one_more_slot(tmpfs: Path) -> None:
    pool = pool_of(tmpfs, 7)
    fill_all(opened(pool, "w0"))
    fill_all(opened(pool, "w1"), generation=2)
    with pytest.raises(BudgetError):
        opened(pool, "w1", count=1)
    assert len(left(pool)) == 6


def test_dead_slots_of_older_generations_only(tmpfs: Path) -> None:
    pool = pool_of(tmpfs, 9)
    for generation in (1, 2):
        fill_all(opened(pool, f"w{generation}"), generation=generation)
    assert pool.free_dead(frozenset(), frozenset(), (9, 9), before=2) == 3
    assert left(pool) == [(0, 2, 1), (0, 2, 2), (0, 2, 3)]
