"""Copies of other nodes' snapshots: whole or none, the newest never at stake, within the budget."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from peer_nodes import content_of, offer_of

from relit_platform.errors import BudgetError, PeerRefusedError
from relit_platform.node.peer_copies import MIN_EXTRAS_BYTES, Arriving, PeerCopies
from relit_platform.node.peer_protocol import Offer
from relit_platform.node.slots import Slot, slot_file_bytes
from relit_storage.errors import CorruptShardError

SIZE = slot_file_bytes(len(content_of(0)), MIN_EXTRAS_BYTES)
ROOM = 10 * SIZE


@pytest.fixture
def copies(tmpfs: Path) -> PeerCopies:
    made = PeerCopies(str(tmpfs / "peers"), lambda: ROOM)
    made.adopt()
    return made


def put(arriving: Arriving, number: int, damage: bool = False) -> None:
    """One chunk arrives."""
    offer = arriving.offer
    begin, end = offer.chunk_range(number)
    step = offer.step
    whole = content_of(step) if number < offer.extras_chunk else b'{"step": %d}' % step
    arriving.room(number)[:] = whole[begin:end]
    if damage:
        arriving.room(number)[0] ^= 1
    arriving.filled(number)


def receive(copies: PeerCopies, offer: Offer, *, wanted: bool = False, giver: str = "p") -> str:
    arriving = copies.begin(offer, giver, wanted=wanted)
    for number in arriving.missing:
        put(arriving, number)
    path = arriving.finish()
    arriving.stop()
    return path


def held(copies: PeerCopies) -> list[tuple[int, int, int]]:
    return sorted((i.rank, i.generation, i.step) for i in copies.infos("n"))


def test_a_copy_is_a_slot_like_any_other(copies: PeerCopies) -> None:
    path = receive(copies, offer_of(7, rank=1))
    slot = Slot.open(path)
    assert bytes(slot.image) == content_of(7) and slot.read_extras() == b'{"step": 7}'
    header = slot.info()
    assert (header.step, header.generation, header.rank, header.world) == (7, 1, 1, 2)
    [info] = copies.infos("n2")
    assert (info.path, info.node_id, info.checksums) == (path, "n2", offer_of(7).checksums)


def test_the_newest_whole_copy_is_never_overwritten(copies: PeerCopies) -> None:
    for step in range(1, 6):
        before = held(copies)[-1:]
        arriving = copies.begin(offer_of(step), "p")
        assert before == held(copies)[-1:], "as long as the next one is not whole"
        for number in arriving.missing:
            put(arriving, number)
        arriving.finish()
    assert held(copies) == [(0, 1, 4), (0, 1, 5)] and copies.used_bytes == 2 * SIZE


@pytest.mark.parametrize("generation", [1, 2])
def test_an_older_one_is_not_taken(copies: PeerCopies, generation: int) -> None:
    receive(copies, offer_of(5, generation=2))
    older = copies.begin(offer_of(4 if generation == 2 else 9, generation=generation), "p")
    assert older.missing == [] and older.finish() == copies.infos("n")[0].path
    older.stop()
    assert held(copies) == [(0, 2, 5)]
    receive(copies, offer_of(4, generation=2), wanted=True)
    assert held(copies) == [(0, 2, 4), (0, 2, 5)], "unless a restore asks for it"


def test_the_same_again_needs_nothing(copies: PeerCopies) -> None:
    receive(copies, offer_of(5))
    again = copies.begin(offer_of(5), "p")
    assert again.missing == [] and again.finish().endswith(".slot")


def test_what_was_cut_short_is_gone_on_with(copies: PeerCopies) -> None:
    first = copies.begin(offer_of(5), "p")
    for number in (0, 3, 6):
        put(first, number)
    with pytest.raises(PeerRefusedError, match="is arriving"):
        copies.begin(offer_of(6), "p")
    first.stop()
    again = copies.begin(offer_of(5), "p")
    assert again.missing == [1, 2, 4, 5] and held(copies) == []
    for number in again.missing:
        put(again, number)
    assert bytes(Slot.open(again.finish()).image) == content_of(5)


def test_a_newer_one_takes_the_place_of_one_that_was_cut_short(copies: PeerCopies) -> None:
    receive(copies, offer_of(4))
    cut_short = copies.begin(offer_of(5), "p")
    put(cut_short, 0)
    cut_short.stop()
    receive(copies, offer_of(6))
    assert held(copies) == [(0, 1, 4), (0, 1, 6)] and copies.used_bytes == 2 * SIZE


def test_what_has_not_changed_is_not_asked_for(copies: PeerCopies) -> None:
    receive(copies, offer_of(4))
    arriving = copies.begin(offer_of(5), "p")
    frozen = [a == b for a, b in zip(offer_of(4).checksums, offer_of(5).checksums, strict=True)]
    assert arriving.missing == [n for n, same in enumerate([*frozen, False]) if not same]
    for number in arriving.missing:
        put(arriving, number)
    assert bytes(Slot.open(arriving.finish()).image) == content_of(5)


@pytest.mark.parametrize("number", [0, 5, 6])
def test_a_chunk_that_is_damaged_does_not_count(copies: PeerCopies, number: int) -> None:
    arriving = copies.begin(offer_of(5), "p")
    with pytest.raises(CorruptShardError, match=f"chunk {number} fails its checksum"):
        put(arriving, number, damage=True)
    assert number in arriving.missing
    with pytest.raises(CorruptShardError, match="missing"):
        arriving.finish()


def test_over_the_budget_is_refused_and_what_is_here_stays(tmpfs: Path) -> None:
    copies = PeerCopies(str(tmpfs / "peers"), lambda: 2 * SIZE)
    copies.adopt()
    receive(copies, offer_of(5, rank=0))
    receive(copies, offer_of(5, rank=1))
    for offer in (offer_of(6, rank=0), offer_of(5, rank=2, world=3)):
        with pytest.raises(BudgetError, match="copy of rank"):
            copies.begin(offer, "p")
    assert held(copies) == [(0, 1, 5), (1, 1, 5)]


def tight(tmpfs: Path, count: int) -> PeerCopies:
    """Room for so many copies and no more; also another life on the same files."""
    made = PeerCopies(str(tmpfs / "peers"), lambda: count * SIZE)
    made.adopt()
    return made


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(("generation", "giver"), [(1, "b"), (2, "b"), (2, "a")])
def test_what_a_former_neighbour_gave_makes_room(
    tmpfs: Path, generation: int, giver: str, restarted: bool
) -> None:
    """Or the same one, of ranks that are no longer there."""
    copies = tight(tmpfs, 2)
    for step in (4, 5):
        receive(copies, offer_of(step, rank=0), giver="a")
    if restarted:
        copies = tight(tmpfs, 2)
    receive(copies, offer_of(5, rank=1, generation=generation), giver=giver)
    assert held(copies) == [(0, 1, 5), (1, generation, 5)], "its newest one may be needed yet"
    for step in (6, 7, 8):
        receive(copies, offer_of(step, rank=1, generation=generation), giver=giver)
    assert held(copies) == [(1, generation, 7), (1, generation, 8)]


def test_ranks_of_one_neighbour_do_not_drive_each_other_out(tmpfs: Path) -> None:
    copies = tight(tmpfs, 3)
    for rank, step in ((0, 5), (1, 5), (0, 6)):
        receive(copies, offer_of(step, rank=rank))
    with pytest.raises(BudgetError):
        copies.begin(offer_of(6, rank=1), "p")
    assert held(copies) == [(0, 1, 5), (0, 1, 6), (1, 1, 5)]


def test_what_was_cut_short_makes_room_for_a_newer_cut(tmpfs: Path) -> None:
    copies = tight(tmpfs, 2)
    receive(copies, offer_of(4, rank=0))
    cut_short = copies.begin(offer_of(4, rank=1), "a")
    put(cut_short, 0)
    with pytest.raises(BudgetError):
        copies.begin(offer_of(5, rank=0), "p")
    cut_short.stop()
    receive(copies, offer_of(5, rank=0))
    assert held(copies) == [(0, 1, 4), (0, 1, 5)]


def test_what_was_fetched_for_another_step_makes_room(tmpfs: Path) -> None:
    copies = tight(tmpfs, 2)
    receive(copies, offer_of(6, rank=0), giver="a")
    receive(copies, offer_of(6, rank=1), wanted=True)
    receive(copies, offer_of(5, rank=1), wanted=True)
    assert held(copies) == [(0, 1, 6), (1, 1, 5)]
    with pytest.raises(BudgetError):
        copies.begin(offer_of(5, rank=2, world=3), "q", wanted=True)
    with pytest.raises(BudgetError):  # the restore goes on
        copies.begin(offer_of(7, rank=2, world=3), "a")
    receive(copies, offer_of(7, rank=2, world=3, generation=2), giver="b")
    assert held(copies) == [(0, 1, 6), (2, 2, 7)], "by now it is over"


def test_a_fetched_copy_that_is_given_as_well_is_one_like_any_other(tmpfs: Path) -> None:
    copies = tight(tmpfs, 1)
    receive(copies, offer_of(5, rank=1), wanted=True)
    assert copies.begin(offer_of(5, rank=1), "b").missing == []
    with pytest.raises(BudgetError):
        copies.begin(offer_of(4, rank=0), "q", wanted=True)
    assert held(copies) == [(1, 1, 5)]


def test_older_cuts_make_room_for_a_restore_but_not_in_vain(tmpfs: Path) -> None:
    room = [2 * SIZE]
    copies = PeerCopies(str(tmpfs / "peers"), lambda: room[0])
    copies.adopt()
    receive(copies, offer_of(3, rank=0), giver="a")
    receive(copies, offer_of(5, rank=2, world=3), giver="a")
    room[0] = SIZE
    with pytest.raises(BudgetError):
        copies.begin(offer_of(5, rank=1), "q", wanted=True)
    assert held(copies) == [(0, 1, 3), (2, 1, 5)]
    room[0] = 2 * SIZE
    receive(copies, offer_of(5, rank=1), wanted=True)
    assert held(copies) == [(1, 1, 5), (2, 1, 5)]


def test_slots_that_nobody_needs_make_room_first(tmpfs: Path) -> None:
    room = [SIZE]
    reaped: list[int] = []

    def reap(generation: int) -> None:
        reaped.append(generation)
        room[0] = 2 * SIZE

    copies = PeerCopies(str(tmpfs / "peers"), lambda: room[0], reap)
    copies.adopt()
    receive(copies, offer_of(4, rank=0), giver="a")
    assert reaped == []
    receive(copies, offer_of(5, rank=1, generation=3), giver="b")
    assert reaped == [3] and held(copies) == [(0, 1, 4), (1, 3, 5)]


def test_copies_yield_the_older_ones_first(copies: PeerCopies) -> None:
    for rank, step in [(0, 4), (0, 5), (1, 7), (1, 8)]:
        receive(copies, offer_of(step, rank=rank))
    arriving = copies.begin(offer_of(9, rank=1), "p")
    assert copies.shrink(4 * SIZE) == 0
    assert copies.shrink(2 * SIZE) == 1 and held(copies) == [(0, 1, 5), (1, 1, 8)]
    for number in arriving.missing:
        put(arriving, number)
    with pytest.raises(CorruptShardError, match="memory was needed"):
        arriving.finish()
    assert copies.shrink(SIZE) == 1 and held(copies) == [(1, 1, 8)]
    assert copies.shrink(0) == 1 and copies.used_bytes == 0


def test_another_life_takes_over_what_is_whole(copies: PeerCopies, tmpfs: Path) -> None:
    kept = receive(copies, offer_of(5, rank=0))
    receive(copies, offer_of(5, rank=1))
    cut_short = copies.begin(offer_of(6, rank=1), "p")
    put(cut_short, 0)
    lost = receive(copies, offer_of(5, rank=2, world=3))
    Path(lost + ".offer").write_bytes(b"{}")
    (tmpfs / "peers" / "folder.slot").mkdir()
    again = PeerCopies(str(tmpfs / "peers"), lambda: ROOM)
    again.adopt()
    assert held(again) == [(0, 1, 5), (1, 1, 5)] and again.used_bytes == 2 * SIZE
    assert again.find(offer_of(5).place) is not None and Path(kept).exists()
    names = {path.name for path in (tmpfs / "peers").iterdir()}
    assert len(names) == 5, f"two slots, two offers, and a folder that is no copy: {names}"
    receive(again, offer_of(7, rank=0))
    assert held(again) == [(0, 1, 5), (0, 1, 7), (1, 1, 5)]


def test_a_full_tmpfs_at_the_very_end_costs_a_repetition(
    copies: PeerCopies, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    arriving = copies.begin(offer_of(5), "p")
    for number in arriving.missing:
        put(arriving, number)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(OSError, match="No space left"):
            arriving.finish()
    arriving.stop()
    assert held(copies) == [] and [p.suffix for p in (tmpfs / "peers").iterdir()] == [".slot"]
    again = copies.begin(offer_of(5), "p")
    assert again.missing == []
    again.finish()
    assert held(copies) == held(tight(tmpfs, 9)) == [(0, 1, 5)]


def test_a_death_just_before_a_copy_counts_leaves_nothing(
    copies: PeerCopies, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(slot: Slot) -> None:
        raise KeyboardInterrupt

    arriving = copies.begin(offer_of(5), "p")
    for number in arriving.missing:
        put(arriving, number)
    with monkeypatch.context() as patch:
        patch.setattr(Slot, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            arriving.finish()
    assert len(list((tmpfs / "peers").iterdir())) == 2, "the slot and what was offered"
    assert held(tight(tmpfs, 9)) == [] and list((tmpfs / "peers").iterdir()) == []


def test_a_snapshot_of_another_size_takes_another_file(copies: PeerCopies) -> None:
    receive(copies, offer_of(5))
    content = content_of(6) + b"more"
    other = Offer.of(offer_of(6).place, memoryview(content), b"{}", 4096)
    arriving = copies.begin(other, "p")
    for number in arriving.missing:
        begin, end = other.chunk_range(number)
        arriving.room(number)[:] = (content if number < other.extras_chunk else b"{}")[begin:end]
        arriving.filled(number)
    arriving.finish()
    receive(copies, offer_of(7))
    assert held(copies) == [(0, 1, 6), (0, 1, 7)]
