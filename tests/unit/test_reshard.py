"""The reshard matrix: what was saved in any arrangement of ranks is loaded in any other, bit-equal.

The way is that of production: the state is flattened, each rank copies its share into a slot, the
node's side persists it, the manifest is made of what was acknowledged, and every new rank reads
through a restore plan. Only the collectives of training are not there (see meshes.py).
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
from meshes import ARRANGEMENTS, Arrangement, assert_same
from torch.distributed.tensor import DTensor

from relit_platform.facts import RestorePlan, ShardSource, Tier
from relit_platform.node.persist import Writing, persist_slot
from relit_platform.node.slots import Slot, create_slot
from relit_platform.worker.restore import load_plan
from relit_platform.worker.snapshot import Snapshotter
from relit_platform.worker.state_memo import StateMemo
from relit_platform.worker.state_tree import restore, sharded_like
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.stores.local import LocalStore

STEP, GENERATION, CHUNK_BYTES = 6, 2, 128
SAVED, OTHER = 7, 3  # seeds: what was saved, and what is there before it is loaded
TIERS: tuple[Tier, ...] = ("memory", "disk", "object")


@dataclass
class Saved:
    """One checkpoint on three tiers: slots, a node's disk, and the same files as a store."""

    root: Path
    world: int
    slots: list[str] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, arrangement: Arrangement, root: Path) -> Saved:
        """Saved rank by rank."""
        saved = cls(root, arrangement.world)
        for rank in arrangement.ranks():
            saved._save(rank, arrangement.job(SAVED).objects)
        return saved

    def _save(self, rank: int, objects: dict[str, Any]) -> None:
        def open_slots(count: int, image_bytes: int, capacity: int) -> list[str]:
            paths = [str(self.root / f"w{rank}.{i}.slot") for i in range(count)]
            for path in paths:
                create_slot(path, image_bytes, capacity)
            return paths

        snapshotter = Snapshotter(f"w{rank}", open_slots)
        tensors, skeleton = StateMemo().flatten(objects)
        extras = b'{"step":%d,"rank":%d,"objects":%b}' % (STEP, rank, skeleton)
        place: dict[str, Any] = {"generation": GENERATION, "rank": rank, "world": self.world}
        taken = snapshotter.take(step=STEP, tensors=tensors, extras=extras, **place)
        assert taken.path is not None, taken.reason
        snapshotter.pin(taken.path)
        slot = Slot.open(taken.path)
        disk = str(self.root / "disk")
        how = Writing(root=disk, node_id="n", chunk_bytes=CHUNK_BYTES, clock=lambda: 1.0)
        record = persist_slot(slot, how)
        slot.close()
        snapshotter.close()
        self.slots.append(taken.path)
        self.records.append(dataclasses.asdict(record))

    @property
    def store(self) -> LocalStore:
        return LocalStore(str(self.root / "disk"))

    @cached_property
    def manifest(self) -> Manifest:
        """What the manager would publish; it checks that the pieces tile every tensor."""
        made = Manifest.from_shards(
            json.loads(json.dumps(self.records)),
            run_id="r",
            epoch=1,
            cursor={},
            ids={},
            created_at_s=1.0,
        )
        return Manifest.from_bytes(made.to_bytes())

    def plan(self, tier: Tier) -> RestorePlan:
        return RestorePlan(
            step=STEP,
            generation=GENERATION,
            world=self.world,
            tier=tier,
            shards=tuple(self._source(tier, rank) for rank in range(self.world)),
        )

    def _source(self, tier: Tier, rank: int) -> ShardSource:
        entry = self.manifest.shard(rank)
        root = str(self.root / "disk") + "/" if tier == "disk" else ""
        source = ShardSource(
            rank=rank,
            tier=tier,
            node_id="n",
            location=root + entry.file,
            extras_location=root + entry.extras_file,
            num_bytes=entry.num_bytes,
            chunk_bytes=entry.chunk_bytes,
            checksums=entry.checksums,
            extras_bytes=entry.extras_bytes,
            extras_checksum=entry.extras_checksum,
        )
        if tier == "memory":
            return replace(source, location=self.slots[rank], extras_location="")
        return source


@pytest.fixture(scope="module")
def checkpoints() -> Iterator[dict[str, Saved]]:
    """The same job, saved in every arrangement."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="relit-test-") as folder:
        saved = {}
        for name, arrangement in ARRANGEMENTS.items():
            (Path(folder) / name).mkdir()
            saved[name] = Saved.of(arrangement, Path(folder) / name)
        yield saved


@pytest.fixture(scope="module")
def plans(checkpoints: dict[str, Saved]) -> dict[tuple[str, Tier], RestorePlan]:
    return {(name, tier): saved.plan(tier) for name, saved in checkpoints.items() for tier in TIERS}


@pytest.mark.parametrize("target", ARRANGEMENTS)
def test_any_arrangement_loads_what_any_other_saved(
    checkpoints: dict[str, Saved], plans: dict[tuple[str, Tier], RestorePlan], target: str
) -> None:
    arrangement = ARRANGEMENTS[target]
    for rank in arrangement.ranks():
        expected = arrangement.job(SAVED)
        for number, (name, saved) in enumerate(checkpoints.items()):
            job = arrangement.job(OTHER, fresh=number % 2 == 0)
            tier = TIERS[(number + rank) % len(TIERS)]
            like = partial(sharded_like, job.objects)
            tensors, extras = load_plan(plans[name, tier], saved.store, like)
            restore(job.objects, tensors, extras[0]["objects"])
            assert_same(job, expected)


@pytest.mark.parametrize("target", ["fsdp-3", "fsdp-tp-2x2"])
def test_whole_tensors_do_as_well(
    checkpoints: dict[str, Saved], plans: dict[tuple[str, Tier], RestorePlan], target: str
) -> None:
    arrangement = ARRANGEMENTS[target]
    for _ in arrangement.ranks():
        job = arrangement.job(OTHER)
        tensors, extras = load_plan(plans["hsdp-2x2", "disk"])
        assert not any(isinstance(tensor, DTensor) for tensor in tensors.values())
        restore(job.objects, tensors, extras[0]["objects"])
        assert_same(job, arrangement.job(SAVED))


def test_every_rank_says_the_same_about_the_structure(checkpoints: dict[str, Saved]) -> None:
    skeletons = {
        json.dumps(extras["objects"])
        for saved in checkpoints.values()
        for extras in load_plan(saved.plan("memory"))[1].values()
    }
    assert len(skeletons) == 1


def test_what_several_ranks_hold_is_saved_once_and_evenly(checkpoints: dict[str, Saved]) -> None:
    for name, saved in checkpoints.items():
        tensors = [tensor for record in saved.records for tensor in record["tensors"]]
        values = sum(end - begin for begin, end in (tensor["byte_range"] for tensor in tensors))
        whole = sum(
            end - begin
            for record in checkpoints["whole-1"].records
            for begin, end in (tensor["byte_range"] for tensor in record["tensors"])
        )
        assert values == whole, name
        loads = [
            sum(t["byte_range"][1] - t["byte_range"][0] for t in record["tensors"])
            for record in saved.records
        ]
        if name.startswith(("whole", "hsdp")):
            assert max(loads) - min(loads) <= 120, (name, loads)  # the largest: 7 x 4 values
