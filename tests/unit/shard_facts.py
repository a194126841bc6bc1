"""Facts and manifests of small whole steps, for tests of what consumes them."""

from __future__ import annotations

from dataclasses import asdict

from relit_platform.facts import NodeInventory, ShardPersisted, ShardUploaded, SlotInfo
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.run.layout import extras_key, shard_key

HEADER_BYTES = 64
IMAGE_BYTES = HEADER_BYTES + 8


def shard(
    step: int, generation: int = 1, rank: int = 0, world: int = 2, node: str = "n1"
) -> ShardPersisted:
    """A rank's shard with one tensor of two floats."""
    return ShardPersisted(
        step=step,
        generation=generation,
        rank=rank,
        world=world,
        node_id=node,
        file=shard_key(step, generation, rank),
        num_bytes=IMAGE_BYTES,
        chunk_bytes=1 << 20,
        checksums=(f"{step:08x}{generation:04x}{rank:04x}" + "0" * 16,),
        extras_file=extras_key(step, generation, rank),
        extras_bytes=2,
        extras_checksum="0" * 32,
        tensors=(
            {
                "name": f"w{rank}",
                "dtype": "F32",
                "shape": [2],
                "byte_range": [HEADER_BYTES, IMAGE_BYTES],
            },
        ),
        seconds=0.5,
        at_s=float(step),
    )


def shards(
    step: int, generation: int = 1, world: int = 2, node: str = "n1"
) -> list[ShardPersisted]:
    """Every rank's shard of a step."""
    return [shard(step, generation, rank, world, node) for rank in range(world)]


def uploaded(step: int, generation: int = 1, rank: int = 0, node: str = "n1") -> ShardUploaded:
    """An agent's word that a shard is in the object tier."""
    return ShardUploaded(
        step=step, generation=generation, rank=rank, node_id=node, seconds=0.1, at_s=float(step)
    )


def manifest(step: int, generation: int = 1, world: int = 2, node: str = "n1") -> Manifest:
    """The manifest of such a step."""
    return Manifest.from_shards(
        [asdict(one) for one in shards(step, generation, world, node)],
        run_id="r",
        epoch=1,
        cursor={"step": step},
        ids={"config": "", "code": "", "data": ""},
        created_at_s=float(step),
    )


def slot(
    step: int, generation: int = 1, rank: int = 0, world: int = 2, node: str = "n1"
) -> SlotInfo:
    """A COMPLETE slot."""
    return SlotInfo(
        path=f"/shm/{node}/{rank}-{step}",
        worker_id=f"w{rank}",
        node_id=node,
        generation=generation,
        step=step,
        rank=rank,
        world=world,
        image_bytes=IMAGE_BYTES,
        pinned=False,
    )


def inventory(
    node: str = "n1",
    memory: list[SlotInfo] | None = None,
    disk: list[ShardPersisted] | None = None,
    manifests: list[Manifest] | None = None,
    refusals: tuple[dict[str, object], ...] = (),
) -> NodeInventory:
    """A node that holds these."""
    return NodeInventory(
        node_id=node,
        memory=tuple(memory or ()),
        disk=tuple(disk or ()),
        manifests=tuple((m.step, m.generation, m.to_bytes()) for m in manifests or ()),
        fence=0,
        refusals=refusals,
        disk_root=f"/disk/{node}",
    )
