"""Reading what a restore plan names, from any tier, checked before anything is used.

Every saved rank's shard holds tensors, or pieces of them, of the one state of the run. A rank
needs the whole of most; where a sharded tensor is registered, only its own part, whatever the
pieces were cut like. So headers are read first, then the byte ranges that are needed, and pieces
are put together. Nothing is loaded into the registered objects here, so a refused file leaves
them as they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from relit_platform.facts import Json, RestorePlan, ShardSource
from relit_platform.worker.saved_shard import SLOT_TIERS, open_shard
from relit_platform.worker.sharding import sharding_of, with_local
from relit_platform.worker.state_tree import DTYPES
from relit_storage.checkpoint.checksum import checksum
from relit_storage.checkpoint.image import MAX_REASON, ImageLayout, TensorSpec, parse_header
from relit_storage.checkpoint.pieces import Box, Shape, boxes_tile, paste
from relit_storage.errors import (
    CorruptShardError,
    ObjectMissingError,
    StoreError,
    StoreUnavailableError,
)
from relit_storage.stores.protocol import ObjectStore

Like = Callable[[Json], Mapping[str, Any]]
_LENGTH_BYTES = 8  # of the header, at the beginning of an image


def load_plan(
    plan: RestorePlan, store: ObjectStore | None = None, like: Like | None = None
) -> tuple[dict[str, Tensor], dict[int, Json]]:
    """All tensors of the planned step, and each saved rank's extras by rank; blocks.

    store is the run's object store, needed only for shards of the object tier. like says, given
    the saved structure of the state, which tensors are for a DTensor and for which
    (`state_tree.sharded_like`): of those only this rank's part is read, and they come as DTensors
    that lie like it. All others come whole.

    Raises CorruptShardError with the fields tier, step, generation, file, reason for the first
    file that is not what was written or cannot be read: the caller reports these as `refused` and
    asks again. An unreachable store raises StoreUnavailableError, which says nothing about the
    checkpoint.
    """
    with ExitStack() as opened:
        shards = _open_all(plan, store, opened)
        found = _collect(plan, shards)
        likes = _fitting(found, like(shards[0].extras.get("objects")) if like else {})
        tensors: dict[str, Tensor] = {}
        for name, saved in found.items():
            if name in likes or len(saved.pieces) > 1:
                tensors[name] = _assemble(saved, _part(name, saved, likes.get(name)))
            else:
                shard, spec = saved.pieces[0]
                shard.whole.append(spec)
        for shard in shards:
            with _placing(plan, shard.source):
                tensors.update(shard.read())
    tensors |= {name: with_local(tensors[name], lies) for name, lies in likes.items()}
    return tensors, {shard.source.rank: shard.extras for shard in shards}


@dataclass(slots=True)
class _Shard:
    """A saved shard whose header was read, and what is to be taken out of it."""

    source: ShardSource
    fill: Callable[[memoryview, int, int], None]
    image: Tensor
    layout: ImageLayout
    extras: Json
    whole: list[TensorSpec] = field(default_factory=list)
    parts: list[tuple[TensorSpec, Box, Tensor]] = field(default_factory=list)

    def read(self) -> dict[str, Tensor]:
        """Fill the parts, and give back the whole tensors; lets go of the image."""
        image = self.image.numpy().data
        ranges = [self._range(spec, spec.box) for spec in self.whole]
        ranges += [self._range(spec, box) for spec, box, _ in self.parts]
        for begin, end in _merged(ranges):
            self.fill(image, begin, end)
        for spec, box, target in self.parts:
            begin = self.layout.offset(spec.name)
            data = image[begin : begin + spec.num_bytes]
            room = target.reshape(-1).view(torch.uint8).numpy().data
            paste(data, spec.box, room, box, target.element_size())
        found = {spec.name: self._view(spec) for spec in self.whole}
        if self.parts:  # views of a few tensors would keep the pages of all the others
            found = {name: tensor.clone() for name, tensor in found.items()}
        self.image, self.parts = torch.empty(0, dtype=torch.uint8), []
        return found

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

    def _view(self, spec: TensorSpec) -> Tensor:
        """A tensor as a view of the image's memory."""
        start, dtype = self.layout.offset(spec.name), DTYPES[spec.dtype]
        raw = self.image[start : start + spec.num_bytes]
        if start % dtype.itemsize:  # not written by us: legal in safetensors, not in a view
            raw = raw.clone()
        try:
            return raw.view(dtype).view(spec.shape)
        except (RuntimeError, OverflowError) as error:  # torch's own limits
            _refuse(self.source.location, f"tensor {spec.name!r}: {error}")


@dataclass(slots=True)
class _Saved:
    """A tensor, and where its pieces are."""

    dtype: str
    shape: Shape
    pieces: list[tuple[_Shard, TensorSpec]] = field(default_factory=list)


def _open_all(plan: RestorePlan, store: ObjectStore | None, opened: ExitStack) -> list[_Shard]:
    """The planned shards by rank, one for each rank that saved."""
    shards: list[_Shard] = []
    for source in sorted(plan.shards, key=lambda shard: shard.rank):
        with _placing(plan, source):
            shards.append(_open(plan, source, store, opened))
    ranks = [shard.source.rank for shard in shards]
    if ranks != list(range(plan.world)):
        reason = f"shards of ranks {ranks} for a world of {plan.world}"
        raise CorruptShardError(
            file="", reason=reason, tier=plan.tier, step=plan.step, generation=plan.generation
        )
    return shards


def _open(
    plan: RestorePlan, source: ShardSource, store: ObjectStore | None, opened: ExitStack
) -> _Shard:
    """Read a shard's header and extras."""
    reader = open_shard(plan, source, store)
    opened.callback(reader.close)
    image = torch.empty(reader.num_bytes, dtype=torch.uint8)
    room = image.numpy().data
    reader.fill(room, 0, min(_LENGTH_BYTES, reader.num_bytes))
    length = int.from_bytes(bytes(room[:_LENGTH_BYTES]), "little")
    reader.fill(room, 0, min(_LENGTH_BYTES + length, reader.num_bytes))
    layout = parse_header(room, reader.num_bytes, source.location)
    extras = _parse_extras(plan, source, reader.extras())
    return _Shard(source, reader.fill, image, layout, extras)


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


def _part(name: str, saved: _Saved, like: Any) -> Box:
    """What of a tensor this rank needs; nothing where the DTensor `like` has no part here."""
    if like is None:
        return Box.whole(saved.shape)
    return sharding_of(like, name).box or Box((0,), (0,))


def _assemble(saved: _Saved, box: Box) -> Tensor:
    """Room for a box of a tensor, which the shards are told to fill.

    It is not larger than the pieces, which tile the tensor and lie in files of known size.
    """
    room = torch.empty(box.shape, dtype=DTYPES[saved.dtype])
    if room.numel():
        for shard, spec in saved.pieces:
            if spec.box.overlap(box) is not None:
                shard.parts.append((spec, box, room))
    return room


def _merged(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges in ascending order, those that touch as one, without empty ones."""
    begin = end = 0
    for first, last in sorted(ranges):
        if first > end:
            if end > begin:
                yield begin, end
            begin = first
        end = max(end, last)
    if end > begin:
        yield begin, end


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
