"""Who saves what: everything once, by a rank that holds it, evenly by bytes."""

from __future__ import annotations

import pytest
import torch

from relit_platform.errors import ShardingError
from relit_platform.worker.ownership import ShareLayout, owned
from relit_platform.worker.sharding import Sharding, StateTensors, box_at, held_boxes
from relit_storage.checkpoint.image import TensorSpec
from relit_storage.checkpoint.pieces import boxes_tile

MESH = {"fsdp": (4,), "hsdp": (2, 2), "half": (2,)}
CUTS: dict[str, tuple[tuple[int, int] | None, ...]] = {
    "fsdp": ((0, 1),),
    "hsdp": (None, (0, 1)),
    "half": ((0, 1),),
}


def sharding(kind: str, shape: tuple[int, ...], rank: int) -> Sharding:
    """As four ranks see it; "half" lies on ranks 0 and 1 only."""
    mesh, cuts = MESH[kind], CUTS[kind]
    ranks = tuple(range(2 if kind == "half" else 4))
    place = divmod(rank, 2) if kind == "hsdp" else (rank,)
    box = box_at(shape, mesh, place, cuts) if rank in ranks else None
    return Sharding(shape, held_boxes(shape, mesh, (ranks,), cuts), rank, box)


def shares(
    kinds: dict[str, str], specs: list[TensorSpec], world: int = 4
) -> list[list[TensorSpec]]:
    found = []
    for rank in range(world):
        shardings = {
            spec.name: sharding(kinds[spec.name], spec.shape, rank)
            for spec in specs
            if spec.name in kinds
        }
        found.append(owned(specs, rank, world, shardings))
    return found


def test_every_piece_is_saved_once_by_a_rank_that_holds_it() -> None:
    specs = [TensorSpec(f"t{i}", "F32", (rows, 3)) for i, rows in enumerate((1, 2, 5, 8, 0, 11))]
    kinds = {"t0": "fsdp", "t1": "hsdp", "t2": "half", "t3": "hsdp", "t4": "fsdp"}
    dealt = shares(kinds, specs)
    for spec in specs:
        boxes = []
        for rank, share in enumerate(dealt):
            mine = [piece for piece in share if piece.name == spec.name]
            assert len(mine) <= 1  # one box of a tensor in an image
            for piece in mine:
                assert piece.full_shape == spec.shape
                assert piece.num_bytes or not spec.num_bytes
                boxes.append(piece.box)
                if spec.name in kinds:
                    held = dict(sharding(kinds[spec.name], spec.shape, rank).pieces)
                    assert rank in held[piece.box]
        assert boxes_tile(spec.shape, boxes) is None, spec.name


def test_copies_are_spread_by_bytes() -> None:
    specs = [TensorSpec(f"t{i:02}", "F32", (2 * (10 + i), 8)) for i in range(20)]
    dealt = shares(dict.fromkeys([spec.name for spec in specs], "hsdp"), specs)
    loads = [sum(piece.num_bytes for piece in share) for share in dealt]
    assert sum(loads) == sum(spec.num_bytes for spec in specs)
    assert max(loads) - min(loads) <= max(spec.num_bytes for spec in specs)


def test_what_is_everywhere_evens_out_what_is_not() -> None:
    specs = [
        TensorSpec("cut", "F32", (2, 100)),
        *(TensorSpec(f"w{i}", "F32", (50,)) for i in range(12)),
    ]
    dealt = shares({"cut": "half"}, specs)
    loads = [sum(piece.num_bytes for piece in share) for share in dealt]
    assert loads == [800, 800, 800, 800]


def test_other_ranks_than_the_runs_are_refused() -> None:
    spec = TensorSpec("t", "F32", (8,))
    with pytest.raises(ShardingError, match="rank 2 of a world of 2"):
        owned([spec], 1, 2, {"t": sharding("fsdp", (8,), 1)})
    with pytest.raises(ShardingError, match="for rank 2, which is rank 1"):
        owned([spec], 1, 4, {"t": sharding("fsdp", (8,), 2)})


def test_the_layout_is_planned_anew_when_the_sharding_is_another() -> None:
    share = ShareLayout()
    tensors = StateTensors({"t": torch.ones(4)})
    whole = share.of(tensors, 0, 4)
    assert [spec.whole for spec in whole.specs] == [True]
    assert share.of(tensors.copy(), 0, 4) is whole
    cut = tensors.copy()
    cut.shardings["t"] = sharding("fsdp", (16,), 0)
    pieces = share.of(cut, 0, 4)
    assert [(spec.shape, spec.full_shape, spec.origin) for spec in pieces.specs] == [
        ((4,), (16,), (0,))
    ]
    assert share.of(cut, 0, 4) is pieces
