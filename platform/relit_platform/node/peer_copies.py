"""Copies of other nodes' snapshots, in slot files of this node's shared memory.

For each rank there are two: the newest whole copy, which is never overwritten, and room for the
next one. Beside a whole copy lies what was offered (`<file>.offer`), so its checksums are known
as long as the copy is; a slot without it is no copy. A copy that was cut short keeps the chunks
that have arrived, and is gone on with when the same is offered again while this process lives.

All of it lies in the node's memory budget, and yields to the node's own slots. What is of no use
any more, of a former neighbour or of an earlier restore, goes when a new copy would not fit.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from relit_platform.errors import BudgetError, PeerError, PeerRefusedError
from relit_platform.facts import SlotInfo
from relit_platform.node.peer_protocol import (
    MAX_JSON_BYTES,
    Kind,
    Offer,
    Place,
    decode,
    parse_offer,
)
from relit_platform.node.slots import Slot, create_slot, slot_file_bytes
from relit_storage.checkpoint.checksum import checksum
from relit_storage.checkpoint.durable import read_file
from relit_storage.errors import CorruptShardError

SUFFIX = ".slot"
OFFER_SUFFIX = ".offer"
PER_RANK = 2
MIN_EXTRAS_BYTES = 64 << 10


@dataclass(slots=True, eq=False)
class _Copy:
    """A slot file. offer: what is in it, or on its way into it; None: nothing of use.

    giver: the node that gave it, "" if an earlier life got it. fetched: we have asked for it, so
    it lies elsewhere, too, and nobody counts on it here.
    """

    rank: int
    slot: Slot
    file_bytes: int
    offer: Offer | None = None
    giver: str = ""
    fetched: bool = False
    whole: bool = False
    busy: bool = False
    have: set[int] = field(default_factory=set)
    extras: bytearray = field(default_factory=bytearray)


class Arriving:
    """A copy that is being filled, by one thread. Ends with `finish` or `stop`."""

    def __init__(self, copies: PeerCopies, copy: _Copy, offer: Offer) -> None:
        self.offer = offer
        self._copies = copies
        self._copy = copy

    @property
    def missing(self) -> list[int]:
        """The chunks that are not here yet."""
        if self._copy.whole:
            return []
        return [n for n in range(self.offer.extras_chunk + 1) if n not in self._copy.have]

    def room(self, number: int) -> memoryview:
        """Where a chunk belongs."""
        begin, end = self.offer.chunk_range(number)
        if number == self.offer.extras_chunk:
            return memoryview(self._copy.extras)[begin:end]
        return self._copy.slot.image[begin:end]

    def filled(self, number: int) -> None:
        """A chunk is in its place. Raises CorruptShardError if it is not what was offered."""
        if checksum(self.room(number)) != self.offer.checksum_of(number):
            reason = f"chunk {number} fails its checksum on arrival"
            raise CorruptShardError(file=self._copy.slot.path, reason=reason)
        self._copy.have.add(number)

    def finish(self) -> str:
        """Make the copy count, now that nothing is missing; its path. Repeatable."""
        if self.missing:
            raise CorruptShardError(file=self._copy.slot.path, reason="chunks are missing")
        self._copies.complete(self._copy)
        return self._copy.slot.path

    def stop(self) -> None:
        """Leave it as it is: the next Arriving of the same offer goes on."""
        self._copy.busy = False


class PeerCopies:
    """Thread-safe. room() says how many bytes of the budget the node's own slots leave.

    reap(generation) gives up slots that nobody needs since that generation goes on; it is called
    when a copy of such a cut does not fit.
    """

    def __init__(
        self,
        folder: str,
        room: Callable[[], int],
        reap: Callable[[int], object] = lambda generation: None,
    ) -> None:
        self._folder = folder
        self._room = room
        self._reap = reap
        self._lock = threading.Lock()
        self._making = threading.Lock()  # held while a file is made, which takes its time
        self._copies: dict[str, _Copy] = {}
        self._number = 0

    def adopt(self) -> None:
        """Take over the whole copies that an earlier life has left; all else is removed."""
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        names = sorted(os.listdir(self._folder))
        for name in names:
            path = os.path.join(self._folder, name)
            copy = _adopted(path) if name.endswith(SUFFIX) else None
            if copy is not None:
                self._copies[path] = copy
        kept = {*self._copies, *(path + OFFER_SUFFIX for path in self._copies)}
        for path in (os.path.join(self._folder, name) for name in names):
            if path not in kept:
                _unlink(path)
        numbers = [name.split(".")[1] for name in names if name.count(".") >= 2]
        self._number = max((int(n) + 1 for n in numbers if n.isdecimal()), default=0)

    @property
    def used_bytes(self) -> int:
        """What the copies take."""
        with self._lock:
            return sum(copy.file_bytes for copy in self._copies.values())

    def infos(self, node_id: str) -> tuple[SlotInfo, ...]:
        """The whole copies."""
        with self._lock:
            found = [(c, c.offer) for c in self._copies.values() if c.whole]
        return tuple(_info(copy, offer, node_id) for copy, offer in found if offer is not None)

    def find(self, place: Place) -> tuple[Slot, Offer] | None:
        """The whole copy of this shard, or None."""
        with self._lock:
            for copy in self._copies.values():
                if copy.whole and copy.offer is not None and copy.offer.place == place:
                    return copy.slot, copy.offer
        return None

    def begin(self, offer: Offer, peer: str, *, wanted: bool = False) -> Arriving:
        """Prepare for a shard; blocks while memory is reserved, about 0.35 s/GiB.

        Where a newer copy of that rank is here nothing is missing, and nothing changes: nobody
        needs the older one any more. peer: the node that gives it. wanted: we have asked for it,
        so it need not be the newest. Raises PeerRefusedError if another copy of that rank is
        arriving, BudgetError if there is no room.
        """
        with self._making:
            with self._lock:
                known = self._known(offer, peer, wanted)
                if known is None:
                    self._check_idle(offer.rank, peer, wanted)
                    known = self._reused(offer, peer, wanted)
            copy = known or self._made(offer, peer, wanted)
            if not copy.whole:
                self._prefill(copy, offer)
        return Arriving(self, copy, offer)

    def complete(self, copy: _Copy) -> None:
        """The copy is whole; called by Arriving. Raises CorruptShardError if it had to go."""
        with self._lock:
            if copy.whole:
                return
            offer, slot = copy.offer, copy.slot
            if self._copies.get(slot.path) is not copy or offer is None:
                raise CorruptShardError(file=slot.path, reason="its memory was needed")
            slot.set_extras(bytes(copy.extras))
            _write(slot.path + OFFER_SUFFIX, json.dumps(offer.body()).encode())
            slot.commit()  # last: if the line above fails, finish can be tried again
            copy.whole, copy.busy = True, False
            copy.have.clear()
            copy.extras = bytearray()

    def shrink(self, limit_bytes: int) -> int:
        """Give up copies until they take no more; how many whole ones went.

        First what is not the newest of its rank, then the oldest.
        """
        with self._lock:
            used = sum(copy.file_bytes for copy in self._copies.values())
            gone = 0
            for copy in sorted(self._copies.values(), key=self._worth):
                if used <= limit_bytes:
                    break
                used -= copy.file_bytes
                gone += copy.whole
                self._remove(copy)
            return gone

    # ---- under the lock ----

    def _of_rank(self, rank: int) -> list[_Copy]:
        return [copy for copy in self._copies.values() if copy.rank == rank]

    def _newest(self, rank: int) -> _Copy | None:
        whole = [copy for copy in self._of_rank(rank) if copy.whole and copy.offer]
        return max(whole, key=_order, default=None)

    def _worth(self, copy: _Copy) -> tuple[bool, Place]:
        return self._newest(copy.rank) is copy, _order(copy)

    def _known(self, offer: Offer, peer: str, wanted: bool) -> _Copy | None:
        """A copy of just this, whole or to be gone on with; or a newer one that is whole."""
        newest = self._newest(offer.rank)
        if newest is not None and not wanted and offer.place < _order(newest):
            return newest
        for copy in self._of_rank(offer.rank):
            if copy.offer is None or copy.busy or copy.offer.place != offer.place:
                continue
            if copy.whole or copy.offer == offer:
                copy.busy = not copy.whole
                if not wanted:
                    copy.giver, copy.fetched = peer, False
                return copy
        return None

    def _check_idle(self, rank: int, peer: str, wanted: bool) -> None:
        if not wanted and any(copy.busy for copy in self._of_rank(rank)):
            raise PeerRefusedError(peer=peer, reason=f"another copy of rank {rank} is arriving")

    def _reused(self, offer: Offer, peer: str, wanted: bool) -> _Copy | None:
        """A file that may be overwritten, begun anew; surplus ones of another size go."""
        newest = self._newest(offer.rank)
        spare = [c for c in self._of_rank(offer.rank) if c is not newest and not c.busy]
        spare.sort(key=_order)
        fits = [c for c in spare if _fits(c.slot, offer)]
        if fits:
            self._begin(fits[0], offer, peer, wanted)
            return fits[0]
        while spare and len(self._of_rank(offer.rank)) >= PER_RANK + wanted:
            self._remove(spare.pop(0))
        return None

    def _begin(self, copy: _Copy, offer: Offer, peer: str, wanted: bool) -> None:
        copy.whole, copy.busy, copy.offer = False, True, offer
        copy.giver, copy.fetched = peer, wanted
        copy.extras = bytearray(offer.extras_bytes)
        copy.have.clear()
        _unlink(copy.slot.path + OFFER_SUFFIX)
        copy.slot.begin(offer.generation, offer.step, offer.rank, offer.world)

    def _remove(self, copy: _Copy) -> None:
        """Whoever still reads or fills it has its memory until then."""
        del self._copies[copy.slot.path]
        _unlink(copy.slot.path + OFFER_SUFFIX)
        _unlink(copy.slot.path)

    def _useless(self, copy: _Copy, offer: Offer, peer: str) -> int | None:
        """Whether a copy may go for another rank's cut: 0 at once, 2 last of all, None never.

        A cut is begun when the one before is whole, so those before that one are of no use. One
        node gives copies to this one, of the same ranks as long as the generation lasts: what
        another has given, or an older generation, is what a change of ring or ranks has left.
        """
        at, now = _step(copy), (offer.generation, offer.step)
        if copy.busy or copy.rank == offer.rank or at >= now:
            return None
        older = at[0] < offer.generation
        if copy.fetched:
            return 0 if older else None  # else a restore may be about to read it
        newest, ours = self._newest(copy.rank) is copy, copy.giver == peer and not older
        if newest and ours:
            return None  # the next one of that rank is on its way
        cuts = [c for c in self._copies.values() if not c.fetched and _step(c) < now]
        cuts = [c for c in cuts if _step(c)[0] == offer.generation]
        if not copy.whole or any(at < _step(c) for c in cuts):
            return 0
        if ours:
            return None
        if not newest:
            return 1
        anew = any(c.whole and c.giver == peer and at <= _step(c) for c in cuts)
        return 2 if older or anew else None

    def _useless_for_restore(self, copy: _Copy, offer: Offer) -> int | None:
        """Whether a copy may go for one that a restore asks for, as in `_useless`.

        The step that is restored is the newest that is whole, so what is older comes to nothing.
        """
        at, now = _step(copy), (offer.generation, offer.step)
        if copy.busy or at == now:
            return None
        if copy.fetched or not copy.whole:
            return 0
        if at > now:
            return None
        return 2 if self._newest(copy.rank) is copy else 1

    # ---- outside of it ----

    def _make_way(self, offer: Offer, peer: str, wanted: bool, missing: int) -> None:
        """Remove what is of least use, or nothing, if so many bytes are not to be had that way."""
        with self._lock:
            ranked: list[tuple[int, Place, _Copy]] = []
            for copy in self._copies.values():
                if wanted:
                    level = self._useless_for_restore(copy, offer)
                else:
                    level = self._useless(copy, offer, peer)
                if level is not None:
                    ranked.append((level, _order(copy), copy))
            ranked.sort(key=lambda found: found[:2])
            going: list[_Copy] = []
            for _, _, copy in ranked:
                if missing > 0:
                    going.append(copy)
                    missing -= copy.file_bytes
            if missing <= 0:
                for copy in going:
                    self._remove(copy)

    def _made(self, offer: Offer, peer: str, wanted: bool) -> _Copy:
        capacity = MIN_EXTRAS_BYTES
        while capacity < 2 * offer.extras_bytes:
            capacity *= 2
        size = slot_file_bytes(offer.image_bytes, capacity)
        needed, room = self.used_bytes + size, self._room()
        what = f"a copy of rank {offer.rank}'s snapshot"
        if needed > room and not wanted:
            self._reap(offer.generation)
            room = self._room()
        if needed > room:
            self._make_way(offer, peer, wanted, needed - room)
            needed = self.used_bytes + size
        if needed > room:
            raise BudgetError(what=what, needed_bytes=needed, budget_bytes=max(0, room))
        path = os.path.join(self._folder, f"rank-{offer.rank:05d}.{self._number}{SUFFIX}")
        self._number += 1
        try:
            create_slot(path, offer.image_bytes, capacity)
            copy = _Copy(offer.rank, Slot.open(path), size)
        except OSError as error:
            what = f"{what} on tmpfs ({error.strerror})"
            raise BudgetError(what=what, needed_bytes=needed, budget_bytes=room) from error
        with self._lock:
            self._begin(copy, offer, peer, wanted)
            self._copies[path] = copy
        return copy

    def _prefill(self, copy: _Copy, offer: Offer) -> None:
        """What has not changed since the newest whole copy is taken from there."""
        if copy.have:
            return  # it is gone on with
        if not offer.extras_bytes:
            copy.have.add(offer.extras_chunk)
        with self._lock:
            newest = self._newest(offer.rank)
        old = newest.offer if newest else None
        if newest is None or old is None:
            return
        if (old.image_bytes, old.chunk_bytes) != (offer.image_bytes, offer.chunk_bytes):
            return
        for number, sums in enumerate(zip(old.checksums, offer.checksums, strict=True)):
            begin, end = offer.chunk_range(number)
            if sums[0] == sums[1] and checksum(newest.slot.image[begin:end]) == sums[1]:
                copy.slot.image[begin:end] = newest.slot.image[begin:end]
                copy.have.add(number)


def _order(copy: _Copy) -> Place:
    return copy.offer.place if copy.offer else Place(0, 0, 0, 0)


def _step(copy: _Copy) -> tuple[int, int]:
    place = _order(copy)
    return place.generation, place.step


def _fits(slot: Slot, offer: Offer) -> bool:
    header = slot.info()
    return header.image_bytes == offer.image_bytes and header.extras_capacity >= offer.extras_bytes


def _adopted(path: str) -> _Copy | None:
    try:
        slot = Slot.open(path)
        header = slot.info()
        body = decode(Kind.OFFER, read_file(path + OFFER_SUFFIX, MAX_JSON_BYTES), path)
        offer = parse_offer(body, path)
    except (OSError, CorruptShardError, PeerError):
        return None
    place = Place(header.generation, header.step, header.rank, header.world)
    if not header.complete or place != offer.place or header.image_bytes != offer.image_bytes:
        return None
    return _Copy(offer.rank, slot, os.stat(path).st_size, offer=offer, whole=True)


def _info(copy: _Copy, offer: Offer, node_id: str) -> SlotInfo:
    return SlotInfo(
        path=copy.slot.path,
        worker_id=f"rank-{offer.rank}",
        node_id=node_id,
        generation=offer.generation,
        step=offer.step,
        rank=offer.rank,
        world=offer.world,
        image_bytes=offer.image_bytes,
        pinned=False,
        chunk_bytes=offer.chunk_bytes,
        checksums=offer.checksums,
        extras_bytes=offer.extras_bytes,
        extras_checksum=offer.extras_checksum,
    )


def _write(path: str, data: bytes) -> None:
    """On tmpfs there is nothing to sync; the rename makes it whole or absent."""
    try:
        with open(f"{path}.tmp", "wb") as file:
            file.write(data)
        os.rename(f"{path}.tmp", path)
    except OSError:
        _unlink(f"{path}.tmp")
        raise


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # it is not there, or no file: then nobody counts it
