"""Whom cuts go to: a peer that hangs is left at once for another."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_harness import LAYOUT, wait_until
from peer_nodes import fill

from relit_platform.errors import PeerAwayError
from relit_platform.facts import Endpoint
from relit_platform.node.peer_channel import Channel
from relit_platform.node.peer_protocol import Kind
from relit_platform.node.peer_sender import PeerSender
from relit_platform.node.slot_pool import SlotPool
from relit_platform.node.slots import Slot

ONE, OTHER = ("a", 1), ("b", 1)


class Wires:
    """The other ends of the sender's connections, and what it has told."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.pool = SlotPool(str(folder), 1 << 30)
        [path] = self.pool.open("w0", 1, LAYOUT.total_bytes, 1000)
        self.slot = Slot.open(path)
        self.called: list[Endpoint] = []
        self.far: list[Channel] = []
        self.failed: list[str] = []
        self.sender = PeerSender(
            self.pool, self._connect, 4096, 0, self.failed.append, lambda: None
        )

    def aim(self, endpoint: Endpoint | None) -> None:
        self.sender.aim(endpoint, anew=True)

    def offered(self, number: int) -> int:
        """The step that is offered over this connection."""
        wait_until(lambda: len(self.far) > number, f"called: {self.called}")
        return int(self.far[number].hear(Kind.OFFER)[1]["step"])

    def take(self, number: int) -> None:
        """The far end wants nothing of what it was offered, and has it."""
        self.far[number].say(Kind.NEED, {"chunks": []})
        self.far[number].hear(Kind.END)
        self.far[number].say(Kind.KEPT, {})

    def _connect(self, endpoint: Endpoint) -> Channel:
        near, far = socket.socketpair()
        self.called.append(endpoint)
        self.far.append(Channel(far, "far"))
        return Channel(near, "near")


@pytest.fixture
def wires(tmpfs: Path) -> Iterator[Wires]:
    made = Wires(tmpfs / "slots")
    yield made
    made.sender.close()
    for channel in made.far:
        channel.close()


def test_a_peer_that_says_nothing_is_left_at_once_for_another(wires: Wires) -> None:
    fill(wires.slot, 7)
    wires.aim(ONE)
    assert wires.offered(0) == 7  # which is not answered for half a minute
    wires.aim(OTHER)
    assert wires.offered(1) == 7
    wires.take(1)
    wait_until(lambda: wires.slot.sent, "on the other one")
    assert wires.called == [ONE, OTHER] and wires.failed == []


def test_a_connection_that_was_in_use_before_is_not_tried_anew(wires: Wires) -> None:
    fill(wires.slot, 7)
    wires.aim(ONE)
    wires.offered(0)
    wires.take(0)
    wait_until(lambda: wires.slot.sent, "sent")
    fill(wires.slot, 8)
    assert wires.offered(0) == 8
    wires.aim(OTHER)
    assert wires.offered(1) == 8 and wires.called == [ONE, OTHER]


def test_a_connection_that_has_ended_is_tried_anew(wires: Wires) -> None:
    fill(wires.slot, 7)
    wires.aim(ONE)
    wires.offered(0)
    wires.take(0)
    wait_until(lambda: wires.slot.sent, "sent")
    wires.far[0].end()
    fill(wires.slot, 8)
    assert wires.offered(1) == 8 and wires.called == [ONE, ONE]
    wires.take(1)
    wait_until(lambda: wires.slot.sent, "sent")
    assert wires.failed == []


def test_with_nobody_to_give_to_the_connection_ends(wires: Wires) -> None:
    fill(wires.slot, 7)
    wires.aim(ONE)
    wires.offered(0)
    wires.aim(None)
    with pytest.raises(PeerAwayError, match="was closed"):
        wires.far[0].hear(Kind.END)
    assert wires.called == [ONE] and wires.failed == []
