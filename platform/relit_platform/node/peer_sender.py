"""Gives this node's newest cuts to the node behind it in the ring, as fast as that goes.

A cut is a snapshot that all ranks have marked as such, of one step (worker/cuts.py). It is found by
its slot's header, many times a second, without a message of the rank; when it is whole on the
other node the slot is marked as sent, which the rank reads in turn. Nothing is queued: what is sent
next is what is newest then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from relit_platform.errors import PeerAwayError, PeerError, PeerRefusedError, PlatformError
from relit_platform.facts import Endpoint
from relit_platform.node.peer_channel import Channel
from relit_platform.node.peer_transfer import of_slot, send_shard
from relit_platform.node.slot_pool import PooledSlot, SlotPool
from relit_storage.errors import CorruptShardError, StorageError
from relit_storage.stores.pace import Pace

CHUNK_BYTES = 4 << 20
MIN_CHUNK_BYTES = 64 << 10
LOOK_EVERY_S = 0.02
RETRY_FIRST_S = 0.25
RETRY_MAX_S = 5.0
CLOSE_S = 5.0


class PeerSender:
    """One thread. connect(endpoint) gives a channel; failed and reached hear of each outcome.

    bytes_per_s 0: no cap. Chunks are so small that one takes no more than a second.
    """

    def __init__(
        self,
        slots: SlotPool,
        connect: Callable[[Endpoint], Channel],
        chunk_bytes: int,
        bytes_per_s: int,
        failed: Callable[[str], None],
        reached: Callable[[], None],
    ) -> None:
        self._slots = slots
        self._connect = connect
        most = min(CHUNK_BYTES, chunk_bytes)
        self._chunk_bytes = min(most, max(MIN_CHUNK_BYTES, bytes_per_s)) if bytes_per_s else most
        self._closing = threading.Event()
        self._pace = Pace(bytes_per_s or None, sleep=self._sleep)
        self._failed = failed
        self._reached = reached
        self._wake = threading.Condition()
        self._target: Endpoint | None = None
        self._channel: tuple[Endpoint, Channel] | None = None
        self._thread: threading.Thread | None = None

    def aim(self, endpoint: Endpoint | None, *, anew: bool) -> None:
        """Send there from now on; None: to nobody. anew: nothing of ours is there yet.

        What is on its way to somebody else ends at once: a peer that is gone is not waited for.
        """
        with self._wake:
            self._target = endpoint
            if self._channel is not None and self._channel[0] != endpoint:
                self._channel[1].end()
            if anew:
                self._slots.forget_sent()
            if self._thread is None and endpoint is not None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="peer-send", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self) -> None:
        """Stop, in the middle of a shard if need be; blocks for seconds at the most."""
        with self._wake:
            self._closing.set()
            self._wake.notify()
            channel = self._channel
        if channel is not None:
            channel[1].close()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def send_due(self, endpoint: Endpoint) -> int:
        """Send what is newest and not there yet; how many shards. Raises PeerError, PlatformError.

        A shard that its rank overwrites meanwhile is left for the newer one; one that the other
        side does not want keeps none of the others back.
        """
        done = 0
        refused: PeerRefusedError | None = None
        for pooled in self._slots.unsent_cuts():
            if not self._aimed_at(endpoint):
                break
            try:
                self._send(pooled, endpoint)
            except CorruptShardError:
                self._hang_up()
            except PeerRefusedError as error:
                refused = error
            else:
                done += 1
        if refused is not None:
            raise refused
        return done

    def _send(self, pooled: PooledSlot, endpoint: Endpoint) -> None:
        slot = pooled.slot
        sequence = slot.sequence()
        outgoing = of_slot(slot, self._chunk_bytes)
        slot.check_unchanged(sequence)
        # The other side may have ended a connection that was idle: then a new one is tried.
        for last in (self._channel is None, True):
            try:
                send_shard(self._open(endpoint), outgoing, self._pace)
                break
            except PeerError:
                self._hang_up()
                if last or not self._aimed_at(endpoint):
                    raise
        with self._wake:
            if self._target == endpoint:
                slot.mark_sent(sequence)

    def _open(self, endpoint: Endpoint) -> Channel:
        held = self._channel
        if held is not None and held[0] == endpoint:
            return held[1]
        self._hang_up()
        channel = self._connect(endpoint)
        with self._wake:
            aimed = self._aimed_at(endpoint)
            if aimed:
                self._channel = (endpoint, channel)
        if not aimed:
            channel.close()
            raise PeerAwayError(peer=channel.peer, reason="it is our peer no longer")
        return channel

    def _aimed_at(self, endpoint: Endpoint) -> bool:
        return self._target == endpoint and not self._closing.is_set()

    def _hang_up(self) -> None:
        with self._wake:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel[1].close()

    def _run(self) -> None:
        pause_s = RETRY_FIRST_S
        while not self._closing.is_set():
            with self._wake:
                while self._target is None and not self._closing.is_set():
                    self._wake.wait()
                target = self._target
            if target is None:
                break
            try:
                if self.send_due(target):
                    self._reached()
                pause_s = RETRY_FIRST_S
                self._closing.wait(LOOK_EVERY_S)
            except (PeerError, PlatformError, StorageError, OSError) as error:
                if not self._aimed_at(target):  # it was ended here, and another one is due
                    pause_s = RETRY_FIRST_S
                    continue
                self._failed(str(error))
                self._closing.wait(pause_s)
                pause_s = min(RETRY_MAX_S, 2 * pause_s)
        self._hang_up()

    def _sleep(self, seconds: float) -> None:
        self._closing.wait(seconds)
