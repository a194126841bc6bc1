"""Boxes of DTensors: those that torch says, on every rank; and how a state of them is flattened."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from meshes import ARRANGEMENTS, as_rank, local
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import _StridedShard

from relit_platform.errors import NotSavableError, ShardingError, UsageError
from relit_platform.worker.gradient_sync import GradientSync
from relit_platform.worker.sharding import (
    box_at,
    held_boxes,
    refuse_parts,
    sharding_of,
    whole_tensors,
)
from relit_platform.worker.state_memo import StateMemo
from relit_platform.worker.state_tree import flatten, restore, sharded_like
from relit_storage.checkpoint.pieces import Box, boxes_tile

Cut = tuple[int, int] | None
SHAPES = [(8, 6), (7, 5), (1, 3), (2, 9), (13, 4), (0, 4)]
MESHES = [(1,), (3,), (2, 2), (2, 3), (4, 2), (2, 2, 2)]


def placements_of(mesh: tuple[int, ...]) -> list[tuple[Placement, ...]]:
    """Every mixture of copies and cuts, and what FSDP2 makes over tensor parallelism."""
    kinds = (Replicate(), Shard(0), Shard(1))
    found: list[tuple[Placement, ...]] = list(itertools.product(kinds, repeat=len(mesh)))
    if len(mesh) == 2:
        found.append((_StridedShard(0, split_factor=mesh[1]), Shard(0)))
    return found


def holding(state: Any) -> Any:
    """A registered pair with this state."""
    return (lambda: state, lambda loaded: None)


def cut_of(placement: Placement) -> Cut:
    if isinstance(placement, Replicate):
        return None
    assert isinstance(placement, Shard | _StridedShard)
    return placement.dim, int(getattr(placement, "split_factor", 1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_boxes_are_those_of_torch(shape: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    for placements in placements_of(mesh):
        cuts = [cut_of(placement) for placement in placements]
        if isinstance(placements[0], _StridedShard) and shape[0] % (mesh[0] * mesh[1]):
            continue  # see below: there torch says what FSDP2 does not do
        for place in itertools.product(*(range(size) for size in mesh)):
            sizes, offsets = _compute_local_shape_and_global_offset(
                shape, mesh, list(place), placements
            )
            box = box_at(shape, mesh, place, cuts)
            assert box.shape == sizes, (placements, place)
            if box.volume:
                assert box.offsets == offsets, (placements, place)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_pieces_tile_the_tensor_and_every_box_has_its_holders(
    shape: tuple[int, ...], mesh: tuple[int, ...]
) -> None:
    ranks = tuple(range(10, 10 + len(list(itertools.product(*map(range, mesh))))))
    for placements in placements_of(mesh):
        cuts = tuple(cut_of(placement) for placement in placements)
        pieces = held_boxes(shape, mesh, (ranks,), cuts)
        assert boxes_tile(shape, [box for box, _ in pieces]) is None, placements
        for rank, place in zip(ranks, itertools.product(*map(range, mesh)), strict=True):
            held = [box for box, holders in pieces if rank in holders]
            box = box_at(shape, mesh, place, cuts)
            assert held == ([box] if box.volume else held[:1] if 0 in shape else [])


@pytest.mark.parametrize("rows", [1, 3, 7, 12])
def test_fsdp_over_tensor_parallelism_is_cut_as_torch_chunk_cuts(rows: int) -> None:
    """Also where the parts are uneven: by tensor parallelism first, each part then by FSDP2."""
    mesh, cuts = (3, 2), [(0, 2), (0, 1)]
    whole = torch.arange(rows)
    for dp, tp in itertools.product(range(3), range(2)):
        part = chunk(chunk(whole, 2, tp), 3, dp)
        box = box_at((rows,), mesh, (dp, tp), cuts)
        assert box.shape == tuple(part.shape)
        if len(part):
            assert box.offsets == (int(part[0]),)


def chunk(tensor: Tensor, count: int, index: int) -> Tensor:
    parts = torch.chunk(tensor, count)
    return parts[index] if index < len(parts) else tensor[:0]


@pytest.mark.parametrize(
    "name", [name for name in ARRANGEMENTS if "fsdp" in name or "hsdp" in name]
)
def test_the_box_of_a_rank_holds_its_part(name: str) -> None:
    arrangement, views = ARRANGEMENTS[name], []
    whole = ARRANGEMENTS["whole-1"]
    with as_rank(0, 1):
        expected = whole.job(5).model.state_dict()
    for rank in arrangement.ranks():
        tensors, _ = flatten({"m": arrangement.job(5).model})
        for key, sharding in tensors.shardings.items():
            box = sharding.box
            assert box is not None and sharding.rank == rank
            part = expected[key.removeprefix("m.")]
            for dim, (begin, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
                part = part.narrow(dim, min(begin, part.shape[dim]), size)
            assert torch.equal(tensors[key], part), key
        views.append({key: sharding.pieces for key, sharding in tensors.shardings.items()})
    assert all(view == views[0] for view in views)  # all ranks see the same


def test_torch_agrees_where_a_mesh_is_real() -> None:
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            for placements in placements_of((2, 2)):
                whole = torch.arange(35.0).view(7, 5)
                tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                sharding = sharding_of(tensor, "t")
                shape, offsets = compute_local_shape_and_global_offset((7, 5), mesh, placements)
                assert sharding.box == Box(offsets, shape)


def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape)


def of_eight(part: Tensor, placement: Placement) -> Tensor:
    """A DTensor of eight values on four ranks, whatever this one holds."""
    return DTensor.from_local(
        part, mesh_of(4), [placement], shape=torch.Size([8]), stride=(1,), run_check=False
    )


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a sum": (lambda: of_eight(torch.ones(8), Partial()), "terms of a sum"),
    "a view's shard": (
        lambda: of_eight(torch.ones(2), _StridedShard(0, split_factor=2)),
        "split factor of 2",
    ),
    "another local shape": (lambda: of_eight(torch.ones(3), Shard(0)), "local tensor of (3,)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_box_is_refused_by_name(case: str) -> None:
    make, words = REFUSED[case]
    with as_rank(1, 4):
        value = make()
        with pytest.raises(ShardingError) as caught:
            flatten({"box": holding({"a": [value]})})
    assert isinstance(caught.value, NotSavableError)
    assert caught.value.path == "box.a.0"
    assert words in str(caught.value)


def test_tied_parts_are_found_where_they_are_empty_too() -> None:
    names = set()
    for rank in range(3):
        with as_rank(rank, 3):
            mesh = mesh_of(3)
            weight = distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)], src_data_rank=None)
            other = distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)], src_data_rank=None)
            state = {"a": weight, "tied": weight.detach(), "other": other}
            tensors, skeleton = flatten({"m": holding(state)})
            names.add(json.dumps(skeleton))
            assert list(tensors) == ["m.a", "m.other"]
    assert len(names) == 1


def test_the_memo_sees_other_parts_and_keeps_the_same() -> None:
    with as_rank(0, 2):
        mesh = mesh_of(2)
        model = nn.Linear(3, 4)
        shard = [Shard(0)]
        for name, param in list(model.named_parameters()):
            cut = distribute_tensor(param.detach(), mesh, shard, src_data_rank=None)
            model.register_parameter(name, nn.Parameter(cut))
        memo, objects = StateMemo(), {"m": model}
        first, _ = memo.flatten(objects)
        with torch.no_grad():
            local(model.weight).fill_(7.0)
        again, _ = memo.flatten(objects)
        assert again is first
        assert again["m.weight"].eq(7.0).all()
        assert set(again.shardings) == {"m.weight", "m.bias"}
        whole = distribute_tensor(torch.ones(4, 3), mesh, [Replicate()], src_data_rank=None)
        model.register_parameter("weight", nn.Parameter(whole))
        other, _ = memo.flatten(objects)
        assert other is not first
        assert other.shardings["m.weight"].box == Box.whole((4, 3))


def test_the_loop_refuses_to_sum_gradients_of_parts() -> None:
    for rank in ARRANGEMENTS["fsdp-2"].ranks():
        model = ARRANGEMENTS["fsdp-2"].job(1).model
        with pytest.raises(UsageError, match="fully_shard"):
            GradientSync(model.parameters())
        tensors, _ = flatten({"m": model})
        with pytest.raises(UsageError, match=r"m\."):
            refuse_parts(tensors)
        assert set(whole_tensors(tensors)) == {
            "m.scale",
            "m.norm.running_mean",
            "m.norm.running_var",
            "m.norm.num_batches_tracked",
        }, rank
    refuse_parts({"a": torch.ones(1)})


def test_a_tensor_for_two_places_that_differ_is_read_whole_and_put_into_both() -> None:
    weight = torch.arange(8.0).view(4, 2)
    tensors, skeleton = flatten({"pair": holding({"a": weight, "b": weight})})
    assert list(tensors) == ["pair.a"]
    with as_rank(1, 2):
        part = distribute_tensor(torch.zeros(4, 2), mesh_of(2), [Shard(0)], src_data_rank=None)
        found: dict[str, Any] = {}
        for there, names in (({"a": part, "b": part}, ["pair.a"]), ({"a": part, "b": weight}, [])):
            pair: Any = (partial(dict, there), found.update)
            assert list(sharded_like({"pair": pair}, skeleton)) == names
            restore({"pair": pair}, {"pair.a": weight.clone()}, skeleton)
            assert torch.equal(local(found["a"]), weight[2:])
        assert torch.equal(found["b"], weight)


def test_a_state_without_dtensors_asks_for_nothing() -> None:
    weight = torch.ones(2)
    _, skeleton = flatten({"pair": holding({"a": weight})})
    assert sharded_like({"pair": holding({"a": weight})}, skeleton) == {}
    assert sharded_like({}, [1]) == {}


def test_the_mesh_of_tensor_and_fsdp_cuts_is_what_the_matrix_has() -> None:
    for _ in ARRANGEMENTS["fsdp-tp-2x2"].ranks():
        model: Any = ARRANGEMENTS["fsdp-tp-2x2"].job(1).model
        assert isinstance(model.embed.weight.placements[0], _StridedShard)
        assert model.body.weight.placements == (Shard(0), Shard(1))
        tensors, _ = flatten({"m": model})
        beside = tensors.shardings["m.norm.weight"]  # on a slice of the mesh: FSDP2 alone
        assert model.norm.weight.device_mesh.ndim == 1
        assert [holders for _, holders in beside.pieces] == [(0, 1), (2, 3)]


def test_the_rank_is_that_of_the_process_not_of_the_mesh() -> None:
    """A process that had another rank before may still have meshes of then."""
    with as_rank(0, 2):
        part = distribute_tensor(torch.ones(4, 2), mesh_of(2), [Shard(0)], src_data_rank=None)
    with as_rank(1, 2):
        sharding = sharding_of(part, "t")
    assert (sharding.rank, sharding.box) == (1, Box((2, 0), (2, 2)))
