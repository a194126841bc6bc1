"""Cuts: whichever node is lost and whenever, one step is whole on those that are left."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from relit_platform.machines.peer_ring import peers_of
from relit_platform.node.peer_copies import Arriving, PeerCopies
from relit_platform.node.peer_transfer import Outgoing, of_slot
from relit_platform.node.slot_pool import PooledSlot, SlotPool
from relit_platform.node.slots import Slot
from relit_platform.worker.cuts import NUM_VOTES, split, with_cut_vote
from relit_platform.worker.pace import NUM_VOTES as SAVE_VOTES
from relit_platform.worker.snapshot import NUM_SLOTS, Snapshotter
from relit_storage.errors import CorruptShardError

CHUNK_BYTES = 4096
BUDGET_BYTES = 64 << 20


@pytest.mark.parametrize(
    ("ready", "cut"),
    [((True, True), True), ((True, False), False), ((False, False), False)],
)
def test_a_cut_is_when_all_say_so(ready: tuple[bool, ...], cut: bool) -> None:
    for own in ((), tuple(float(n) for n in range(SAVE_VOTES))):
        votes = [with_cut_vote(own, vote) for vote in ready]
        assert all(len(vote) == NUM_VOTES for vote in votes)
        agreed = [sum(places) for places in zip(*votes, strict=True)]
        rest, found = split(agreed, len(ready))
        assert found is cut and list(rest) == [2 * v for v in own or [0.0] * SAVE_VOTES]


def test_without_votes_there_is_no_cut() -> None:
    assert split([], 1) == ([], False)


@dataclass
class Sending:
    """A shard on its way to the next node."""

    pooled: PooledSlot
    sequence: int
    outgoing: Outgoing
    arriving: Arriving
    left: list[int]


@dataclass
class Node:
    """One rank, its slots, and the copies that it keeps for another node."""

    name: str
    rank: int
    world: int
    folder: Path
    sending: Sending | None = None
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "slots").mkdir(parents=True)
        self.pool = SlotPool(str(self.folder / "slots"), BUDGET_BYTES)
        self.copies = PeerCopies(str(self.folder / "peers"), lambda: BUDGET_BYTES)
        self.copies.adopt()
        self.snapshotter = Snapshotter(
            "w", lambda count, image, extras: self.pool.open("w", count, image, extras)
        )

    def take(self, step: int, cut: bool) -> None:
        """A snapshot of one tensor for each rank, all of them as large as two chunks."""
        tensors = {f"t{n}": torch.full((2048,), float(step)) for n in range(self.world)}
        taken = self.snapshotter.take(
            step=step, generation=1, rank=self.rank, world=self.world, tensors=tensors,
            extras={"step": step}, cut=cut,
        )  # fmt: skip
        if taken.path is None:
            self.skipped.append(taken.reason)

    def move(self, peer: Node) -> None:
        """What the network gets done in a moment: one chunk, or the beginning of a shard."""
        now = self.sending
        if now is None:
            due = self.pool.unsent_cuts()
            if due:
                slot = due[0].slot
                outgoing = of_slot(slot, CHUNK_BYTES)
                arriving = peer.copies.begin(outgoing.offer, self.name)
                self.sending = Sending(
                    due[0], slot.sequence(), outgoing, arriving, arriving.missing
                )
            return
        try:
            now.outgoing.check()
            if now.left:
                self._chunk(now, now.left.pop(0))
                return
            now.arriving.finish()
            now.pooled.slot.mark_sent(now.sequence)
        except CorruptShardError:
            pass  # overwritten: the newer one is next
        now.arriving.stop()
        self.sending = None

    def _chunk(self, now: Sending, number: int) -> None:
        offer = now.outgoing.offer
        begin, end = offer.chunk_range(number)
        extras = number == offer.extras_chunk
        content = now.outgoing.extras if extras else now.outgoing.image(begin, end)
        now.arriving.room(number)[:] = content
        now.arriving.filled(number)

    def own_steps(self) -> set[int]:
        return {info.step for info in self.pool.infos(self.name)[0]}

    def steps_of(self, rank: int) -> set[int]:
        return {info.step for info in self.copies.infos(self.name) if info.rank == rank}


class Cluster:
    """Nodes in a ring, one rank each, in step; events by a seed."""

    def __init__(self, folder: Path, seed: int, world: int) -> None:
        self.rng = random.Random(seed)
        self.nodes = [Node(f"n{n}", n, world, folder / f"n{n}") for n in range(world)]
        ring = peers_of([node.name for node in self.nodes])
        by_name = {node.name: node for node in self.nodes}
        self.peer = {name: by_name[peer] for name, peer in ring.items()}
        self.step = 0
        self.cuts: list[int] = []

    def complete(self) -> None:
        votes = [with_cut_vote((), node.snapshotter.replicated) for node in self.nodes]
        agreed = [sum(places) for places in zip(*votes, strict=True)]
        _, cut = split(agreed, len(self.nodes))
        self.step += 1
        if cut:
            self.cuts.append(self.step)
        for node in self.nodes:
            node.take(self.step, cut)

    def whole(self) -> int:
        """The newest cut of which every rank's copy is on another node; 0: none yet."""
        for cut in reversed(self.cuts):
            if all(cut in self.peer[node.name].steps_of(node.rank) for node in self.nodes):
                return cut
        return 0

    def left_without(self, lost: Node) -> int:
        """The newest step that is whole on the other nodes; 0: none."""
        common: set[int] | None = None
        for node in self.nodes:
            keeper = self.peer[node.name]
            steps = set() if node is lost else node.own_steps()
            steps |= set() if keeper is lost else keeper.steps_of(node.rank)
            common = steps if common is None else common & steps
        return max(common or set(), default=0)

    def close(self) -> None:
        for node in self.nodes:
            node.snapshotter.close()


@pytest.fixture
def folder(tmpfs: Path) -> Path:
    return tmpfs


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_whichever_node_is_lost_a_whole_cut_is_left(folder: Path, seed: int, world: int) -> None:
    cluster = Cluster(folder, seed, world)
    chunks_a_step = cluster.rng.choice([0.5, 3.0, 20.0])
    for _ in range(150):
        if cluster.rng.random() < 1.0 / (1.0 + chunks_a_step):
            cluster.complete()
        else:
            node = cluster.rng.choice(cluster.nodes)
            node.move(cluster.peer[node.name])
        whole = cluster.whole()
        for lost in cluster.nodes:
            assert cluster.left_without(lost) >= whole, (cluster.step, cluster.cuts, lost.name)
    assert len(cluster.cuts) >= 2 and cluster.whole() > 0
    assert all(not node.skipped for node in cluster.nodes)
    assert all(len(node.pool.of_worker("w")) == NUM_SLOTS + 1 for node in cluster.nodes)
    cluster.close()


def test_a_fast_network_gets_every_other_step_at_least(folder: Path) -> None:
    cluster = Cluster(folder, 0, 2)
    for _ in range(20):
        cluster.complete()
        for node in cluster.nodes:
            for _ in range(8):
                node.move(cluster.peer[node.name])
    assert cluster.cuts == list(range(1, 21)), "with each step whole before the next one ends"
    assert cluster.left_without(cluster.nodes[0]) == 20
    cluster.close()


def test_a_network_that_stands_still_holds_nothing_up(folder: Path) -> None:
    cluster = Cluster(folder, 0, 2)
    for _ in range(30):
        cluster.complete()
    assert cluster.cuts == [1] and all(not node.skipped for node in cluster.nodes)
    for node in cluster.nodes:
        assert 1 in node.own_steps() and 30 in node.own_steps()
    cluster.close()


def test_training_comes_before_a_cut_when_slots_are_scarce(folder: Path) -> None:
    """Two slots are pinned by a slow disk: the cut that waits is given up, no snapshot is."""
    node = Node("n0", 0, 1, folder / "n0")
    node.take(1, cut=True)
    for step in (2, 3, 4):
        node.take(step, cut=False)
    held = {slot.info().step: slot for slot in map(Slot.open, node.pool.of_worker("w"))}
    assert set(held) == {1, 2, 3, 4}
    held[2].pin()
    held[3].pin()
    node.take(5, cut=False)
    assert node.own_steps() == {2, 3, 4, 5} and not node.skipped
    assert node.snapshotter.replicated, "nothing waits for what is no longer there"
    node.snapshotter.close()


def test_without_room_for_a_fourth_slot_three_do(folder: Path) -> None:
    node = Node("n0", 0, 1, folder / "n0")
    node.take(1, cut=True)
    node.pool._budget_bytes = 0
    for step in range(2, 8):
        node.take(step, cut=False)
    assert len(node.pool.of_worker("w")) == NUM_SLOTS and not node.skipped
    assert 1 in node.own_steps() and 7 in node.own_steps()
    node.snapshotter.close()
