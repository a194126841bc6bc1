"""Which rank saves which tensors and pieces, and how they lie in its image.

Whatever several ranks hold is saved by one of them, so that every byte of the state is staged and
written once: replicated tensors by any rank, a box that several ranks hold (HSDP) by one of those.
All ranks come to the same division without a word, because all know the same names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from relit_platform.errors import ShardingError
from relit_platform.worker.sharding import Sharding, shardings_of
from relit_platform.worker.state_tree import dtype_name
from relit_storage.checkpoint.image import ImageLayout, TensorSpec

_METADATA = {"relit": "1"}
_Tensors = tuple[tuple[str, torch.dtype, torch.Size, Sharding | None], ...]


class ShareLayout:
    """The layout of a rank's share, planned anew only if structure or place changed."""

    def __init__(self) -> None:
        self._signature: tuple[int, int, _Tensors] | None = None
        self._layout: ImageLayout | None = None
        self._planned: Mapping[str, Tensor] | None = None

    def of(self, tensors: Mapping[str, Tensor], rank: int, world: int) -> ImageLayout:
        """The image of what `rank` saves of `tensors`, which `flatten` gave.

        The same mapping as last time must hold tensors of the same shapes. Raises ShardingError
        as `owned` does.
        """
        place = (rank, world)
        known = self._signature is not None and self._signature[:2] == place
        if tensors is self._planned and known and self._layout is not None:
            return self._layout
        shardings = shardings_of(tensors)
        found = tuple((n, t.dtype, t.shape, shardings.get(n)) for n, t in tensors.items())
        signature = (*place, found)
        if self._layout is None or signature != self._signature:
            specs = [_spec(name, tensor, shardings.get(name)) for name, tensor in tensors.items()]
            share = owned(specs, rank, world, shardings)
            self._layout = ImageLayout.plan(share, _METADATA)
            self._signature = signature
        self._planned = tensors
        return self._layout

    def forget(self) -> None:
        """Let go of the tensors, whose structure is remembered."""
        self._planned = None


def owned(
    specs: Iterable[TensorSpec],
    rank: int,
    world: int,
    shardings: Mapping[str, Sharding] | None = None,
) -> list[TensorSpec]:
    """The tensors and pieces that `rank` saves for all: greedy by bytes, the largest first.

    specs are of whole tensors; those named in shardings are saved piece by piece, by ranks that
    hold them. Pure and the same on every rank: each tensor or piece belongs to exactly one. What
    few ranks hold goes first, then by size; ties go to the lower rank, equal sizes by name.
    Raises ShardingError for a tensor on other ranks than 0 to world - 1.
    """
    loads = [0] * world
    mine: list[TensorSpec] = []
    parts = [part for spec in specs for part in _parts(spec, rank, world, shardings or {})]
    for spec, holders in sorted(parts, key=_by_choice_and_size):
        least = min(holders, key=loads.__getitem__)
        loads[least] += spec.num_bytes
        if least == rank:
            mine.append(spec)
    return mine


def _spec(name: str, tensor: Tensor, sharding: Sharding | None) -> TensorSpec:
    shape = tuple(tensor.shape) if sharding is None else sharding.global_shape
    return TensorSpec(name, dtype_name(tensor), shape)


def _parts(
    spec: TensorSpec, rank: int, world: int, shardings: Mapping[str, Sharding]
) -> Iterator[tuple[TensorSpec, Sequence[int]]]:
    """What of a tensor is saved as one, and who could."""
    sharding = shardings.get(spec.name)
    if sharding is None:
        yield spec, range(world)
        return
    if sharding.rank != rank:
        reason = f"takes this process for rank {sharding.rank}, which is rank {rank} of the run"
        raise ShardingError(path=spec.name, reason=reason)
    for box, holders in sharding.pieces:
        if holders[-1] >= world:
            reason = f"lies on rank {holders[-1]} of a world of {world}"
            raise ShardingError(path=spec.name, reason=reason)
        if box.shape == spec.shape:
            yield spec, holders
        else:
            part = TensorSpec(
                spec.name, spec.dtype, box.shape, global_shape=spec.shape, offsets=box.offsets
            )
            yield part, holders


def _by_choice_and_size(part: tuple[TensorSpec, Sequence[int]]) -> tuple[object, ...]:
    spec, holders = part
    return len(holders), -spec.num_bytes, spec.name, spec.offsets or ()
