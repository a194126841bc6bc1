"""Which box of a sharded tensor which rank holds: arithmetic on a DTensor's mesh and placements.

    mesh [[0, 1], [2, 3]] (dp, tp), placements (Shard(0), Shard(1)), global shape (5, 4)

        rank 0  rows 0-2, columns 0-1        rank 1  rows 0-2, columns 2-3
        rank 2  rows 3-4, columns 0-1        rank 3  rows 3-4, columns 2-3

A dimension is cut as torch.chunk cuts it, so later parts are smaller, or empty. Where several mesh
dimensions cut one tensor dimension, the later ones cut the parts of the earlier ones; FSDP2 over
tensor parallelism cuts the other way round and says so by _StridedShard, whose split_factor is the
number of parts that were there before. Followed in that order, every part is a box, also where
sizes are uneven. The ranks of a mesh are those of the run's generation.

Nothing here imports torch.distributed.tensor before there is a DTensor: it takes a while, and most
runs have none.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from relit_platform.errors import ShardingError, UsageError
from relit_storage.checkpoint.pieces import Box, Shape

Cut = tuple[int, int] | None  # tensor dimension, split factor; None: replicated
_NO_CUT = 1


@dataclass(frozen=True, slots=True)
class Sharding:
    """Where the parts of one tensor are. Equal on all ranks but for `rank` and `box`.

    pieces: each box once, by offsets, with the ranks that hold it, ascending; they tile the
    tensor, and none is empty unless the tensor is. box: what this rank holds, which may be empty;
    None if it is outside of the mesh.
    """

    global_shape: Shape
    pieces: tuple[tuple[Box, tuple[int, ...]], ...]
    rank: int
    box: Box | None


class StateTensors(dict[str, Tensor]):
    """The tensors of a state by name; what `flatten` gives.

    Of a tensor that is sharded it has this rank's part, which may be empty, and `shardings` says
    what lies where. So the names are the same on every rank.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shardings: dict[str, Sharding] = {}

    def copy(self) -> StateTensors:
        """The same tensors in a dict of their own."""
        other = StateTensors(self)
        other.shardings = dict(self.shardings)
        return other


def shardings_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Sharding]:
    """The shardings of what is sharded among `tensors`; the others are whole on every rank."""
    return tensors.shardings if isinstance(tensors, StateTensors) else {}


def whole_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a state that every rank has whole."""
    parts = shardings_of(tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in parts}


def refuse_parts(tensors: Mapping[str, Tensor]) -> None:
    """Raise UsageError if some of a state is sharded: one rank cannot give it to another."""
    parts = shardings_of(tensors)
    if parts:
        raise UsageError(
            message=f"{len(parts)} registered tensors are DTensors ({next(iter(parts))}, ...), of "
            "which each rank has a part. A rank that lacks its part can load it from a checkpoint "
            "only: register what is whole on every rank."
        )


def any_dtensor() -> bool:
    """False as long as there cannot be a DTensor in this process."""
    return "torch.distributed.tensor" in sys.modules


def is_dtensor(value: Any) -> bool:
    """True for a DTensor; whoever made it has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


@torch.no_grad()
def local_of(tensor: Any) -> Tensor:
    """What lies on this rank of a DTensor, without a copy and without autograd."""
    local: Tensor = tensor.to_local()
    return local.detach()


def storage_of(tensor: Tensor) -> int:
    """Tells storages apart while their tensors live; a tensor without elements has one, too."""
    handle: int = tensor.untyped_storage()._cdata
    return handle


def lies_like(one: Any, other: Any) -> bool:
    """Do two DTensors have their parts on the same ranks?"""
    return one is other or (
        one.shape == other.shape
        and one.placements == other.placements
        and one.device_mesh == other.device_mesh
    )


def sharding_of(tensor: Any, path: str) -> Sharding:
    """Where the parts of a DTensor are; path names it in errors.

    Costs microseconds; no communication. Raises ShardingError for a tensor whose parts are no
    boxes (Partial placements, a view's _StridedShard, an order of its own), or whose local tensor
    is not the box that mesh and placements say.
    """
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    cuts = tuple(_cut(placement, path) for placement in tensor.placements)
    _check_order(tensor, path)
    meshes, rank = _sisters(mesh), mesh.get_rank()
    place = _place(rank, meshes, tuple(mesh.shape))
    try:
        pieces = held_boxes(shape, tuple(mesh.shape), meshes, cuts)
        box = None if place is None else box_at(shape, tuple(mesh.shape), place, cuts)
    except ValueError as error:
        raise ShardingError(path=path, reason=str(error)) from error
    found = tuple(local_of(tensor).shape)
    if box is not None and found != box.shape:
        reason = f"has a local tensor of {found} where its placements say {box.shape}"
        raise ShardingError(path=path, reason=reason)
    return Sharding(shape, pieces, rank, box)


def with_local(local: Tensor, like: Any) -> Tensor:
    """A DTensor that lies where the DTensor `like` does, out of this rank's part; no copy.

    No communication: every rank does the same with its own part.
    """
    module = sys.modules["torch.distributed.tensor"]
    made: Tensor = module.DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return made


def part_of(whole: Tensor, like: Any) -> Tensor:
    """A DTensor that lies where the DTensor `like` does, out of the whole tensor; a copy."""
    box = sharding_of(like, "a registered tensor").box
    if box is None:
        return with_local(whole.new_empty(0), like)
    part = whole
    for dim, (begin, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
        part = part.narrow(dim, min(begin, whole.shape[dim]), size)
    return with_local(part.clone(memory_format=torch.contiguous_format), like)


@lru_cache(maxsize=4096)
def held_boxes(
    global_shape: Shape,
    mesh_shape: Shape,
    meshes: tuple[tuple[int, ...], ...],
    cuts: tuple[Cut, ...],
) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """Every box that some rank holds, by offsets, and who holds it; see `Sharding.pieces`.

    meshes: the ranks of each mesh on which the same tensor lies, row-major. cuts: one per mesh
    dimension. Pure. Raises ValueError as `box_at` does. Of a tensor without elements every rank
    of the meshes holds the whole.
    """
    if not math.prod(global_shape):
        return ((Box.whole(global_shape), tuple(sorted(set(itertools.chain(*meshes))))),)
    held: dict[Box, set[int]] = {}
    places = itertools.product(*(range(size) for size in mesh_shape))
    for place, ranks in zip(places, zip(*meshes, strict=True), strict=True):
        box = box_at(global_shape, mesh_shape, place, cuts)
        if box.volume:
            held.setdefault(box, set()).update(ranks)
    ordered = sorted(held.items(), key=lambda item: item[0].offsets)
    return tuple((box, tuple(sorted(holders))) for box, holders in ordered)


def box_at(
    global_shape: Shape, mesh_shape: Shape, place: tuple[int, ...], cuts: Sequence[Cut]
) -> Box:
    """The box at one place of the mesh; it may be empty. Pure.

    Raises ValueError for split factors that no order of cuts explains.
    """
    offsets, shape = [0] * len(global_shape), list(global_shape)
    for dim, mesh_dims in _order(mesh_shape, cuts).items():
        if not 0 <= dim < len(shape):
            raise ValueError(f"is sharded along dimension {dim} of {len(shape)}")
        for mesh_dim in mesh_dims:
            part = -(-shape[dim] // mesh_shape[mesh_dim])
            begin = min(part * place[mesh_dim], shape[dim])
            offsets[dim] += begin
            shape[dim] = min(part, shape[dim] - begin)
    return Box(tuple(offsets), tuple(shape))


def _sisters(mesh: Any) -> tuple[tuple[int, ...], ...]:
    """The ranks of a mesh, and of those beside it: a slice of a larger mesh has one at each place
    along the dimensions that it lacks. FSDP2 over tensor parallelism keeps what is not cut by the
    latter on such a slice; each of them has all of the tensor.
    """
    return tuple(
        tuple(ranks.reshape(-1).tolist()) for ranks in mesh._layout.remap_to_tensor(mesh._rank_map)
    )


def _place(
    rank: int, meshes: Iterable[tuple[int, ...]], mesh_shape: Shape
) -> tuple[int, ...] | None:
    """Where a rank is in its mesh; None: in none. The mesh itself may remember another rank: that
    of this process in a generation before, when DTensors of equal meshes share it.
    """
    for ranks in meshes:
        if rank in ranks:
            at = ranks.index(rank)
            strides = [math.prod(mesh_shape[dim + 1 :]) for dim in range(len(mesh_shape))]
            return tuple(
                at // stride % size for stride, size in zip(strides, mesh_shape, strict=True)
            )
    return None


def _order(mesh_shape: Shape, cuts: Sequence[Cut]) -> dict[int, list[int]]:
    """By tensor dimension, the mesh dimensions that cut it, in the order in which they do.

    From the right: a cut whose split factor is n comes after those earlier ones whose parts are
    n in number.
    """
    order: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(cuts))):
        cut = cuts[mesh_dim]
        if cut is None:
            continue
        dim, split_factor = cut
        there = order.setdefault(dim, [])
        parts = [math.prod(mesh_shape[d] for d in there[:at]) for at in range(len(there) + 1)]
        if split_factor not in parts:
            reason = f"has a split factor of {split_factor} where its mesh makes {parts[-1]} parts"
            raise ValueError(reason)
        there.insert(parts.index(split_factor), mesh_dim)
    return order


def _cut(placement: Any, path: str) -> Cut:
    """A placement of torch as data."""
    if placement.is_replicate():
        return None
    if placement.is_partial():
        reason = f"is {placement}: its ranks hold terms of a sum, not parts of a tensor"
        raise ShardingError(path=path, reason=reason)
    dim = getattr(placement, "dim", None)
    if dim is None:
        raise ShardingError(path=path, reason=f"has the placement {placement}, unknown to relit")
    return int(dim), int(getattr(placement, "split_factor", _NO_CUT))


def _check_order(tensor: Any, path: str) -> None:
    """An order of cuts can be kept apart from the placements; nothing public makes one."""
    order = getattr(tensor._spec, "shard_order", None) or ()
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order):
        raise ShardingError(path=path, reason="is sharded in an order of its own")
