"""Listens for the agents of other nodes: one thread accepts, a few serve, each a connection.

Bound to the address by which Ray knows this node, and only once somebody asks for it: on a cluster
of one node nothing listens. Several threads, because a shard that a restore waits for must not
stand behind a snapshot that comes in slowly.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from relit_platform.errors import PeerError, PlatformError
from relit_platform.facts import Endpoint
from relit_platform.node.peer_channel import Channel, answer
from relit_platform.node.peer_protocol import Identity
from relit_storage.errors import StorageError

MAX_CONNECTIONS = 8
ACCEPT_PAUSE_S = 0.5  # after an error
CLOSE_S = 5.0

Serve = Callable[[Channel], None]


class PeerServer:
    """serve is called in a thread for each connection that has proven itself; it ends with it.

    identity is asked for at each greeting: epoch and secret change. failed hears why a connection
    was given up; one that merely ended is no failure.
    """

    def __init__(
        self,
        host: str,
        serve: Serve,
        identity: Callable[[], Identity],
        failed: Callable[[str], None],
    ) -> None:
        self._host = host
        self._serve = serve
        self._identity = identity
        self._failed = failed
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def start(self) -> Endpoint:
        """Listen on a free port; where. Raises OSError."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family, backlog=MAX_CONNECTIONS)
        self._listener = listener
        port = int(listener.getsockname()[1])
        self._start(lambda: self._accept(listener), "peer-accept")
        return self._host, port

    def close(self) -> None:
        """End every connection and stop listening; blocks for seconds at the most."""
        self._closing.set()
        if self._listener is not None:
            try:
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            except OSError:
                pass  # it has ended already
        with self._lock:
            channels, threads = list(self._channels), list(self._threads)
        for channel in channels:
            channel.close()
        for thread in threads:
            thread.join(CLOSE_S)

    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive()]
            self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not self._closing.is_set():
                try:
                    sock, address = listener.accept()
                except OSError as error:  # out of files, say: others may go away
                    if not self._closing.wait(ACCEPT_PAUSE_S):
                        self._failed(f"accepting: {error}")
                    continue
                self._welcome(sock, f"{address[0]}:{address[1]}")

    def _welcome(self, sock: socket.socket, peer: str) -> None:
        channel = Channel(sock, peer)
        with self._lock:
            full = len(self._channels) >= MAX_CONNECTIONS or self._closing.is_set()
            if not full:
                self._channels.add(channel)
        if full:
            channel.close()
            self._failed(f"{peer} was turned away: {MAX_CONNECTIONS} connections are open")
            return
        self._start(lambda: self._attend(channel), f"peer-{peer}")

    def _attend(self, channel: Channel) -> None:
        try:
            channel.node = answer(channel, self._identity)
            self._serve(channel)
        except (PeerError, PlatformError, StorageError, OSError) as error:
            if not self._closing.is_set():
                self._failed(str(error))
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()
