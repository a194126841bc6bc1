"""Reading what a restore plan names, from any tier, checked before anything is used.

Every saved rank's shard holds tensors, or pieces of them, of the one state of the run. A rank
needs the whole of most; where a sharded tensor is registered, only its own part, whatever the
pieces were cut like. So headers are read first, then the byte ranges that are needed, straight
into the tensors that they are for, and pieces are put together. These tensors may be those of the
registered objects: a file that is refused halfway leaves them half overwritten, and `Member` holds
no state until another restore was whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from relit_platform.facts import Json, RestorePlan, ShardSource
from relit_platform.worker.saved_shard import SLOT_TIERS, SavedShard, open_shard
from relit_platform.worker.scatter import Scatter, bytes_of
from relit_platform.worker.sharding import sharding_of, with_local
from relit_platform.worker.state_tree import DTYPES
from relit_storage.checkpoint.checksum import checksum
from relit_storage.checkpoint.image import (
    MAX_HEADER_BYTES,
    MAX_REASON,
    ImageLayout,
    TensorSpec,
    parse_header,
)
from relit_storage.checkpoint.pieces import Box, Shape, boxes_tile, paste, spans
from relit_storage.errors import (
    CorruptShardError,
    ObjectMissingError,
    StoreError,
    StoreUnavailableError,
)
from relit_storage.stores.protocol import ObjectStore

Like = Callable[[Json], Mapping[str, Any]]
Rooms = Callable[[Json, Mapping[str, Tensor]], Mapping[str, Tensor]]
_LENGTH_BYTES = 8  # of the header, at the beginning of an image


def load_plan(
    plan: RestorePlan,
    store: ObjectStore | None = None,
    like: Like | None = None,
    rooms: Rooms | None = None,
    *,
    shared: bool = False,
) -> tuple[dict[str, Tensor], dict[int, Json]]:
    """All tensors of the planned step, and each saved rank's extras by rank; blocks.

    store is the run's object store, needed only for shards of the object tier. like says, given
    the saved structure of the state, which tensors are for a DTensor and for which
    (`state_tree.sharded_like`): of those only this rank's part is read, and they come as DTensors
    that lie like it. All others come whole. rooms says, given the extras of the first rank and a
    meta tensor for each saved one, which tensors of the same shape and dtype, dense and on the
    CPU, are to be filled where they are (`filling.rooms`); of the others each gets memory of its
    own. Whatever rooms raises passes through, before a byte was written. shared: other ranks of
    this node restore the same plan at the same time.

    Raises CorruptShardError with the fields tier, step, generation, file, reason for the first
    file that is not what was written or cannot be read: the caller reports these as `refused` and
    asks again. An unreachable store raises StoreUnavailableError, which says nothing about the
    checkpoint. After either the tensors that rooms gave hold garbage.
    """
    with ExitStack() as opened:
        shards = _open_all(plan, store, opened, shared)
        found = _collect(plan, shards)
        likes = _fitting(found, like(shards[0].extras.get("objects")) if like else {})
        shapes = {name: _shape(plan, name, saved) for name, saved in found.items()}
        there = rooms(shards[0].extras, shapes) if rooms else {}
        tensors = {
            name: _assemble(name, saved, likes.get(name), there.get(name))
            for name, saved in found.items()
        }
        for shard in shards:
            with _placing(plan, shard.source):
                shard.read()
    tensors |= {name: with_local(tensors[name], lies) for name, lies in likes.items()}
    return tensors, {shard.source.rank: shard.extras for shard in shards}


@dataclass(slots=True)
class _Shard:
    """A saved shard whose header was read, and what is to be taken out of it."""

    source: ShardSource
    saved: SavedShard
    layout: ImageLayout
    extras: Json
    scatter: Scatter = field(default_factory=Scatter)
    parts: list[tuple[TensorSpec, Box, Tensor, memoryview]] = field(default_factory=list)

    def fill(self, spec: TensorSpec, box: Box, room: Tensor) -> None:
        """What a box shares with a piece goes into room, which is the box."""
        begin = self.layout.offset(spec.name)
        runs = list(islice(spans(spec.box, box, room.element_size()), 2))
        if len(runs) == 1:
            at, to, num_bytes = runs[0]
            self.scatter.add(begin + at, bytes_of(room)[to : to + num_bytes])
        elif runs:  # pages that nobody fills cost no memory
            raw = np.empty(spec.num_bytes, dtype=np.uint8).data
            first, last = self._range(spec, box)
            self.scatter.add(first, raw[first - begin : last - begin])
            self.parts.append((spec, box, room, raw))

    def read(self) -> None:
        """Fill all that was asked for."""
        self.saved.read(self.scatter)
        for spec, box, room, raw in self.parts:
            paste(raw, spec.box, bytes_of(room), box, room.element_size())
        self.scatter, self.parts = Scatter(), []  # and with them the memory of the raw bytes

    def _range(self, spec: TensorSpec, box: Box) -> tuple[int, int]:
        """The bytes of the image from the first to the last that a box needs of a piece."""
        both = spec.box.overlap(box)
        begin = self.layout.offset(spec.name)
        if both is None:  # nothing, or an empty tensor
            return begin, begin
        stride = DTYPES[spec.dtype].itemsize
        first, last = begin, begin + stride
        for dim in reversed(range(len(both.shape))):
            at = both.offsets[dim] - spec.origin[dim]
            first += at * stride
            last += (at + both.shape[dim] - 1) * stride
            stride *= spec.shape[dim]
        return first, last


@dataclass(slots=True)
class _Saved:
    """A tensor, and where its pieces are."""

    dtype: str
    shape: Shape
    pieces: list[tuple[_Shard, TensorSpec]] = field(default_factory=list)


def _open_all(
    plan: RestorePlan, store: ObjectStore | None, opened: ExitStack, shared: bool
) -> list[_Shard]:
    """The planned shards by rank, one for each rank that saved."""
    shards: list[_Shard] = []
    for source in sorted(plan.shards, key=lambda shard: shard.rank):
        with _placing(plan, source):
            shards.append(_open(plan, source, store, opened, shared))
    ranks = [shard.source.rank for shard in shards]
    if ranks != list(range(plan.world)):
        reason = f"shards of ranks {ranks} for a world of {plan.world}"
        raise CorruptShardError(
            file="", reason=reason, tier=plan.tier, step=plan.step, generation=plan.generation
        )
    return shards


def _open(
    plan: RestorePlan,
    source: ShardSource,
    store: ObjectStore | None,
    opened: ExitStack,
    shared: bool,
) -> _Shard:
    """Read a shard's header and extras."""
    saved = open_shard(plan, source, store, shared)
    opened.callback(saved.close)
    length = int.from_bytes(saved.head(_LENGTH_BYTES)[:_LENGTH_BYTES], "little")
    head = saved.head(_LENGTH_BYTES + min(length, MAX_HEADER_BYTES))
    layout = parse_header(head, saved.num_bytes, source.location)
    return _Shard(source, saved, layout, _parse_extras(plan, source, saved.extras()))


def _collect(plan: RestorePlan, shards: Iterable[_Shard]) -> dict[str, _Saved]:
    """Every tensor with its pieces, which cover it exactly once."""
    found: dict[str, _Saved] = {}
    for shard in shards:
        with _placing(plan, shard.source):
            for spec in shard.layout.specs:
                saved = found.setdefault(spec.name, _Saved(spec.dtype, spec.full_shape))
                _check_piece(saved, spec, shard.source.location)
                saved.pieces.append((shard, spec))
    for name, saved in found.items():
        last = saved.pieces[-1][0].source
        with _placing(plan, last):
            if reason := boxes_tile(saved.shape, [spec.box for _, spec in saved.pieces]):
                _refuse(last.location, f"tensor {name!r} {reason}")
    return found


def _check_piece(saved: _Saved, spec: TensorSpec, file: str) -> None:
    if spec.dtype not in DTYPES:
        _refuse(file, f"tensor {spec.name!r} has the dtype {spec.dtype}, unknown to torch")
    if not saved.pieces:
        return
    if spec.whole or saved.pieces[0][1].whole:
        _refuse(file, f"tensor {spec.name!r} is in another shard, too")
    if (spec.dtype, spec.full_shape) != (saved.dtype, saved.shape):
        what = f"{spec.dtype} of {spec.full_shape}, elsewhere {saved.dtype} of {saved.shape}"
        _refuse(file, f"tensor {spec.name!r} is {what}")


def _fitting(found: Mapping[str, _Saved], likes: Mapping[str, Any]) -> dict[str, Any]:
    """Those DTensors that have the shape of what was saved for them."""
    return {
        name: like
        for name, like in likes.items()
        if name in found and tuple(like.shape) == found[name].shape
    }


def _shape(plan: RestorePlan, name: str, saved: _Saved) -> Tensor:
    """A meta tensor like what was saved; torch has limits of its own, for its elements, say."""
    source = saved.pieces[0][0].source
    with _placing(plan, source):
        try:
            return torch.empty(saved.shape, dtype=DTYPES[saved.dtype], device="meta")
        except (RuntimeError, OverflowError, TypeError) as error:
            _refuse(source.location, f"tensor {name!r}: {error}")


def _assemble(name: str, saved: _Saved, like: Any, there: Tensor | None) -> Tensor:
    """Room for what this rank needs of a tensor, which the shards are told to fill.

    It is not larger than the pieces, which tile the tensor and lie in files of known size. A
    DTensor `like` that has no part here needs nothing.
    """
    box = Box.whole(saved.shape)
    if like is not None:
        there, box = None, sharding_of(like, name).box or Box((0,), (0,))
    room = torch.empty(box.shape, dtype=DTYPES[saved.dtype]) if there is None else there
    if room.numel():
        for shard, spec in saved.pieces:
            shard.fill(spec, box, room)
    return room


def _parse_extras(plan: RestorePlan, source: ShardSource, raw: bytes) -> Json:
    file = source.extras_location or source.location
    if source.tier not in SLOT_TIERS and checksum(raw) != source.extras_checksum:
        _refuse(file, "extras fail their checksum")
    try:
        extras = json.loads(raw)
    except (ValueError, RecursionError) as error:
        _refuse(file, f"extras do not parse: {error}")
    if not isinstance(extras, dict):
        _refuse(file, "extras are not a JSON object")
    if extras.get("step", plan.step) != plan.step:
        _refuse(file, f"extras are of step {extras['step']}")
    return extras


@contextmanager
def _placing(plan: RestorePlan, source: ShardSource) -> Iterator[None]:
    """Whatever is wrong with a file becomes a refusal of that file, tier and step included."""
    try:
        yield
    except CorruptShardError as error:
        raise _placed(error, plan, source) from error
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        reason = "is missing" if gone else error.strerror or str(error)
        bad = CorruptShardError(file=error.filename or source.location, reason=reason)
        raise _placed(bad, plan, source) from error
    except StoreUnavailableError:
        raise
    except StoreError as error:
        gone = isinstance(error, ObjectMissingError)
        reason = "is missing" if gone else str(error.fields.get("cause", error))
        bad = CorruptShardError(file=error.fields.get("key", source.location), reason=reason)
        raise _placed(bad, plan, source) from error


def _refuse(file: str, reason: str) -> NoReturn:
    raise CorruptShardError(file=file, reason=reason[:MAX_REASON])


def _placed(error: CorruptShardError, plan: RestorePlan, source: ShardSource) -> CorruptShardError:
    """The same error with the fields by which the manager excludes what was refused."""
    return CorruptShardError(
        file=error.fields.get("file", source.location),
        reason=error.fields.get("reason", str(error)),
        tier=source.tier,
        step=plan.step,
        generation=plan.generation,
        rank=source.rank,
        node=source.node_id,
    )
