"""One TCP connection between two agents: frames with a deadline each, and the greeting."""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from relit_platform.errors import PeerAwayError, PeerError, PeerRefusedError
from relit_platform.facts import Endpoint
from relit_platform.node.peer_protocol import (
    CHUNK_NUMBER,
    FRAME,
    MAX_GREETING_BYTES,
    MAX_JSON_BYTES,
    MAX_REASON,
    NONCE_BYTES,
    VERSION,
    Identity,
    Kind,
    decode,
    encode,
    parse_frame,
    proof,
)

CONNECT_S = 3.0
GREETING_S = 5.0
FRAME_S = 30.0  # for a whole frame: 140 KB/s is slow enough

Body = dict[str, Any]


class Channel:
    """Used by one thread at a time. Every call blocks until its deadline at the most.

    Raises PeerAwayError when the connection breaks or the deadline passes, PeerError for what is
    not the protocol. After either the channel is of no use but to be closed.

    peer: the address, for messages. node: the id of a caller that has proven itself, else "".
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self.node = ""
        self._sock = sock
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            pass  # it is down already; the first frame says so

    def say(self, kind: Kind, body: Body, timeout_s: float = FRAME_S) -> None:
        """Send a frame of JSON."""
        self._send(encode(kind, body), timeout_s)

    def say_chunk(self, number: int, content: memoryview) -> None:
        """Send a chunk, out of the caller's own memory."""
        head = FRAME.pack(Kind.CHUNK, CHUNK_NUMBER.size + len(content)) + CHUNK_NUMBER.pack(number)
        self._send(head, FRAME_S)
        self._send(content, FRAME_S)

    def hear(
        self, *kinds: Kind, timeout_s: float = FRAME_S, max_bytes: int = MAX_JSON_BYTES
    ) -> tuple[Kind, Body]:
        """The next frame, which must be JSON of one of these kinds.

        Raises PeerRefusedError for a REFUSED that is not among them.
        """
        kind, length = self.next_frame(timeout_s, max_bytes)
        if kind is not Kind.REFUSED and kind not in kinds:
            wanted = ", ".join(k.name for k in kinds)
            raise PeerError(peer=self.peer, reason=f"said {kind.name} instead of {wanted}")
        body = decode(kind, self.take(length, timeout_s), self.peer)
        if kind is Kind.REFUSED and kind not in kinds:
            raise PeerRefusedError(peer=self.peer, reason=str(body["reason"])[:MAX_REASON])
        return kind, body

    def next_frame(
        self, timeout_s: float = FRAME_S, max_bytes: int = MAX_JSON_BYTES
    ) -> tuple[Kind, int]:
        """Kind and length of the next frame, whose content is then to be taken."""
        return parse_frame(self.take(FRAME.size, timeout_s), self.peer, max_bytes)

    def take(self, num_bytes: int, timeout_s: float = FRAME_S) -> bytes:
        """So many bytes; the caller has bounded the number."""
        buffer = bytearray(num_bytes)
        self.take_into(memoryview(buffer), timeout_s)
        return bytes(buffer)

    def take_into(self, room: memoryview, timeout_s: float = FRAME_S) -> None:
        """Fill a buffer."""
        deadline_s = time.monotonic() + timeout_s
        done = 0
        while done < len(room):
            count = self._receive(room[done:], deadline_s)
            if not count:
                raise PeerAwayError(peer=self.peer, reason="the connection was closed")
            done += count

    def end(self) -> None:
        """End the connection under the thread that uses it, which wakes, and closes it then."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is down already

    def close(self) -> None:
        """End the connection and let go of it; also wakes a thread that waits on it."""
        self.end()
        self._sock.close()

    def _receive(self, room: memoryview, deadline_s: float) -> int:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise PeerAwayError(peer=self.peer, reason="no answer in time")
        try:
            self._sock.settimeout(left_s)
            return self._sock.recv_into(room)
        except OSError as error:
            raise PeerAwayError(peer=self.peer, reason=_words(error)) from error

    def _send(self, content: bytes | memoryview, timeout_s: float) -> None:
        try:
            self._sock.settimeout(timeout_s)  # for all of it
            self._sock.sendall(content)
        except OSError as error:
            raise PeerAwayError(peer=self.peer, reason=_words(error)) from error


def call(endpoint: Endpoint, identity: Identity) -> Channel:
    """A connection to a listening agent that has proven that it is of this run.

    Blocks for seconds at the most. Raises PeerAwayError, PeerError, or PeerRefusedError if one of
    the two does not know the other's secret, or if our epoch is over.
    """
    peer = f"{endpoint[0]}:{endpoint[1]}"
    try:
        channel = Channel(socket.create_connection(endpoint, CONNECT_S), peer)
    except OSError as error:
        raise PeerAwayError(peer=peer, reason=_words(error)) from error
    try:
        _greet(channel, identity)
    except BaseException:
        channel.close()
        raise
    return channel


def _greet(channel: Channel, identity: Identity) -> None:
    body = _hear_greeting(channel, Kind.CHALLENGE)
    nonces = (str(body["nonce"]), secrets.token_hex(NONCE_BYTES))
    hello = {
        "v": VERSION,
        "run": identity.run_id,
        "node": identity.node_id,
        "epoch": identity.epoch,
        "nonce": nonces[1],
        "proof": proof("caller", identity, identity, nonces),
    }
    channel.say(Kind.HELLO, hello, GREETING_S)
    body = _hear_greeting(channel, Kind.WELCOME)
    if not _same(body["proof"], proof("listener", identity, identity, nonces)):
        raise PeerRefusedError(peer=channel.peer, reason="it does not know this run's secret")


def answer(channel: Channel, identity: Callable[[], Identity]) -> str:
    """Greet whoever has called; the node id that it proved to be of. Blocks for seconds at most.

    Raises PeerRefusedError, after having told the caller why: another run, a wrong proof, or an
    epoch that is over.
    """
    nonce = secrets.token_hex(NONCE_BYTES)
    channel.say(Kind.CHALLENGE, {"v": VERSION, "nonce": nonce}, GREETING_S)
    body = _hear_greeting(channel, Kind.HELLO)
    ours = identity()
    claimed = replace(ours, run_id=body["run"], node_id=body["node"], epoch=body["epoch"])
    nonces = (nonce, str(body["nonce"]))
    known = _same(body["proof"], proof("caller", ours, claimed, nonces))
    reason = ""
    if body["v"] != VERSION:
        reason = f"version {body['v']} of the protocol, here it is {VERSION}"
    elif claimed.run_id != ours.run_id or not known:
        reason = "the run or its secret is another one"
    elif claimed.epoch < ours.epoch:
        reason = f"epoch {claimed.epoch} is over: {ours.epoch} has taken over"
    if reason:
        refuse(channel, reason)
        raise PeerRefusedError(peer=channel.peer, reason=reason)
    mine = proof("listener", ours, claimed, nonces)
    channel.say(Kind.WELCOME, {"proof": mine}, GREETING_S)
    return claimed.node_id


def refuse(channel: Channel, reason: str) -> None:
    """Say no; if that does not arrive, the connection's end says as much."""
    try:
        channel.say(Kind.REFUSED, {"reason": reason[:MAX_REASON]}, GREETING_S)
    except PeerError:
        pass


def _hear_greeting(channel: Channel, kind: Kind) -> Body:
    return channel.hear(kind, timeout_s=GREETING_S, max_bytes=MAX_GREETING_BYTES)[1]


def _same(said: str, right: str) -> bool:
    return hmac.compare_digest(said.encode(errors="replace"), right.encode())


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
