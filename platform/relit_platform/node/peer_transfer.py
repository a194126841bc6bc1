"""One shard over one channel: whoever has it offers, whoever lacks it says which chunks.

The receiver checks each chunk before it counts, the sender looks before it ends whether its own
memory still holds what it had offered. Cut short anywhere, the next try sends the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from relit_platform.errors import BudgetError, PeerError, PeerRefusedError
from relit_platform.facts import ShardPersisted
from relit_platform.node.peer_channel import Channel, refuse
from relit_platform.node.peer_copies import PeerCopies
from relit_platform.node.peer_protocol import (
    CHUNK_NUMBER,
    Kind,
    Offer,
    Place,
    parse_need,
    parse_offer,
)
from relit_platform.node.slots import Slot
from relit_storage.checkpoint.durable import read_file
from relit_storage.errors import CorruptShardError
from relit_storage.stores.pace import Pace


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A shard that can be given. image(begin, end) gives bytes of it; check raises
    CorruptShardError once it is no longer what was offered.
    """

    offer: Offer
    image: Callable[[int, int], memoryview]
    extras: bytes
    check: Callable[[], None]


def of_slot(slot: Slot, chunk_bytes: int) -> Outgoing:
    """A snapshot in a slot, as it is now. Reads it once, for its checksums.

    Raises CorruptShardError if the slot is not COMPLETE or is overwritten meanwhile.
    """
    sequence = slot.sequence()
    header = slot.info()
    extras = slot.read_extras()
    place = Place(header.generation, header.step, header.rank, header.world)
    offer = Offer.of(place, slot.image, extras, chunk_bytes)
    slot.check_unchanged(sequence)
    return Outgoing(offer, _of_image(slot), extras, lambda: slot.check_unchanged(sequence))


def of_copy(slot: Slot, offer: Offer) -> Outgoing:
    """A copy from another node, with the checksums that it came with."""
    sequence = slot.sequence()
    extras = slot.read_extras()
    return Outgoing(offer, _of_image(slot), extras, lambda: slot.check_unchanged(sequence))


def of_disk(root: str, record: ShardPersisted) -> Outgoing:
    """A shard on this node's disk, with the checksums of its record. Raises OSError."""
    path = os.path.join(root, record.file)

    def image(begin: int, end: int) -> memoryview:
        with open(path, "rb") as file:
            file.seek(begin)
            found = file.read(end - begin)
        if len(found) != end - begin:
            raise CorruptShardError(file=path, reason=f"ends at {begin + len(found)}")
        return memoryview(found)

    extras = read_file(os.path.join(root, record.extras_file), record.extras_bytes)
    offer = Offer(
        step=record.step,
        generation=record.generation,
        rank=record.rank,
        world=record.world,
        image_bytes=record.num_bytes,
        chunk_bytes=record.chunk_bytes,
        checksums=record.checksums,
        extras_bytes=record.extras_bytes,
        extras_checksum=record.extras_checksum,
    )
    return Outgoing(offer, image, extras, lambda: None)  # published files never change


def send_shard(channel: Channel, outgoing: Outgoing, pace: Pace) -> int:
    """Offer a shard and give what is missing there; how many bytes that was. Blocks for them.

    Raises PeerRefusedError if it is not wanted, PeerError for a broken connection,
    CorruptShardError if it was overwritten here before all of it was there.
    """
    offer = outgoing.offer
    channel.say(Kind.OFFER, offer.body())
    _, body = channel.hear(Kind.NEED)
    sent = 0
    try:
        for number in parse_need(body, offer, channel.peer):
            begin, end = offer.chunk_range(number)
            pace.take(end - begin)
            outgoing.check()
            is_extras = number == offer.extras_chunk
            content = memoryview(outgoing.extras) if is_extras else outgoing.image(begin, end)
            channel.say_chunk(number, content)
            sent += end - begin
        outgoing.check()
        channel.say(Kind.END, {})
        channel.hear(Kind.KEPT)
    except PeerError:
        outgoing.check()  # a chunk that was overwritten under way is refused for its checksum
        raise
    return sent


def receive_shard(
    channel: Channel, body: dict[str, object], copies: PeerCopies, *, wanted: Place | None = None
) -> str:
    """Take the shard of an OFFER whose body was heard; the path of the copy. Blocks for it.

    wanted: what was asked for, else the offer is unasked. The sender is told of a refusal. Raises
    PeerRefusedError, BudgetError, CorruptShardError (a chunk is not what was offered), PeerError.
    """
    offer = parse_offer(body, channel.peer)
    try:
        if wanted is not None and offer.place != wanted:
            reason = f"{offer.place} was offered for {wanted}"
            raise PeerRefusedError(peer=channel.peer, reason=reason)
        giver = channel.node or channel.peer
        arriving = copies.begin(offer, giver, wanted=wanted is not None)
        try:
            missing = set(arriving.missing)
            channel.say(Kind.NEED, {"chunks": sorted(missing)})
            while missing:
                number = _take_chunk(channel, offer, arriving.room, missing)
                arriving.filled(number)
                missing.discard(number)
            channel.hear(Kind.END)
            path = arriving.finish()
        finally:
            arriving.stop()
    except (BudgetError, CorruptShardError, PeerRefusedError) as error:
        refuse(channel, str(error.fields.get("reason", error)))
        raise
    channel.say(Kind.KEPT, {})
    return path


def _of_image(slot: Slot) -> Callable[[int, int], memoryview]:
    return lambda begin, end: slot.image[begin:end]


def _take_chunk(
    channel: Channel, offer: Offer, room: Callable[[int], memoryview], missing: set[int]
) -> int:
    kind, length = channel.next_frame()
    if kind is not Kind.CHUNK or length < CHUNK_NUMBER.size:
        raise PeerError(peer=channel.peer, reason=f"said {kind.name} instead of CHUNK")
    (number,) = CHUNK_NUMBER.unpack(channel.take(CHUNK_NUMBER.size))
    if number not in missing:
        raise PeerError(peer=channel.peer, reason=f"chunk {number} was not asked for")
    begin, end = offer.chunk_range(number)
    if length - CHUNK_NUMBER.size != end - begin:
        reason = f"chunk {number} has {length - CHUNK_NUMBER.size} of {end - begin} bytes"
        raise PeerError(peer=channel.peer, reason=reason)
    channel.take_into(room(number))
    return int(number)
