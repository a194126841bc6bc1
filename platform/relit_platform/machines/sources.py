"""From what an inventory lists to a place that a rank can read, pure; used by restore.py only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relit_platform.facts import NodeInventory, ShardSource, SlotInfo, Tier
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.checkpoint.manifest_entries import ShardEntry

Sources = Mapping[int, tuple[ShardSource, ...]]  # by rank, nearest first


def slot_source(tier: Tier, slot: SlotInfo, inventory: NodeInventory) -> ShardSource:
    """A slot in shared memory. Of a rank's own there are no checksums, of a copy there are."""
    return ShardSource(
        rank=slot.rank,
        tier=tier,
        node_id=slot.node_id,
        location=slot.path,
        extras_location="",
        num_bytes=slot.image_bytes,
        chunk_bytes=slot.chunk_bytes,
        checksums=slot.checksums,
        extras_bytes=slot.extras_bytes,
        extras_checksum=slot.extras_checksum,
        endpoint=inventory.endpoint,
    )


def disk_source(entry: ShardEntry, inventory: NodeInventory) -> ShardSource:
    """A shard on a node's disk."""
    root = f"{inventory.disk_root}/" if inventory.disk_root else ""
    return _entry_source("disk", entry, root, inventory)


def object_source(entry: ShardEntry) -> ShardSource:
    """A shard in the object tier, which every node can read."""
    return _entry_source("object", entry, "", None)


def _entry_source(
    tier: Tier, entry: ShardEntry, root: str, inventory: NodeInventory | None
) -> ShardSource:
    return ShardSource(
        rank=entry.rank,
        tier=tier,
        node_id=inventory.node_id if inventory else "",
        location=root + entry.file,
        extras_location=root + entry.extras_file,
        num_bytes=entry.num_bytes,
        chunk_bytes=entry.chunk_bytes,
        checksums=tuple(entry.checksums),
        extras_bytes=entry.extras_bytes,
        extras_checksum=entry.extras_checksum,
        endpoint=inventory.endpoint if inventory else None,
    )


def reachable(
    found: Mapping[int, Sequence[ShardSource]], nodes: frozenset[str]
) -> tuple[Sources, str]:
    """What every node of the ranks can read, nearest first, and why not all of it can be.

    A source on the only node, or on one whose agent answers those of other nodes.
    """
    sources: dict[int, tuple[ShardSource, ...]] = {}
    far: set[str] = set()
    for rank, candidates in found.items():
        usable = [s for s in candidates if nodes == {s.node_id} or s.endpoint is not None]
        usable.sort(key=lambda s: (s.node_id not in nodes, s.node_id, s.location))
        sources[rank] = tuple(usable)
        if not usable:
            far |= {s.node_id for s in candidates}
    if not far:
        return sources, ""
    return sources, f"lies on {sorted(far)}, the ranks run on {sorted(nodes)}"


def missing_shard(
    manifest: Manifest,
    found: Mapping[int, Sequence[ShardSource]],
    inventories: Sequence[NodeInventory],
) -> tuple[str, str]:
    """The first shard of a published step that no node holds: its file, and what is wrong."""
    for entry in manifest.shards:
        if found.get(entry.rank):
            continue
        place = (manifest.step, manifest.generation, entry.rank)
        for shard in (shard for inventory in inventories for shard in inventory.disk):
            if (shard.step, shard.generation, shard.rank) == place:
                said = f"has {shard.num_bytes} bytes, the manifest says {entry.num_bytes}"
                return entry.file, said
        return entry.file, "has no record on any node"
    return "", ""
