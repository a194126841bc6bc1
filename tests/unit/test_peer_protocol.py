"""Frames between agents: what is said is understood, what cannot be is refused with its reason."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from coordinator_harness import in_thread
from peer_nodes import SECRET, identity, offer_of

from relit_platform.errors import PeerAwayError, PeerError, PeerRefusedError
from relit_platform.node import peer_channel
from relit_platform.node.peer_channel import Channel, answer
from relit_platform.node.peer_protocol import (
    FRAME,
    MAX_CHUNK_BYTES,
    MAX_GREETING_BYTES,
    MAX_JSON_BYTES,
    Identity,
    Kind,
    Offer,
    decode,
    encode,
    parse_frame,
    parse_need,
    parse_offer,
    proof,
)


def test_a_frame_comes_back_as_it_was() -> None:
    offer = offer_of(7)
    raw = encode(Kind.OFFER, offer.body())
    kind, length = parse_frame(raw[: FRAME.size], "p", MAX_JSON_BYTES)
    assert kind is Kind.OFFER and length == len(raw) - FRAME.size
    assert parse_offer(decode(kind, raw[FRAME.size :], "p"), "p") == offer
    assert [offer.chunk_range(n) for n in (0, 5, offer.extras_chunk)] == [
        (0, 4096),
        (20480, offer.image_bytes),
        (0, offer.extras_bytes),
    ]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (FRAME.pack(0, 1), "unknown kind 0"),
        (FRAME.pack(99, 1), "unknown kind 99"),
        (FRAME.pack(Kind.OFFER, MAX_JSON_BYTES + 1), "at most"),
        (FRAME.pack(Kind.CHUNK, MAX_CHUNK_BYTES + 5), "at most"),
        (FRAME.pack(Kind.HELLO, 2**32 - 1), "at most"),
    ],
)
def test_no_length_is_taken_on_trust(header: bytes, reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        parse_frame(header, "p", MAX_JSON_BYTES)


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"{", b"[]", b"null", b"{}", b'{"v": 1}', b"\xff", b"[" * 100_000,
        b'{"v": true, "nonce": "a"}', b'{"v": 1, "nonce": 2}',
        b'{"v": 1, "nonce": "a", "more": 1}', b'{"v": -1, "nonce": "a"}',
    ],
)  # fmt: skip
def test_json_of_another_form_is_refused(payload: bytes) -> None:
    with pytest.raises(PeerError, match="CHALLENGE"):
        decode(Kind.CHALLENGE, payload, "p")


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_bytes": 0},
        {"chunk_bytes": MAX_CHUNK_BYTES + 1},
        {"image_bytes": 0},
        {"image_bytes": 2**62},
        {"extras_bytes": MAX_CHUNK_BYTES + 1},
        {"checksums": []},
        {"checksums": ["0"] * 7},
        {"rank": 2},
        {"world": 2**40},
    ],
)
def test_an_offer_of_numbers_that_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(PeerError, match="OFFER"):
        parse_offer({**offer_of(7).body(), **change}, "p")


@pytest.mark.parametrize("chunks", [[7], [0, 0], [2**40]])
def test_only_chunks_of_the_offer_are_given(chunks: list[int]) -> None:
    with pytest.raises(PeerError, match="not in the offer"):
        parse_need({"chunks": chunks}, offer_of(7), "p")
    assert parse_need({"chunks": [6, 0]}, offer_of(7), "p") == [6, 0]


def test_an_offers_checksums_are_those_of_its_bytes() -> None:
    assert offer_of(7) == offer_of(7)
    one, other = offer_of(7), offer_of(8)
    same = [a == b for a, b in zip(one.checksums, other.checksums, strict=True)]
    assert not same[1] and same[-1], "the second half does not depend on the step"
    assert isinstance(one, Offer) and one.extras_checksum != other.extras_checksum


def test_a_proof_is_of_its_side_its_nonces_and_its_secret() -> None:
    who, nonces = identity(), ("a", "b")
    right = proof("caller", who, who, nonces)
    assert right == proof("caller", who, who, nonces)
    others = [
        proof("listener", who, who, nonces),
        proof("caller", who, who, ("b", "a")),
        proof("caller", who, replace(who, epoch=2), nonces),
        proof("caller", who, replace(who, node_id="n2"), nonces),
        proof("caller", replace(who, secret=b"other"), who, nonces),
    ]
    assert right not in others
    assert "sss" not in repr(who) and "sss" not in right


# ---- greeting ----


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = socket.socketpair()
    channels = Channel.__new__(Channel), Channel.__new__(Channel)
    for channel, sock in zip(channels, (one, other), strict=True):
        channel.peer, channel._sock = "p", sock  # a pair has no TCP to be set up
    yield channels
    for channel in channels:
        channel.close()


def greeted(ends: tuple[Channel, Channel], caller: Identity, listener: Identity) -> Any:
    """What both sides make of each other: a node id, or the errors."""
    thread, answers = in_thread(lambda: _outcome(lambda: answer(ends[1], lambda: listener)))
    called = _outcome(lambda: peer_channel._greet(ends[0], caller))
    thread.join(10)
    return called, answers[0]


def _outcome(act: Any) -> Any:
    try:
        return act()
    except PeerError as error:
        return error


def test_who_knows_the_secret_is_let_in(ends: tuple[Channel, Channel]) -> None:
    assert greeted(ends, identity("n1", 3), identity("n2", 2)) == (None, "n1")


@pytest.mark.parametrize(
    ("caller", "reason"),
    [
        (identity(secret=b"another"), "its secret is another"),
        (identity(secret=b""), "its secret is another"),
        (replace(identity(), run_id="run-2"), "the run or its secret"),
        (identity(epoch=1), "epoch 1 is over: 2 has taken over"),
    ],
)
def test_who_does_not_belong_here_is_told_why(
    ends: tuple[Channel, Channel], caller: Identity, reason: str
) -> None:
    called, listened = greeted(ends, caller, identity("n2", epoch=2))
    for error in (called, listened):
        assert isinstance(error, PeerRefusedError) and reason in str(error)
        assert SECRET.decode() not in str(error)


def test_a_listener_without_the_secret_gets_nothing(ends: tuple[Channel, Channel]) -> None:
    def impostor() -> None:
        ends[1].say(Kind.CHALLENGE, {"v": 1, "nonce": "00"})
        ends[1].hear(Kind.HELLO)
        ends[1].say(Kind.WELCOME, {"proof": "\ud800" * 10})

    thread, _ = in_thread(impostor)
    with pytest.raises(PeerRefusedError, match="does not know"):
        peer_channel._greet(ends[0], identity())
    thread.join(10)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        FRAME.pack(Kind.HELLO, MAX_GREETING_BYTES + 1),
        FRAME.pack(Kind.CHUNK, MAX_CHUNK_BYTES),
        encode(Kind.OFFER, offer_of(7).body()),
        encode(Kind.HELLO, {"v": 1})[:-1] + b"x",
    ],
)
def test_strangers_cost_neither_memory_nor_time(ends: tuple[Channel, Channel], said: bytes) -> None:
    ends[0]._send(said, 1.0)
    with pytest.raises(PeerError):
        answer(ends[1], identity)


def test_a_silent_caller_is_not_waited_for(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_channel, "GREETING_S", 0.05)
    with pytest.raises(PeerAwayError, match=r"in time|timed out"):
        answer(ends[1], identity)


def test_a_closed_connection_says_so(ends: tuple[Channel, Channel]) -> None:
    ends[0].say(Kind.NEED, {"chunks": []})
    ends[0].close()
    assert ends[1].hear(Kind.NEED) == (Kind.NEED, {"chunks": []})
    with pytest.raises(PeerAwayError, match="closed"):
        ends[1].hear(Kind.NEED)
    assert json.loads(encode(Kind.END, {})[FRAME.size :]) == {}
