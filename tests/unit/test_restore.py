"""Restore: every tier gives back what was saved, and nothing that was touched since."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import as_rank, local
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from relit_platform.facts import RestorePlan, ShardSource, Tier
from relit_platform.node.slots import Slot, create_slot
from relit_platform.worker.restore import load_plan
from relit_platform.worker.snapshot import Snapshotter
from relit_storage.checkpoint.checksum import checksum
from relit_storage.checkpoint.image import ImageLayout, TensorSpec
from relit_storage.checkpoint.shard import ShardRef, write_shard
from relit_storage.errors import CorruptShardError
from relit_storage.stores.local import LocalStore

STEP, GENERATION, WORLD, CHUNK_BYTES = 7, 3, 2, 4096


def tensors() -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(0)
    return {
        "m.weight": torch.randn(70, 50, generator=source),
        "m.bias": torch.randn(50, generator=source).bfloat16(),
        "o.step": torch.tensor(7.0, dtype=torch.float64),
        "o.empty": torch.empty(0, 2),
        "o.flags": torch.tensor([True, False]),
    }


def on_disk(rank: int, file: Path, extras: Path, ref: ShardRef) -> ShardSource:
    """A rank's files as a plan names them."""
    raw = extras.read_bytes()
    return ShardSource(
        rank=rank,
        tier="disk",
        node_id="n",
        location=str(file),
        extras_location=str(extras),
        num_bytes=ref.num_bytes,
        chunk_bytes=ref.chunk_bytes,
        checksums=ref.checksums,
        extras_bytes=len(raw),
        extras_checksum=checksum(raw),
    )


class Saved:
    """Step 7, saved by two ranks, on all three tiers below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = LocalStore(str(folder / "store"))
        self.slots = [self._snapshot(rank) for rank in range(WORLD)]
        self.sources: dict[Tier, list[ShardSource]] = {"memory": [], "disk": [], "object": []}
        for rank, path in enumerate(self.slots):
            self._persist(rank, path)

    def _snapshot(self, rank: int) -> str:
        def open_slots(count: int, image_bytes: int, capacity: int) -> list[str]:
            paths = [str(self.folder / f"w{rank}.{i}.slot") for i in range(count)]
            for path in paths:
                create_slot(path, image_bytes, capacity)
            return paths

        snapshotter = Snapshotter(f"w{rank}", open_slots)
        extras = {"step": STEP, "rank": rank}
        result = snapshotter.take(
            step=STEP,
            generation=GENERATION,
            rank=rank,
            world=WORLD,
            tensors=tensors(),
            extras=extras,
        )
        snapshotter.close()
        return str(result.path)

    def _persist(self, rank: int, path: str) -> None:
        slot = Slot.open(path)
        file, extras_file = self.folder / f"r{rank}.safetensors", self.folder / f"r{rank}.json"
        ref = write_shard(str(file), slot.image, CHUNK_BYTES)
        extras_file.write_bytes(slot.read_extras())
        source = on_disk(rank, file, extras_file, ref)
        self.sources["disk"].append(source)
        self.store.put_file(file.name, str(file))
        self.store.put_file(extras_file.name, str(extras_file))
        self.sources["object"].append(
            replace(source, tier="object", location=file.name, extras_location=extras_file.name)
        )
        memory = replace(source, tier="memory", location=path, extras_location="", checksums=())
        self.sources["memory"].append(memory)
        slot.close()

    def plan(self, tier: Tier) -> RestorePlan:
        return RestorePlan(
            step=STEP,
            generation=GENERATION,
            world=WORLD,
            tier=tier,
            shards=tuple(self.sources[tier]),
        )

    def path(self, tier: Tier, rank: int, extras: bool = False) -> Path:
        source = self.sources[tier][rank]
        name = source.extras_location if extras else source.location
        return self.folder / "store" / name if tier == "object" else Path(name)

    def refusal(self, tier: Tier) -> dict[str, Any]:
        with pytest.raises(CorruptShardError) as caught:
            load_plan(self.plan(tier), self.store)
        return dict(caught.value.fields)


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path)


TIERS: tuple[Tier, ...] = ("memory", "disk", "object")
FILES: tuple[Tier, ...] = ("disk", "object")


@pytest.mark.parametrize("tier", TIERS)
def test_every_tier_gives_back_what_was_saved(saved: Saved, tier: Tier) -> None:
    found, extras = load_plan(saved.plan(tier), saved.store)
    assert set(found) == set(tensors())
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert extras == {rank: {"step": STEP, "rank": rank} for rank in range(WORLD)}


def test_loaded_tensors_are_not_the_slot_itself(saved: Saved) -> None:
    found, _ = load_plan(saved.plan("memory"))
    for path in saved.slots:
        slot = Slot.open(path)
        slot.image[:] = bytes(len(slot.image))
    assert torch.equal(found["m.weight"], tensors()["m.weight"])


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "first bit": lambda path: _flip(path, 0),
    "middle bit": lambda path: _flip(path, len(path.read_bytes()) // 2),
    "last bit": lambda path: _flip(path, -1),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("extras", [False, True], ids=["image", "extras"])
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("tier", FILES)
def test_a_damaged_file_is_refused_by_name(
    saved: Saved, tier: Tier, rank: int, extras: bool, damage: str
) -> None:
    DAMAGE[damage](saved.path(tier, rank, extras))
    fields = saved.refusal(tier)
    assert (fields["tier"], fields["step"], fields["generation"]) == (tier, STEP, GENERATION)
    assert f"r{rank}." in fields["file"]
    assert fields["reason"]


def test_files_of_two_ranks_exchanged_are_refused(saved: Saved) -> None:
    first, second = (saved.path("disk", rank) for rank in range(WORLD))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    assert "r0" in saved.refusal("disk")["file"]


def _overwrite(slot: Slot) -> None:
    slot.begin(GENERATION, STEP + 1, 0, WORLD)
    slot.set_extras(json.dumps({"step": STEP + 1}).encode())
    slot.commit()


SLOT_FATES: dict[str, Callable[[Slot], object]] = {
    "overwritten": _overwrite,
    "half written": lambda slot: slot.begin(GENERATION, STEP, 0, WORLD),
    "deleted": lambda slot: Path(slot.path).unlink(),
    "header flipped": lambda slot: _flip(Path(slot.path), 70),
}


@pytest.mark.parametrize("fate", SLOT_FATES)
def test_a_slot_that_changed_is_refused(saved: Saved, fate: str) -> None:
    SLOT_FATES[fate](Slot.open(saved.slots[0]))
    fields = saved.refusal("memory")
    assert (fields["tier"], fields["step"]) == ("memory", STEP)
    assert fields["file"] == saved.slots[0]


def test_a_tensor_in_two_shards_is_refused(saved: Saved) -> None:
    sources = saved.sources["disk"]
    sources[1] = replace(sources[0], rank=1)
    assert "in another shard" in saved.refusal("disk")["reason"]


def test_a_plan_that_lacks_a_rank_is_refused(saved: Saved) -> None:
    saved.sources["disk"].pop()
    assert "world of 2" in saved.refusal("disk")["reason"]


def test_extras_of_another_step_are_refused(saved: Saved) -> None:
    other = json.dumps({"step": STEP + 1}).encode()
    saved.path("disk", 0, extras=True).write_bytes(other)
    source = saved.sources["disk"][0]
    saved.sources["disk"][0] = replace(source, extras_checksum=checksum(other))
    assert "of step 8" in saved.refusal("disk")["reason"]


def piece(name: str, rows: range, of: int = 6, dtype: str = "F32") -> TensorSpec:
    """Rows of a tensor of `of` rows and two columns."""
    shape = (len(rows), 2)
    return TensorSpec(name, dtype, shape, global_shape=(of, 2), offsets=(rows.start, 0))


# What two ranks say they have of one tensor, and what is wrong with it ("": nothing).
PIECES: dict[str, tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], str]] = {
    "halves": ((piece("t", range(3)),), (piece("t", range(3, 6)),), ""),
    "uneven": ((piece("t", range(5, 6)),), (piece("t", range(5)),), ""),
    "a hole": ((piece("t", range(2)),), (piece("t", range(3, 6)),), "not covered"),
    "an overlap": ((piece("t", range(4)),), (piece("t", range(3, 6)),), "overlap"),
    "one half": ((piece("t", range(3)),), (), "not covered"),
    "a whole beside": ((piece("t", range(3)),), (TensorSpec("t", "F32", (6, 2)),), "another shard"),
    "another shape": ((piece("t", range(3)),), (piece("t", range(3, 7), of=7),), "elsewhere"),
    "another dtype": (
        (piece("t", range(3)),),
        (piece("t", range(3, 6), dtype="I32"),),
        "elsewhere",
    ),
}


def write_pieces(folder: Path, specs: Sequence[Sequence[TensorSpec]]) -> RestorePlan:
    """Shards on disk whose pieces hold the numbers of their places."""
    sources = []
    for rank, share in enumerate(specs):
        layout = ImageLayout.plan(share, {})
        image = bytearray(layout.header) + bytearray(layout.total_bytes - layout.header_bytes)
        for spec in share:
            begin = spec.origin[0] * 2
            values = torch.arange(begin, begin + spec.num_bytes // 4, dtype=torch.float32)
            at = layout.offset(spec.name)
            image[at : at + spec.num_bytes] = values.numpy().tobytes()
        file, extras = folder / f"r{rank}.safetensors", folder / f"r{rank}.json"
        ref = write_shard(str(file), memoryview(image), 8)
        extras.write_bytes(b"{}")
        sources.append(on_disk(rank, file, extras, ref))
    return RestorePlan(
        step=STEP, generation=GENERATION, world=len(specs), tier="disk", shards=tuple(sources)
    )


@pytest.mark.parametrize("case", PIECES)
def test_pieces_become_one_tensor_or_are_refused(tmp_path: Path, case: str) -> None:
    first, second, wrong = PIECES[case]
    plan = write_pieces(tmp_path, (first, second))
    if not wrong:
        found, _ = load_plan(plan)
        assert torch.equal(found["t"], torch.arange(12.0).view(6, 2))
        return
    with pytest.raises(CorruptShardError) as caught:
        load_plan(plan)
    assert wrong in caught.value.fields["reason"]
    assert caught.value.fields["step"] == STEP


def test_a_part_needs_no_more_than_its_chunks(tmp_path: Path) -> None:
    """Rows 2 and 3 of six are asked for: damage in the other rows is nobody's business."""
    plan = write_pieces(tmp_path, ((piece("t", range(3)),), (piece("t", range(3, 6)),)))
    _flip(Path(plan.shards[0].location), -20)  # row 0 or 1
    _flip(Path(plan.shards[1].location), -1)  # row 5
    with as_rank(1, 3):
        like = distribute_tensor(
            torch.zeros(6, 2), init_device_mesh("cpu", (3,)), [Shard(0)], src_data_rank=None
        )
        found, _ = load_plan(plan, like=lambda skeleton: {"t": like, "unknown": like})
        part = found["t"]
        assert isinstance(part, DTensor)
        assert part.placements == like.placements
        assert torch.equal(local(part), torch.arange(4.0, 8.0).view(2, 2))
    with pytest.raises(CorruptShardError, match="checksum"):
        load_plan(plan)
