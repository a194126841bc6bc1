"""Persists that begin while the snapshot is still being copied: what may count, and what not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from node_harness import LAYOUT, Node, abandon, wait_until, worker

from relit_platform.facts import ShardFailed, ShardPersisted
from relit_platform.node import growing as growing_module
from relit_platform.node import persisting
from relit_platform.node.growing import GivenUp, Growing
from relit_platform.node.keeper import NodeKeeper
from relit_platform.node.persist import persist_slot
from relit_platform.node.persisting import Persister
from relit_platform.node.slots import Slot, SlotState, create_slot
from relit_platform.worker import staging
from relit_platform.worker.snapshot import Snapshotter
from relit_storage.run.layout import shard_key

CHUNK = 8192  # of the node's config; the image has three
TOTAL = LAYOUT.total_bytes
PLACE = (7, 1)  # step and generation


class Copier:
    """The rank's side, by hand: bytes of the image, and how far they are final."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.slot = Slot.open(path)

    def begin(self, step: int = 7, generation: int = 1, rank: int = 0) -> None:
        self.slot.begin(generation, step, rank, 1)
        self.slot.image[: LAYOUT.header_bytes] = LAYOUT.header
        self.slot.set_extras(b'{"step":%d}' % step)
        self.slot.mark_final(LAYOUT.header_bytes)

    def fill(self, end: int, value: int = 1) -> None:
        begin = max(self.slot.final_bytes, LAYOUT.header_bytes)
        self.slot.image[begin:end] = bytes([value]) * (end - begin)
        self.slot.mark_final(end)

    def commit(self) -> None:
        self.slot.commit()
        self.slot.pin()


class Halting:
    """Stands for the sleep of a wait: what happens meanwhile, one after the other; then no more."""

    def __init__(self, *events: Callable[[], object]) -> None:
        self.events = list(events)
        self.now_s = 0.0

    def __call__(self, seconds: float) -> None:
        self.now_s += seconds
        if self.events:
            self.events.pop(0)()


@pytest.fixture
def copier(tmp_path: Path) -> Copier:
    create_slot(str(tmp_path / "slot"), TOTAL, 100)
    return Copier(str(tmp_path / "slot"))


def watched(copier: Copier, halt: Halting, alive: Callable[[], bool] = lambda: True) -> Growing:
    return Growing(Slot.open(copier.path), *PLACE, alive, clock=lambda: halt.now_s, sleep=halt)


def test_it_waits_for_each_byte_and_for_the_last_until_the_snapshot_is_pinned(
    copier: Copier,
) -> None:
    copier.begin()
    halt = Halting(
        lambda: copier.fill(5000),
        lambda: copier.fill(CHUNK),
        lambda: copier.fill(TOTAL),
        copier.slot.commit,
        copier.slot.pin,
    )
    growing = watched(copier, halt)
    growing.reach(1)
    assert len(halt.events) == 5
    growing.reach(CHUNK)
    assert len(halt.events) == 3
    growing.reach(CHUNK)
    assert len(halt.events) == 3 and not growing.whole()
    growing.reach(TOTAL)
    assert not halt.events and growing.whole()


def again(copier: Copier) -> None:
    """The snapshot is given up, and the slot used for the same step once more."""
    copier.begin()
    copier.fill(TOTAL, 9)
    copier.commit()


def another(copier: Copier) -> None:
    copier.slot.commit()
    copier.begin(step=8)
    copier.fill(TOTAL, 9)
    copier.commit()


def stale(copier: Copier) -> None:
    """Begun again, and nothing copied yet: what was final is not."""
    copier.begin()
    copier.slot.mark_final(0)


@pytest.mark.parametrize("event", [again, another, stale])
def test_a_slot_that_is_used_again_gives_it_up(
    copier: Copier, event: Callable[[Copier], None]
) -> None:
    copier.begin()
    copier.fill(CHUNK)
    growing = watched(copier, Halting(lambda: event(copier)))
    growing.reach(CHUNK)
    with pytest.raises(GivenUp, match="another snapshot"):
        growing.reach(TOTAL)
    assert not growing.whole()


def test_a_copy_that_stands_still_or_loses_its_process_gives_it_up(copier: Copier) -> None:
    copier.begin()
    copier.fill(CHUNK)
    halt = Halting(lambda: copier.fill(CHUNK + 1))
    with pytest.raises(GivenUp, match=f"no progress at byte {CHUNK + 1}"):
        watched(copier, halt).reach(TOTAL)
    assert halt.now_s >= growing_module.PATIENCE_S
    with pytest.raises(GivenUp, match="process is gone"):
        watched(copier, Halting(), alive=lambda: False).reach(TOTAL)


def empty(copier: Copier) -> None:
    pass


def whole_already(copier: Copier) -> None:
    copier.begin()
    copier.fill(TOTAL)
    copier.commit()


def of_step_8(copier: Copier) -> None:
    copier.begin(step=8)


def of_generation_2(copier: Copier) -> None:
    copier.begin(generation=2)


@pytest.mark.parametrize("state", [empty, whole_already, of_step_8, of_generation_2])
def test_only_what_is_being_copied_grows(copier: Copier, state: Callable[[Copier], None]) -> None:
    state(copier)
    with pytest.raises(GivenUp, match="something else"):
        watched(copier, Halting())


# ---- in an agent ----


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No whole slot is persisted before it is set."""
    gate, real = threading.Event(), persist_slot

    def held(*args: Any) -> ShardPersisted:
        assert gate.wait(10)
        return real(*args)

    monkeypatch.setattr(persisting, "persist_slot", held)
    return gate


def begun(node: Node, keeper: NodeKeeper, done_bytes: int = CHUNK) -> Copier:
    """Step 7 is being copied, and the agent has written what is there and waits for more."""
    copier = Copier(worker(keeper)[0])
    copier.begin()
    copier.fill(done_bytes)
    keeper.persist_growing("w0", copier.path, *PLACE)
    wait_until(lambda: any(pending(node)), "the write has begun")
    return copier


def pending(node: Node) -> Iterator[Path]:
    folder = (node.root / shard_key(7, 1, 0)).parent
    return (path for path in folder.glob(".*.tmp") if path.stat().st_size >= 0)


def done(node: Node, keeper: NodeKeeper) -> list[Any]:
    wait_until(lambda: not keeper._persister.busy(), "nothing is being written")
    return [fact for fact in node.facts if isinstance(fact, ShardPersisted | ShardFailed)]


def test_the_first_chunk_is_on_its_way_before_the_last_is_copied(node: Node) -> None:
    keeper = node.boot()
    copier = begun(node, keeper)
    wait_until(lambda: sum(p.stat().st_size for p in pending(node)) >= CHUNK, "a chunk is there")
    copier.fill(TOTAL)
    copier.commit()
    keeper.persist("w0", copier.path, *PLACE)
    [shard] = done(node, keeper)
    assert isinstance(shard, ShardPersisted) and shard.step == 7
    assert (node.root / shard.file).read_bytes() == bytes(copier.slot.image)
    assert (node.root / shard.extras_file).read_bytes() == b'{"step":7}'
    assert not copier.slot.pinned and not list(pending(node))


def test_a_pinned_snapshot_is_persisted_though_nobody_asks(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank died between its pin and its message. Without the sweep, that would find it, too."""
    monkeypatch.setattr(Persister, "sweep", lambda self: None)
    keeper = node.boot()
    copier = begun(node, keeper)
    copier.fill(TOTAL)
    copier.commit()
    assert node.wait_for(ShardPersisted)[0].step == 7


def test_a_late_question_for_what_was_served_touches_nothing(node: Node) -> None:
    """Its slot is not pinned any more, and may hold anything by then."""
    keeper = node.boot()
    copier = begun(node, keeper)
    copier.fill(TOTAL)
    copier.commit()
    node.wait_for(ShardPersisted)
    wait_until(lambda: not copier.slot.pinned, "unpinned")
    keeper.persist("w0", copier.path, *PLACE)
    assert len(done(node, keeper)) == 1


@pytest.mark.parametrize("after", ["another step", "the same step again", "nothing yet"])
def test_a_question_that_is_answered_late_leaves_the_next_snapshot_alone(
    node: Node, gate: threading.Event, after: str
) -> None:
    """It was queued in time, behind another rank's snapshot, and served early meanwhile."""
    keeper = node.boot()
    first, second = (Copier(path) for path in worker(keeper))
    first.begin(step=6)
    first.fill(TOTAL)
    first.commit()
    keeper.persist("w0", first.path, 6, 1)  # holds the thread
    second.begin()
    second.fill(TOTAL)
    second.commit()
    keeper.persist("w0", second.path, *PLACE)
    second.slot.unpin()
    second.begin(step=8 if after == "another step" else 7)
    if after != "nothing yet":
        second.fill(TOTAL, 9)
        second.slot.commit()
    if after == "another step":
        second.slot.pin()
    gate.set()
    assert [fact.step for fact in done(node, keeper)] == [6]
    assert second.slot.pinned is (after == "another step")


def given_up(copier: Copier, keeper: NodeKeeper) -> None:
    """A parameter was changed outside the update: the next snapshot takes the slot."""
    copier.begin(step=8)


def same_step_again(copier: Copier, keeper: NodeKeeper) -> None:
    """Given up and then copied at the boundary, as the last save of a run is, with other bytes."""
    copier.begin()
    copier.fill(TOTAL, 9)
    copier.commit()
    keeper.persist("w0", copier.path, *PLACE, last=True)


@pytest.mark.parametrize(("event", "persisted"), [(given_up, False), (same_step_again, True)])
def test_what_was_given_up_leaves_nothing(
    node: Node, event: Callable[[Copier, NodeKeeper], None], persisted: bool
) -> None:
    keeper = node.boot()
    copier = begun(node, keeper)
    event(copier, keeper)
    facts = done(node, keeper)
    assert [type(fact) for fact in facts] == [ShardPersisted] * persisted
    assert not list(pending(node))
    if persisted:
        assert (node.root / facts[0].file).read_bytes() == bytes(copier.slot.image)
        assert copier.slot.image[LAYOUT.header_bytes] == 9
    else:
        assert not (node.root / shard_key(7, 1, 0)).parent.parent.exists()


def test_a_dead_ranks_copy_holds_up_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_module, "PATIENCE_S", 60.0)
    keeper = node.boot()
    keeper.hello("w1", node.child(), 1)
    [path] = keeper.open_slots("w1", 1, TOTAL, 1000)
    copier = Copier(path)
    copier.begin(rank=1)
    copier.fill(CHUNK)
    keeper.persist_growing("w1", path, *PLACE)
    wait_until(lambda: bool(keeper._persister.busy()), "the write has begun")
    node.children[-1].kill()
    assert done(node, keeper) == []
    assert copier.slot.info().state is SlotState.WRITING


def test_a_generation_that_is_over_is_not_begun(node: Node) -> None:
    keeper = node.boot()
    copier = Copier(worker(keeper)[0])
    copier.begin()
    keeper.seal(1, 2)
    keeper.persist_growing("w0", copier.path, *PLACE)
    assert done(node, keeper) == [] and not list(pending(node))


def test_a_record_that_is_there_is_replaced_only_by_a_whole_snapshot(node: Node) -> None:
    keeper = node.boot()
    copier = Copier(worker(keeper)[0])
    file = node.root / shard_key(7, 1, 0)
    for value in (1, 2):
        copier.begin()
        keeper.persist_growing("w0", copier.path, *PLACE)
        copier.fill(TOTAL, value)
        if value == 2:
            wait_until(lambda: not keeper._persister.busy(), "refused")
            assert file.read_bytes()[-1] == 1
        copier.commit()
        keeper.persist("w0", copier.path, *PLACE)
        node.wait_for(ShardPersisted, value)
        wait_until(lambda: not copier.slot.pinned, "unpinned")
    assert file.read_bytes()[-1] == 2


def test_an_agent_that_ends_in_between_leaves_the_rest_to_the_next(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing_module, "PATIENCE_S", 0.05)
    keeper = node.boot()
    copier = begun(node, keeper)
    abandon(keeper)
    assert done(node, keeper) == []
    copier.fill(TOTAL)
    copier.commit()
    node.boot()
    assert node.wait_for(ShardPersisted)[0].step == 7


# ---- in a rank ----


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([4], [(0, 1)]),
        ([4, 4, 4], [(0, 2), (2, 3)]),
        ([100, 1, 1], [(0, 1), (1, 3)]),
        ([8] * 80, [(first, first + 10) for first in range(0, 80, 10)]),
    ],
)
def test_a_copy_goes_in_few_parts_none_small(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], expected: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(staging, "OVERLAP_MIN_BYTES", 8)
    assert staging.parts([torch.zeros(size, dtype=torch.uint8) for size in sizes]) == expected


def test_a_snapshot_says_how_far_its_image_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "OVERLAP_MIN_BYTES", 1)
    monkeypatch.setattr("relit_platform.worker.overlap.OVERLAP_MIN_BYTES", 1)
    tensors = {name: torch.full((64,), float(at)) for at, name in enumerate("abcdef")}
    marks: list[tuple[int, bool]] = []
    real = Slot.mark_final

    def mark(slot: Slot, num_bytes: int) -> None:
        """What is said to be final is what will be committed, at the moment when it is said."""
        begin = len(slot.image) - 256 * len(tensors)
        expected = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
        final = bytes(slot.image[begin:num_bytes])
        marks.append((num_bytes - begin, final == expected[: num_bytes - begin]))
        real(slot, num_bytes)

    monkeypatch.setattr(Slot, "mark_final", mark)
    snapshotter = Snapshotter("w", lambda *wanted: opened(tmp_path, *wanted), staging="overlap")
    said: list[str] = []
    for step in (1, 2, 3):  # the first two are looks, copied at once
        for at, tensor in enumerate(tensors.values()):
            tensor.fill_(10.0 * step + at)
        snapshotter.take(
            step=step, generation=1, rank=0, world=1, tensors=tensors, extras={},
            still=frozenset("bcdef"), on_begun=said.append,
        )  # fmt: skip
        snapshotter.settle()
        assert len(said) == (step == 3)
    snapshotter.close()
    assert marks == [(256 * count, True) for count in range(1, 7)]


def opened(folder: Path, count: int, image_bytes: int, extras: int) -> list[str]:
    paths = [str(folder / f"{number}.slot") for number in range(count)]
    for path in paths:
        create_slot(path, image_bytes, extras)
    return paths
