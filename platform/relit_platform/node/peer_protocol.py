"""What agents of two nodes say to each other, as bytes; pure, without sockets.

A frame is its kind (1 byte), a length (4 bytes) and that many bytes: JSON, or in a CHUNK its number
(4 bytes) and its content. A REFUSED with its reason may stand for any answer.

    caller              listener
                    <-  CHALLENGE   nonce
    HELLO           ->              run, node, epoch, nonce, proof
                    <-  WELCOME     proof
    then, as often as wanted, a copy is given
    OFFER           ->              a shard: place, sizes, a checksum for each chunk
                    <-  NEED        numbers of the chunks that are missing there
    CHUNK ...       ->
    END             ->
                    <-  KEPT        it is whole, and was checked; or a newer one is here
    or asked for
    WANT            ->              step, generation, rank, world
                    <-  OFFER, then as above with the sides exchanged

Both sides prove that they know the run's secret by an HMAC over both nonces; the secret itself is
never sent. That decides who may connect. It hides nothing: on a network where others listen or
change what passes, the connection between nodes has to be protected below.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

from relit_platform.errors import PeerError
from relit_platform.node.persist import MAX_WORLD
from relit_storage.checkpoint.checksum import checksum, chunk_checksums, num_chunks
from relit_storage.checkpoint.manifest_schema import check_types

VERSION = 1
FRAME = struct.Struct(">BI")
CHUNK_NUMBER = struct.Struct(">I")
NONCE_BYTES = 32
MAX_GREETING_BYTES = 4096  # of those who have proven nothing yet
MAX_JSON_BYTES = 8 << 20
MAX_CHUNK_BYTES = 64 << 20
MAX_IMAGE_BYTES = 1 << 40
MAX_CHUNKS = 200_000
MAX_REASON = 500


class Kind(IntEnum):
    """The kinds of frames."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    OFFER = 5
    NEED = 6
    CHUNK = 7
    END = 8
    KEPT = 9
    WANT = 10


_SCHEMAS: dict[Kind, dict[str, Any]] = {
    Kind.CHALLENGE: {"v": int, "nonce": str},
    Kind.HELLO: {"v": int, "run": str, "node": str, "epoch": int, "nonce": str, "proof": str},
    Kind.WELCOME: {"proof": str},
    Kind.REFUSED: {"reason": str},
    Kind.OFFER: {
        "step": int,
        "generation": int,
        "rank": int,
        "world": int,
        "image_bytes": int,
        "chunk_bytes": int,
        "checksums": [str],
        "extras_bytes": int,
        "extras_checksum": str,
    },
    Kind.NEED: {"chunks": [int]},
    Kind.END: {},
    Kind.KEPT: {},
    Kind.WANT: {"step": int, "generation": int, "rank": int, "world": int},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who one agent is to the others of its run."""

    run_id: str
    node_id: str
    epoch: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Which shard: of what step, begun by which generation, of which rank out of how many."""

    generation: int
    step: int
    rank: int
    world: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A shard in chunks: the image's, and one more, the extras, whose number is `extras_chunk`.

    Sizes in bytes; one checksum (xxh3_128) for each chunk of the image, and one for the extras.
    """

    step: int
    generation: int
    rank: int
    world: int
    image_bytes: int
    chunk_bytes: int
    checksums: tuple[str, ...]
    extras_bytes: int
    extras_checksum: str

    @classmethod
    def of(cls, place: Place, image: memoryview, extras: bytes, chunk_bytes: int) -> Offer:
        """The offer of these bytes. Reads all of them: 0.04 s/GB."""
        return cls(
            step=place.step,
            generation=place.generation,
            rank=place.rank,
            world=place.world,
            image_bytes=len(image),
            chunk_bytes=chunk_bytes,
            checksums=chunk_checksums(image, chunk_bytes),
            extras_bytes=len(extras),
            extras_checksum=checksum(extras),
        )

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Offer:
        """From a frame whose types are right. Raises ValueError for numbers that cannot be."""
        offer = cls(**{**body, "checksums": tuple(body["checksums"])})
        chunks = num_chunks(offer.image_bytes, max(1, offer.chunk_bytes))
        if not 0 < offer.chunk_bytes <= MAX_CHUNK_BYTES or not offer.image_bytes:
            raise ValueError(f"{offer.image_bytes} bytes in chunks of {offer.chunk_bytes}")
        if offer.image_bytes > MAX_IMAGE_BYTES or offer.extras_bytes > MAX_CHUNK_BYTES:
            raise ValueError(f"{offer.image_bytes} and {offer.extras_bytes} bytes are too many")
        if chunks != len(offer.checksums) or chunks > MAX_CHUNKS:
            raise ValueError(f"{len(offer.checksums)} checksums for {offer.image_bytes} bytes")
        if not offer.rank < offer.world <= MAX_WORLD:
            raise ValueError(f"rank {offer.rank} in a world of {offer.world}")
        return offer

    @property
    def place(self) -> Place:
        """Which shard this is."""
        return Place(self.generation, self.step, self.rank, self.world)

    @property
    def extras_chunk(self) -> int:
        """The number of the chunk that holds the extras: the last one."""
        return len(self.checksums)

    def chunk_range(self, number: int) -> tuple[int, int]:
        """First byte of a chunk, and the first behind it; of the extras in their own buffer."""
        if number == self.extras_chunk:
            return 0, self.extras_bytes
        begin = number * self.chunk_bytes
        return begin, min(begin + self.chunk_bytes, self.image_bytes)

    def checksum_of(self, number: int) -> str:
        """What a chunk's bytes must give."""
        if number == self.extras_chunk:
            return self.extras_checksum
        return self.checksums[number]

    def body(self) -> dict[str, Any]:
        """As in a frame, or in a file beside a copy."""
        return {**asdict(self), "checksums": list(self.checksums)}


def encode(kind: Kind, body: dict[str, Any]) -> bytes:
    """A whole frame of JSON."""
    payload = json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
    return FRAME.pack(kind, len(payload)) + payload


def parse_frame(header: bytes, peer: str, max_bytes: int) -> tuple[Kind, int]:
    """Kind and length of a frame. Raises PeerError for an unknown kind or too great a length."""
    number, length = FRAME.unpack(header)
    try:
        kind = Kind(number)
    except ValueError:
        raise PeerError(peer=peer, reason=f"a frame of the unknown kind {number}") from None
    limit = MAX_CHUNK_BYTES + CHUNK_NUMBER.size if kind is Kind.CHUNK else max_bytes
    if length > limit:
        raise PeerError(peer=peer, reason=f"{kind.name} of {length} bytes, at most {limit}")
    return kind, length


def decode(kind: Kind, payload: bytes, peer: str) -> dict[str, Any]:
    """The JSON of a frame, its fields checked. Raises PeerError with the reason."""
    try:
        body = json.loads(payload)
        check_types(body, _SCHEMAS[kind], kind.name)
    except (ValueError, KeyError, RecursionError) as error:
        raise PeerError(peer=peer, reason=f"{kind.name}: {error}"[:MAX_REASON]) from None
    return dict(body)


def parse_offer(body: dict[str, Any], peer: str) -> Offer:
    """The shard of an OFFER. Raises PeerError if it cannot be one."""
    try:
        return Offer.parse(body)
    except ValueError as error:
        raise PeerError(peer=peer, reason=f"OFFER: {error}"[:MAX_REASON]) from None


def parse_need(body: dict[str, Any], offer: Offer, peer: str) -> list[int]:
    """The chunks that are asked for. Raises PeerError for numbers that the offer does not have."""
    chunks = list(body["chunks"])
    if len(set(chunks)) != len(chunks) or any(n > offer.extras_chunk for n in chunks):
        raise PeerError(peer=peer, reason="NEED names chunks that are not in the offer")
    return chunks


def proof(side: str, identity: Identity, claimed: Identity, nonces: tuple[str, str]) -> str:
    """The HMAC by which `side` ("caller" or "listener") shows that it knows the secret.

    claimed is what the caller says of itself, nonces the listener's and the caller's; the side
    is part of what is signed, so that no answer can be played back as the other's.
    """
    said = [
        "relit peer",
        VERSION,
        side,
        claimed.run_id,
        claimed.node_id,
        claimed.epoch,
        *nonces,
    ]
    return hmac.new(identity.secret, json.dumps(said).encode(), hashlib.sha256).hexdigest()
