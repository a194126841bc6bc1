"""Several nodes in one process for tests of the peer tier: real keepers, real TCP on loopback."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from node_harness import LAYOUT, DictStore, wait_until

from relit_platform.facts import Fact, ShardSource
from relit_platform.node.keeper import NodeKeeper
from relit_platform.node.peer_protocol import Identity, Offer, Place
from relit_platform.node.slots import Slot
from relit_platform.run_config import CheckpointConfig

SECRET = b"s" * 32
CHUNK_BYTES = 4096


class PeerNodes:
    """`boot` starts a keeper; `ring` has each give its cuts to the next."""

    def __init__(self, root: Path, **config: Any) -> None:
        self.root = root
        self.config = {"chunk_bytes": CHUNK_BYTES, "disk_dir": str(root / "disk"), **config}
        self.facts: dict[str, list[Any]] = {}
        self.keepers: dict[str, NodeKeeper] = {}

    def boot(self, node_id: str, **config: Any) -> NodeKeeper:
        shm = self.root / f"shm-{node_id}"
        shm.mkdir(exist_ok=True)
        facts = self.facts.setdefault(node_id, [])
        settings = CheckpointConfig(**{**self.config, "shm_dir": str(shm), **config})
        keeper = NodeKeeper(node_id, "run-1", settings, DictStore(), facts.append, clock=time.time)
        keeper.start()
        self.keepers[node_id] = keeper
        return keeper

    def pair(self, **config: Any) -> tuple[NodeKeeper, NodeKeeper]:
        """Two nodes, each the other's peer."""
        one, other = self.boot("n1", **config), self.boot("n2", **config)
        self.ring("n1", "n2")
        return one, other

    def ring(self, *nodes: str, epoch: int = 1) -> None:
        endpoints = {n: self.keepers[n].peers.listen(SECRET, epoch) for n in nodes}
        for place, node in enumerate(nodes):
            peer = nodes[(place + 1) % len(nodes)]
            self.keepers[node].peers.set_peer(peer, endpoints[peer], epoch)

    def lose(self, node_id: str) -> None:
        """It is gone with all its memory and its disk."""
        self.keepers.pop(node_id).close(remove_disk=True)

    def failures(self, node_id: str, what: str) -> list[str]:
        """The reasons that a node has told."""
        said = [f for f in self.facts[node_id] if isinstance(f, Fact) and f.kind == "peer.failed"]
        return [str(f.data["reason"]) for f in said if f.data["what"] == what]

    def clear(self) -> None:
        for keeper in self.keepers.values():
            keeper.close(remove_disk=True)


def slots_of(keeper: NodeKeeper, worker: str, count: int = 2, image_bytes: int = 0) -> list[Slot]:
    """A worker, this very process, and its slots."""
    keeper.hello(worker, os.getpid(), epoch=9)
    paths = keeper.open_slots(worker, count, image_bytes or LAYOUT.total_bytes, 1000)
    return [Slot.open(path) for path in paths]


def content_of(step: int) -> bytes:
    """An image: half of it depends on the step."""
    half = 10_000
    return LAYOUT.header + bytes([step % 256]) * half + b"f" * half


def fill(
    slot: Slot, step: int, *, generation: int = 1, rank: int = 0, world: int = 2, cut: bool = True
) -> None:
    """A whole snapshot."""
    slot.begin(generation, step, rank, world, cut=cut)
    slot.image[:] = content_of(step)
    slot.set_extras(json.dumps({"step": step}).encode())
    slot.commit()


def offer_of(step: int, *, generation: int = 1, rank: int = 0, world: int = 2) -> Offer:
    """What is offered of such a snapshot."""
    place = Place(generation, step, rank, world)
    extras = json.dumps({"step": step}).encode()
    return Offer.of(place, memoryview(content_of(step)), extras, CHUNK_BYTES)


def identity(node_id: str = "n1", epoch: int = 1, secret: bytes = SECRET) -> Identity:
    """Who an agent of the run is."""
    return Identity(run_id="run-1", node_id=node_id, epoch=epoch, secret=secret)


def source_at(keeper: NodeKeeper, rank: int = 0, tier: Any = "memory") -> ShardSource:
    """Where a shard of that node can be fetched."""
    inventory = keeper.inventory()
    return ShardSource(
        rank=rank,
        tier=tier,
        node_id=inventory.node_id,
        location="",
        extras_location="",
        num_bytes=0,
        chunk_bytes=0,
        checksums=(),
        extras_bytes=0,
        extras_checksum="",
        endpoint=inventory.endpoint,
    )


def copies_at(keeper: NodeKeeper) -> list[tuple[int, int, int]]:
    """(rank, generation, step) of every whole copy."""
    return sorted((i.rank, i.generation, i.step) for i in keeper.inventory().peers)


def wait_for_copy(keeper: NodeKeeper, rank: int, generation: int, step: int) -> None:
    wanted = (rank, generation, step)
    wait_until(lambda: wanted in copies_at(keeper), f"{wanted}: {copies_at(keeper)}")
