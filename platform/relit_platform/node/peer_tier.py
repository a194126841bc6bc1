"""A node's part in the peer tier: what it gives to another node, keeps for another, and fetches.

    give    the newest cuts of its own ranks, to the next node of the ring: peer_sender
    keep    copies of other nodes' snapshots, in its memory budget: peer_copies
    fetch   a shard that a restore on this node needs and another node has, on whatever tier

Nothing happens before the manager has called `listen`, which it does from two nodes on. The secret
comes with it and lies in memory only: an agent that was killed gets it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from relit_platform.errors import PeerAwayError, PeerRefusedError, UsageError
from relit_platform.facts import Endpoint, NodeInventory, ShardSource
from relit_platform.node.disk_tier import DiskTier
from relit_platform.node.peer_channel import Channel, call, refuse
from relit_platform.node.peer_copies import PeerCopies
from relit_platform.node.peer_protocol import Identity, Kind, Place
from relit_platform.node.peer_sender import CHUNK_BYTES, PeerSender
from relit_platform.node.peer_server import PeerServer
from relit_platform.node.peer_transfer import (
    Outgoing,
    of_copy,
    of_disk,
    of_slot,
    receive_shard,
    send_shard,
)
from relit_platform.node.slot_pool import SlotPool
from relit_platform.run_config import CheckpointConfig
from relit_storage.errors import FencedError, StorageError
from relit_storage.stores.pace import Pace

IDLE_S = 60.0
FETCH_TRIES = 3
FETCH_PAUSE_S = 1.0

Level = Literal["info", "warning", "error"]
Say = Callable[[str, Level, dict[str, Any]], None]  # kind, level and data of a fact


class PeerTier:
    """Thread-safe. fence_epoch() is the epoch at which this node is sealed; say makes a fact.

    peered(on) tells the ranks of this node whether there is somebody to give cuts to. reap: see
    PeerCopies.
    """

    def __init__(
        self,
        *,
        node_id: str,
        run_id: str,
        host: str,
        folder: str,
        config: CheckpointConfig,
        slots: SlotPool,
        disk: DiskTier,
        fence_epoch: Callable[[], int],
        peered: Callable[[bool], None],
        reap: Callable[[int], object],
        say: Say,
    ) -> None:
        self._node_id = node_id
        self._run_id = run_id
        self._host = host
        self._budget_bytes = config.memory_budget_bytes
        self._slots = slots
        self._disk = disk
        self._fence_epoch = fence_epoch
        self._peered = peered
        self._say = say
        self.copies = PeerCopies(folder, self._room_bytes, reap)
        self._chunk_bytes = min(config.chunk_bytes, CHUNK_BYTES)
        self._sender = PeerSender(
            slots,
            lambda endpoint: call(endpoint, self._identity()),
            config.chunk_bytes,
            config.peer_bytes_per_s,
            failed=lambda reason: self._failed("give", reason),
            reached=lambda: self._worked("give"),
        )
        self._lock = threading.Lock()
        self._secret = b""
        self._epoch = 0
        self._server: PeerServer | None = None
        self._endpoint: Endpoint | None = None
        self._peer = ""
        self._failures: dict[str, int] = {}
        self._fetching: dict[int, threading.Lock] = {}
        self._closing = threading.Event()

    def start(self) -> None:
        """Take over the copies of an earlier life."""
        self.copies.adopt()

    def close(self) -> None:
        """End all connections; blocks for seconds at the most. The copies stay."""
        self._closing.set()
        self._sender.close()
        with self._lock:
            server, self._server, self._endpoint = self._server, None, None
        if server is not None:
            server.close()

    # ---- the manager's calls ----

    def listen(self, secret: bytes, epoch: int) -> Endpoint:
        """Answer agents that know this secret; where. Repeatable, with another secret too.

        Raises FencedError for an epoch that is over, OSError if the address cannot be bound.
        """
        with self._lock:
            if self._closing.is_set():
                raise UsageError(message="this agent is being closed.")
            self._enter(epoch)
            self._secret = secret
            if self._server is None or self._endpoint is None:
                self._server = PeerServer(
                    self._host,
                    self._serve,
                    self._identity,
                    lambda reason: self._failed("serve", reason),
                )
                self._endpoint = self._server.start()
            return self._endpoint

    def set_peer(self, node_id: str, endpoint: Endpoint | None, epoch: int) -> None:
        """Give cuts to this node from now on; None: to nobody. Repeatable.

        Raises FencedError for an epoch that is over.
        """
        with self._lock:
            self._enter(epoch)
            anew = endpoint is not None and node_id != self._peer
            self._peer = node_id if endpoint is not None else self._peer
            self._sender.aim(endpoint, anew=anew)
        self._peered(endpoint is not None)

    # ---- the ranks' call ----

    def fetch(self, source: ShardSource, step: int, generation: int, world: int) -> ShardSource:
        """The same shard on this node, checked on its way; blocks for the network.

        Ranks that ask for it at the same time get the same copy. Raises PeerError, BudgetError,
        StorageError.
        """
        place = Place(generation, step, source.rank, world)
        with self._lock:
            mutex = self._fetching.setdefault(source.rank, threading.Lock())
        with mutex:
            known = self.copies.find(place)
            if known is None:
                self._fetch(source, place)
                known = self.copies.find(place)
        if known is None:
            raise PeerAwayError(peer=source.node_id, reason="its copy had to make room at once")
        slot, offer = known
        return replace(
            source,
            location=slot.path,
            extras_location="",
            num_bytes=offer.image_bytes,
            chunk_bytes=offer.chunk_bytes,
            checksums=offer.checksums,
            extras_bytes=offer.extras_bytes,
            extras_checksum=offer.extras_checksum,
            endpoint=None,
        )

    # ---- the keeper's calls ----

    def added(self, inventory: NodeInventory) -> NodeInventory:
        """The inventory with the copies, and where they can be fetched."""
        peers = self.copies.infos(self._node_id)
        fence = max([inventory.fence, *(info.generation for info in peers)])
        return replace(inventory, peers=peers, endpoint=self._endpoint, fence=fence)

    def make_room(self, slot_bytes: int) -> None:
        """This node's own slots will take so much of the budget: copies yield."""
        gone = self.copies.shrink(self._budget_bytes - slot_bytes)
        if gone:
            self._failed("keep", f"{gone} copies made room for this node's own slots")

    # ---- inside ----

    def _room_bytes(self) -> int:
        return self._budget_bytes - self._slots.used_bytes()

    def _enter(self, epoch: int) -> None:
        newest = max(self._epoch, self._fence_epoch())
        if epoch < newest:
            raise FencedError(what="epoch", ours=epoch, newest=newest)
        self._epoch = epoch

    def _identity(self) -> Identity:
        return Identity(
            run_id=self._run_id,
            node_id=self._node_id,
            epoch=max(self._epoch, self._fence_epoch()),
            secret=self._secret,
        )

    def _serve(self, channel: Channel) -> None:
        """One connection, until the caller ends it or has nothing more to ask."""
        while True:
            try:
                kind, body = channel.hear(Kind.OFFER, Kind.WANT, timeout_s=IDLE_S)
            except PeerAwayError:
                return  # no shard is cut short by this
            if kind is Kind.OFFER:
                receive_shard(channel, body, self.copies)
            else:
                self._give(channel, Place(**body))
            self._worked("serve")

    def _give(self, channel: Channel, place: Place) -> None:
        try:
            outgoing = self._found(place)
        except (StorageError, OSError) as error:
            refuse(channel, str(error))
            raise
        if outgoing is None:
            refuse(channel, f"{place} is not here")
            return
        send_shard(channel, outgoing, Pace())

    def _found(self, place: Place) -> Outgoing | None:
        """Our own slot, a copy, or a shard on disk."""
        slot = self._slots.holding(place.step, place.generation, place.rank)
        if slot is not None and slot.info().world == place.world:
            return of_slot(slot, self._chunk_bytes)
        known = self.copies.find(place)
        if known is not None:
            return of_copy(*known)
        record = self._disk.record(place.step, place.generation, place.rank)
        if record is not None and record.world == place.world:
            return of_disk(self._disk.root, record)
        return None

    def _fetch(self, source: ShardSource, place: Place) -> None:
        if source.endpoint is None or not self._secret:
            reason = "this agent was told no secret yet, or that one does not listen"
            raise PeerRefusedError(peer=source.node_id, reason=reason)
        for number in range(FETCH_TRIES):
            try:
                self._fetch_once(source.endpoint, place)
                return
            except PeerAwayError:
                if number == FETCH_TRIES - 1 or self._closing.wait(FETCH_PAUSE_S):
                    raise

    def _fetch_once(self, endpoint: Endpoint, place: Place) -> None:
        channel = call(endpoint, self._identity())
        try:
            wanted = {
                "step": place.step,
                "generation": place.generation,
                "rank": place.rank,
                "world": place.world,
            }
            channel.say(Kind.WANT, wanted)
            _, body = channel.hear(Kind.OFFER)
            receive_shard(channel, body, self.copies, wanted=place)
        finally:
            channel.close()

    def _worked(self, what: str) -> None:
        self._failures.pop(what, None)

    def _failed(self, what: str, reason: str) -> None:
        """Said the 1st, 2nd, 4th, 8th, ... time in a row, never flooding."""
        count = self._failures[what] = self._failures.get(what, 0) + 1
        if count & (count - 1) == 0:
            self._say("peer.failed", "warning", {"what": what, "reason": reason, "count": count})
