"""Reading what a restore plan names, from any tier, checked before anything is used.

Every rank reads every shard: state is replicated, each saved rank holds a part of it. Nothing is
loaded into the registered objects here, so a refused file leaves them as they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from relit_platform.facts import Json, RestorePlan, ShardSource
from relit_platform.node.slots import Slot
from relit_platform.worker.state_tree import DTYPES
from relit_storage.checkpoint.checksum import checksum, num_chunks
from relit_storage.checkpoint.durable import read_file
from relit_storage.checkpoint.image import MAX_REASON, parse_header
from relit_storage.checkpoint.shard import ShardRef, check_chunk, read_shard_into
from relit_storage.errors import (
    CorruptShardError,
    ObjectMissingError,
    StoreError,
    StoreUnavailableError,
)
from relit_storage.stores.protocol import ObjectStore


def load_plan(
    plan: RestorePlan, store: ObjectStore | None = None
) -> tuple[dict[str, Tensor], dict[int, Json]]:
    """All tensors of the planned step, and each saved rank's extras by rank; blocks.

    store is the run's object store, needed only for shards of the object tier. Raises
    CorruptShardError with the fields tier, step, generation, file, reason for the first file
    that is not what was written or cannot be read: the caller reports these as `refused` and asks
    again. An unreachable store raises StoreUnavailableError, which says nothing about the
    checkpoint.
    """
    tensors: dict[str, Tensor] = {}
    extras: dict[int, Json] = {}
    for source in sorted(plan.shards, key=lambda shard: shard.rank):
        try:
            image, raw = _READERS[source.tier](plan, source, store)
            extras[source.rank] = _parse_extras(plan, source, raw)
            for name, tensor in _tensors_of(image, source.location).items():
                if name in tensors:
                    _refuse(source.location, f"tensor {name!r} is in another shard, too")
                tensors[name] = tensor
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
    if sorted(extras) != list(range(plan.world)):
        reason = f"shards of ranks {sorted(extras)} for a world of {plan.world}"
        raise CorruptShardError(
            file="", reason=reason, tier=plan.tier, step=plan.step, generation=plan.generation
        )
    return tensors, extras


def _from_memory(
    plan: RestorePlan, source: ShardSource, store: ObjectStore | None
) -> tuple[Tensor, bytes]:
    slot = Slot.open(source.location)
    try:
        before = slot.sequence()
        info = slot.info()
        found = (info.step, info.generation, info.rank, info.world)
        if not info.complete or found != (plan.step, plan.generation, source.rank, plan.world):
            _refuse(source.location, f"slot holds step {info.step} of generation {info.generation}")
        image = torch.empty(info.image_bytes, dtype=torch.uint8)
        slot.copy_image_into(image.numpy().data)
        raw = slot.read_extras()
        slot.check_unchanged(before)  # image and extras are of one snapshot
        return image, raw
    finally:
        slot.close()


def _from_disk(
    plan: RestorePlan, source: ShardSource, store: ObjectStore | None
) -> tuple[Tensor, bytes]:
    image = torch.empty(source.num_bytes, dtype=torch.uint8)
    read_shard_into(source.location, _ref(source), image.numpy().data)
    return image, read_file(source.extras_location, source.extras_bytes)


def _from_object(
    plan: RestorePlan, source: ShardSource, store: ObjectStore | None
) -> tuple[Tensor, bytes]:
    if store is None:
        raise ValueError("a plan of the object tier needs the run's store")
    ref, key = _ref(source), source.location
    found = store.size(key)
    if found != ref.num_bytes or len(ref.checksums) != num_chunks(ref.num_bytes, ref.chunk_bytes):
        _refuse(key, "is missing" if found is None else f"{found} bytes, not {ref.num_bytes}")
    image = torch.empty(ref.num_bytes, dtype=torch.uint8)
    room = image.numpy().data
    for index in range(len(ref.checksums)):
        begin, end = ref.chunk_range(index)
        chunk = store.get_range(key, begin, end - begin)
        check_chunk(key, ref, index, chunk)
        room[begin:end] = chunk
    # One byte more than there should be, so that a longer object is not taken for the right one.
    return image, store.get_range(source.extras_location, 0, source.extras_bytes + 1)


_READERS: dict[
    str, Callable[[RestorePlan, ShardSource, ObjectStore | None], tuple[Tensor, bytes]]
] = {"memory": _from_memory, "disk": _from_disk, "object": _from_object}


def _ref(source: ShardSource) -> ShardRef:
    return ShardRef(
        num_bytes=source.num_bytes, chunk_bytes=source.chunk_bytes, checksums=source.checksums
    )


def _parse_extras(plan: RestorePlan, source: ShardSource, raw: bytes) -> Json:
    file = source.extras_location or source.location
    if source.tier != "memory" and checksum(raw) != source.extras_checksum:
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


def _tensors_of(image: Tensor, file: str) -> dict[str, Tensor]:
    """The tensors of an image, as views of its memory."""
    layout = parse_header(image.numpy().data, image.numel(), file)
    tensors: dict[str, Tensor] = {}
    for spec in layout.specs:
        dtype = DTYPES.get(spec.dtype)
        if dtype is None:
            _refuse(file, f"tensor {spec.name!r} has the dtype {spec.dtype}, unknown to torch")
        start = layout.offset(spec.name)
        raw = image[start : start + spec.num_bytes]
        if start % dtype.itemsize:  # not written by us: legal in safetensors, not in a view
            raw = raw.clone()
        try:
            tensors[spec.name] = raw.view(dtype).view(spec.shape)
        except (RuntimeError, OverflowError) as error:  # torch's own limits
            _refuse(file, f"tensor {spec.name!r}: {error}")
    return tensors


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
    )
