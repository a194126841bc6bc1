"""Agents of two nodes over TCP: cuts arrive, faults cost a repetition, strangers get nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coordinator_harness import in_thread
from node_harness import LAYOUT, wait_until
from peer_nodes import (
    SECRET,
    PeerNodes,
    content_of,
    copies_at,
    fill,
    identity,
    offer_of,
    slots_of,
    source_at,
    wait_for_copy,
)

from relit_platform.errors import PeerError, PeerRefusedError
from relit_platform.facts import WorkerExited
from relit_platform.node import peer_tier
from relit_platform.node.heartbeat import ControlPage
from relit_platform.node.keeper import NodeKeeper
from relit_platform.node.peer_channel import Channel, call
from relit_platform.node.peer_copies import MIN_EXTRAS_BYTES, PeerCopies
from relit_platform.node.peer_protocol import Kind
from relit_platform.node.peer_transfer import of_slot, send_shard
from relit_platform.node.slots import Slot, slot_file_bytes
from relit_storage.errors import CorruptShardError, FencedError
from relit_storage.stores.pace import Pace


@pytest.fixture
def nodes(tmpfs: Path) -> Iterator[PeerNodes]:
    made = PeerNodes(tmpfs)
    yield made
    made.clear()


class Wire:
    """What leaves this process in chunks: counted, damaged or cut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chunks: list[int] = []
        self.damage: set[int] = set()
        self.cut_after = -1
        real = Channel.say_chunk

        def say_chunk(channel: Channel, number: int, content: memoryview) -> None:
            if self.cut_after == 0:
                self.cut_after = -1
                channel.close()
            self.cut_after -= 1
            self.chunks.append(number)
            if number in self.damage:
                self.damage.discard(number)
                content = memoryview(bytes(content[:-1]) + bytes([content[-1] ^ 1]))
            real(channel, number, content)

        monkeypatch.setattr(Channel, "say_chunk", say_chunk)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


# ---- giving ----


def test_a_cut_is_in_the_other_nodes_memory(nodes: PeerNodes) -> None:
    one, other = nodes.pair()
    slots = slots_of(one, "w0")
    fill(slots[0], 7)
    fill(slots[1], 8, cut=False)
    wait_for_copy(other, 0, 1, 7)
    [info] = other.inventory().peers
    copy = Slot.open(info.path)
    assert bytes(copy.image) == content_of(7) and copy.read_extras() == b'{"step": 7}'
    wait_until(lambda: slots[0].sent, "the rank can see it")
    assert not slots[1].sent and copies_at(one) == []


def test_each_cut_counts_for_itself(nodes: PeerNodes) -> None:
    one, other = nodes.pair()
    slot = slots_of(one, "w0")[0]
    for step in range(1, 6):
        fill(slot, step)
        wait_until(lambda: slot.sent, f"step {step}")
        assert copies_at(other)[-1] == (0, 1, step)
        slot.begin(1, step + 1, 0, 2, cut=True)
        assert not slot.sent
    assert copies_at(other) == [(0, 1, 4), (0, 1, 5)]


def test_the_ranks_of_a_node_are_told_whether_there_is_a_peer(nodes: PeerNodes) -> None:
    one = nodes.boot("n1")
    page = ControlPage.open(one.hello("w0", os.getpid(), 9).control_path)
    told = [page.peered]
    nodes.boot("n2")
    nodes.ring("n1", "n2")
    told.append(page.peered)
    one.peers.set_peer("", None, 1)
    told.append(page.peered)
    assert told == [False, True, False]


def test_newest_wins_and_nothing_queues(nodes: PeerNodes, wire: Wire) -> None:
    one, other = nodes.boot("n1"), nodes.boot("n2")
    slots = slots_of(one, "w0", count=3)
    for step, slot in enumerate(slots, 1):
        fill(slot, step)
    nodes.ring("n1", "n2")
    wait_for_copy(other, 0, 1, 3)
    assert copies_at(other) == [(0, 1, 3)] and sorted(wire.chunks) == list(range(7))


def test_what_a_dead_rank_left_does_not_hold_its_successor_back(
    nodes: PeerNodes, wire: Wire
) -> None:
    """Its last cut was on no other node yet; by then the same rank's next life has given one."""
    one, other = nodes.pair()
    successor, left = slots_of(one, "w9")[0], slots_of(one, "w0")[0]
    fill(successor, 8, generation=2)
    wait_for_copy(other, 0, 2, 8)
    fill(left, 9, generation=1)
    wait_until(lambda: left.sent, "nobody needs it")
    assert copies_at(other) == [(0, 2, 8)] and len(wire.chunks) == 7
    assert nodes.failures("n1", "give") == []


def test_a_slot_that_is_overwritten_under_way_is_given_up(nodes: PeerNodes) -> None:
    one, other = nodes.boot("n1"), nodes.boot("n2")
    slot = slots_of(one, "w0")[0]
    fill(slot, 7)
    endpoint = other.peers.listen(SECRET, 1)
    outgoing = of_slot(slot, 4096)
    channel = call(endpoint, identity())
    fill(slot, 8)
    with pytest.raises(CorruptShardError, match="overwritten"):
        send_shard(channel, outgoing, Pace())
    channel.close()
    assert copies_at(other) == []
    nodes.ring("n1", "n2")
    wait_for_copy(other, 0, 1, 8)


def test_a_torn_connection_is_resumed_where_it_stopped(nodes: PeerNodes, wire: Wire) -> None:
    one, other = nodes.boot("n1"), nodes.boot("n2")
    slot = slots_of(one, "w0")[0]
    fill(slot, 7)
    wire.cut_after = 3
    nodes.ring("n1", "n2")
    wait_for_copy(other, 0, 1, 7)
    assert wire.chunks == [0, 1, 2, 3, 3, 4, 5, 6]
    assert bytes(Slot.open(other.inventory().peers[0].path).image) == content_of(7)


def test_a_flipped_byte_is_refused_and_sent_again(nodes: PeerNodes, wire: Wire) -> None:
    one, other = nodes.boot("n1"), nodes.boot("n2")
    slot = slots_of(one, "w0")[0]
    fill(slot, 7)
    wire.damage = {2}
    nodes.ring("n1", "n2")
    wait_for_copy(other, 0, 1, 7)
    assert bytes(Slot.open(other.inventory().peers[0].path).image) == content_of(7)
    assert wire.chunks.count(2) == 2 and wire.chunks.count(1) == 1
    assert any("chunk 2 fails its checksum" in said for said in nodes.failures("n2", "serve"))


def test_the_cap_holds_whatever_the_network_could(nodes: PeerNodes) -> None:
    one, other = nodes.boot("n1"), nodes.boot("n2")
    slot = slots_of(one, "w0")[0]
    fill(slot, 7)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    pace = Pace(1000.0, clock=lambda: now[0], sleep=sleep)
    channel = call(other.peers.listen(SECRET, 1), identity())
    sent = send_shard(channel, of_slot(slot, 4096), pace)
    channel.close()
    assert sent == LAYOUT.total_bytes + len(b'{"step": 7}')
    assert now[0] == pytest.approx(LAYOUT.total_bytes / 1000.0), "the last piece goes at once"


def test_another_peer_gets_everything_anew(nodes: PeerNodes) -> None:
    one, other = nodes.pair()
    slot = slots_of(one, "w0")[0]
    fill(slot, 7)
    wait_for_copy(other, 0, 1, 7)
    third = nodes.boot("n3")
    nodes.ring("n1", "n3", "n2")
    wait_for_copy(third, 0, 1, 7)
    wait_until(lambda: slot.sent, "sent")


def test_an_agent_that_was_restarted_goes_on(nodes: PeerNodes) -> None:
    one, other = nodes.pair()
    slot = slots_of(one, "w0")[0]
    fill(slot, 7)
    wait_for_copy(other, 0, 1, 7)
    other.peers.close()
    other.peers.copies = PeerCopies(other._folders.peers, lambda: 1 << 30)
    other.peers.copies.adopt()
    assert copies_at(other) == [(0, 1, 7)]
    wait_until(lambda: slot.sent, "sent")
    fill(slot, 8)
    wait_until(lambda: bool(nodes.failures("n1", "give")), "nobody listens")
    assert not slot.sent


# ---- who may ----


def test_nothing_listens_before_the_manager_has_asked(nodes: PeerNodes) -> None:
    one = nodes.boot("n1")
    assert one.inventory().endpoint is None
    host, port = one.peers.listen(SECRET, 1)
    assert host == "127.0.0.1" and one.inventory().endpoint == (host, port)
    assert one.peers.listen(b"another", 1) == (host, port)
    nodes.lose("n1")
    with pytest.raises(ConnectionError):
        socket.create_connection((host, port), 1.0)


def test_a_wrong_secret_is_refused_on_both_sides(nodes: PeerNodes) -> None:
    one, other = nodes.boot("n1"), nodes.boot("n2")
    endpoint = other.peers.listen(SECRET, 1)
    with pytest.raises(PeerRefusedError, match="its secret is another"):
        call(endpoint, identity(secret=b"guess"))
    one.peers.listen(b"guess", 1)
    one.peers.set_peer("n2", endpoint, 1)
    fill(slots_of(one, "w0")[0], 7)
    wait_until(lambda: bool(nodes.failures("n1", "give")), "refused")
    assert copies_at(other) == []
    said = [str(f) for facts in nodes.facts.values() for f in facts]
    assert not any(SECRET.decode() in text or "guess" in text for text in said)
    one.peers.listen(SECRET, 1)
    wait_for_copy(other, 0, 1, 7)


def test_a_zombie_of_an_older_epoch_is_refused(nodes: PeerNodes) -> None:
    """A node that was cut off goes on with the old epoch's workers; its peer has been sealed."""
    one, other = nodes.pair()
    slot = slots_of(one, "w0")[0]
    fill(slot, 7)
    wait_for_copy(other, 0, 1, 7)
    other.seal(2, 1)
    with pytest.raises(PeerRefusedError, match="epoch 1 is over"):
        call(other.peers.listen(SECRET, 2), identity(epoch=1))
    one.peers._sender._hang_up()  # the connection that stands was greeted in time
    fill(slot, 8)
    wait_until(lambda: bool(nodes.failures("n1", "give")), "refused")
    assert copies_at(other) == [(0, 1, 7)]
    for act in (lambda: other.peers.listen(SECRET, 1), lambda: other.peers.set_peer("n1", None, 1)):
        with pytest.raises(FencedError):
            act()


def test_what_is_said_out_of_turn_ends_the_connection(nodes: PeerNodes) -> None:
    one = nodes.boot("n1")
    endpoint = one.peers.listen(SECRET, 1)
    frames: list[tuple[Kind, dict[str, Any]]] = [
        (Kind.KEPT, {}),
        (Kind.NEED, {"chunks": [0]}),
        (Kind.OFFER, {**offer_of(7).body(), "image_bytes": 2**60}),
        (Kind.OFFER, {**offer_of(7).body(), "image_bytes": 2**39, "chunk_bytes": 64 << 20}),
        (Kind.WANT, {"step": 1, "generation": 1, "rank": 0, "world": 1}),
    ]
    for kind, body in frames:
        channel = call(endpoint, identity("n2"))
        channel.say(kind, body)
        with pytest.raises(PeerError):
            channel.hear(Kind.KEPT)
        channel.close()
    channel = call(endpoint, identity("n2"))
    channel.say(Kind.OFFER, offer_of(7).body())
    channel.hear(Kind.NEED)
    channel.say_chunk(40, memoryview(b"x"))
    with pytest.raises(PeerError):
        channel.hear(Kind.KEPT)
    channel.close()
    assert copies_at(one) == [] and one.inventory().refusals == ()


# ---- budget ----


def test_over_the_budget_is_refused_with_the_reason_said_once(nodes: PeerNodes) -> None:
    size = slot_file_bytes(LAYOUT.total_bytes, 1000)
    one = nodes.boot("n1")
    other = nodes.boot("n2", memory_budget_bytes=2 * size)
    slots_of(other, "w1")
    fill(slots_of(one, "w0")[0], 7)
    nodes.ring("n1", "n2")
    wait_until(lambda: len(nodes.failures("n1", "give")) >= 2, "said")
    assert all("budget is 0" in said for said in nodes.failures("n1", "give"))
    counts = [f.data["count"] for f in nodes.facts["n1"] if getattr(f, "kind", "") == "peer.failed"]
    assert counts == [1, 2, 4, 8][: len(counts)] and copies_at(other) == []


def test_a_nodes_own_slots_come_first(nodes: PeerNodes) -> None:
    size = slot_file_bytes(LAYOUT.total_bytes, 1000)
    one = nodes.boot("n1")
    other = nodes.boot("n2", memory_budget_bytes=6 * size)
    nodes.ring("n1", "n2")
    slot = slots_of(one, "w0")[0]
    fill(slot, 7)
    wait_for_copy(other, 0, 1, 7)
    slots_of(other, "w1", count=6)
    assert copies_at(other) == [] and other.peers.copies.used_bytes == 0
    assert nodes.failures("n2", "keep") == ["1 copies made room for this node's own slots"]


def test_what_a_dead_rank_left_for_nobody_makes_room_for_copies(nodes: PeerNodes) -> None:
    own = slot_file_bytes(LAYOUT.total_bytes, 1000)
    copy = slot_file_bytes(LAYOUT.total_bytes, MIN_EXTRAS_BYTES)
    one = nodes.boot("n1")
    other = nodes.boot("n2", memory_budget_bytes=own + 2 * copy)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other.hello("w1", child.pid, epoch=9)
    left = [Slot.open(path) for path in other.open_slots("w1", 2, LAYOUT.total_bytes, 1000)]
    for step, dead in enumerate(left, 1):
        fill(dead, step, world=1, cut=False)
    child.kill()
    child.communicate()
    wait_until(lambda: any(isinstance(f, WorkerExited) for f in nodes.facts["n2"]), "dead")
    slot = slots_of(one, "w0")[0]
    nodes.ring("n1", "n2")
    for step in (7, 8):
        fill(slot, step, generation=2)
        wait_for_copy(other, 0, 2, step)
        wait_until(lambda: slot.sent, "sent")
    assert copies_at(other) == [(0, 2, 7), (0, 2, 8)] and nodes.failures("n1", "give") == []
    assert [info.step for info in other.inventory().memory] == [2]


def test_a_new_neighbours_cuts_find_room_where_the_old_ones_lie(nodes: PeerNodes) -> None:
    copy = slot_file_bytes(LAYOUT.total_bytes, MIN_EXTRAS_BYTES)
    one, third = nodes.boot("n1"), nodes.boot("n3")
    other = nodes.boot("n2", memory_budget_bytes=2 * copy)

    def give(keeper: NodeKeeper, slot: Slot, rank: int, step: int) -> None:
        fill(slot, step, rank=rank)
        wait_for_copy(other, rank, 1, step)
        wait_until(lambda: slot.sent, "sent")
        keeper.peers._sender._hang_up()  # from another port next time

    for keeper, rank, steps in ((one, 0, (7, 8)), (third, 1, (8, 9, 10))):
        nodes.ring(keeper.inventory().node_id, "n2")
        slot = slots_of(keeper, f"w{rank}")[0]
        for step in steps:
            give(keeper, slot, rank, step)
    assert copies_at(other) == [(1, 1, 9), (1, 1, 10)]


# ---- fetching ----


def fetched(nodes: PeerNodes, holder: NodeKeeper, tier: Any, rank: int = 0) -> bytes:
    """What a third node gets of step 7."""
    third = nodes.boot("n3")
    third.peers.listen(SECRET, 1)
    near = third.peers.fetch(source_at(holder, rank, tier), 7, 1, 2)
    assert near.extras_location == "" and near.tier == tier and near.node_id != "n3"
    slot = Slot.open(near.location)
    assert slot.read_extras() == b'{"step": 7}' and len(near.checksums) == 6
    return bytes(slot.image)


def test_a_shard_in_memory_is_fetched(nodes: PeerNodes) -> None:
    one, _ = nodes.pair()
    fill(slots_of(one, "w0")[0], 7, cut=False)
    assert fetched(nodes, one, "memory") == content_of(7)


def test_a_copy_is_fetched_when_its_origin_is_lost(nodes: PeerNodes) -> None:
    one, other = nodes.pair()
    fill(slots_of(one, "w0")[0], 7)
    wait_for_copy(other, 0, 1, 7)
    nodes.lose("n1")
    assert fetched(nodes, other, "peer") == content_of(7)


def persist(nodes: PeerNodes, keeper: NodeKeeper) -> Path:
    """Step 7 on that node's disk, and no longer in its memory."""
    slots = slots_of(keeper, "w0")
    fill(slots[0], 7, cut=False)
    slots[0].pin()
    keeper.persist("w0", slots[0].path, 7, 1)
    wait_until(lambda: not slots[0].pinned, "persisted")
    fill(slots[0], 9, cut=False)
    [record] = keeper.inventory().disk
    return Path(keeper.inventory().disk_root) / record.file


def test_a_shard_on_disk_is_fetched(nodes: PeerNodes) -> None:
    one, _ = nodes.pair()
    persist(nodes, one)
    assert fetched(nodes, one, "disk") == content_of(7)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_on_the_other_nodes_disk_is_not_carried_on(nodes: PeerNodes, damage: str) -> None:
    one, _ = nodes.pair()
    file = persist(nodes, one)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flip" else data[:-100])
    with pytest.raises((CorruptShardError, PeerError)):
        fetched(nodes, one, "disk")
    assert copies_at(nodes.keepers["n3"]) == []


def test_two_ranks_that_need_the_same_shard_get_one_copy(nodes: PeerNodes, wire: Wire) -> None:
    one, other = nodes.pair()
    fill(slots_of(one, "w0")[0], 7, cut=False)
    source = source_at(one)
    askers = [in_thread(lambda: other.peers.fetch(source, 7, 1, 2).location) for _ in range(4)]
    for thread, _ in askers:
        thread.join(10)
    paths = {answers[0] for _, answers in askers}
    assert len(paths) == 1 and sorted(wire.chunks) == list(range(7))


def test_what_cannot_be_fetched_says_why(nodes: PeerNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_tier, "FETCH_PAUSE_S", 0.01)
    one, other = nodes.pair()
    source = source_at(one)
    with pytest.raises(PeerRefusedError, match="is not here"):
        other.peers.fetch(source, 7, 1, 2)
    with pytest.raises(PeerRefusedError, match="does not listen"):
        other.peers.fetch(replace(source, endpoint=None), 7, 1, 2)
    nodes.lose("n1")
    with pytest.raises(PeerError, match="cannot be reached"):
        other.peers.fetch(source, 7, 1, 2)
