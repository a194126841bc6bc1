"""Does a manifest name every byte of a step exactly once?

Every tensor is tiled by its pieces, every file by the pieces that lie in it, and every rank of the
world has its files. Each function answers with the reason why not, "" if all is well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from relit_storage.checkpoint.checksum import num_chunks
from relit_storage.checkpoint.image import ITEM_BYTES, TensorSpec
from relit_storage.checkpoint.manifest_entries import ShardEntry, TensorEntry
from relit_storage.checkpoint.pieces import boxes_tile
from relit_storage.run.layout import extras_key, shard_key


def shards_fault(step: int, generation: int, world: int, shards: Sequence[ShardEntry]) -> str:
    """Unless the ranks are 0 to world-1, in order, and their files are those of this step."""
    ranks = [shard.rank for shard in shards]
    if world < 1 or len(ranks) != world or ranks != list(range(len(ranks))):
        return f"shards of ranks {ranks} in world {world}"
    for shard in shards:
        place = step, generation, shard.rank
        # Names are derived, never free: a manifest cannot point outside its own step.
        if (shard.file, shard.extras_file) != (shard_key(*place), extras_key(*place)):
            return f"{shard.file!r} and {shard.extras_file!r} are not names of this step"
        if shard.num_bytes and shard.chunk_bytes < 1:
            return f"{shard.file} has chunks of no size"
        if len(shard.checksums) != num_chunks(shard.num_bytes, max(1, shard.chunk_bytes)):
            return f"{shard.file} has {len(shard.checksums)} checksums"
    return ""


def tensors_fault(tensors: Sequence[TensorEntry], shards: Sequence[ShardEntry]) -> str:
    """Unless pieces tile their tensors, and in each file follow each other to its end.

    Takes some seconds for a million pieces, however they lie.
    """
    names = [tensor.name for tensor in tensors]
    if names != sorted(set(names)):
        return "a tensor appears twice, or tensors are not in order"
    ranges: dict[tuple[str, int], list[tuple[int, int]]] = {
        (shard.file, shard.rank): [] for shard in shards
    }
    for tensor in tensors:
        if fault := _tensor_fault(tensor):
            return f"tensor {tensor.name!r} {fault}"
        for piece in tensor.pieces:
            lies = ranges.get((piece.file, piece.rank))
            if lies is None:
                return f"tensor {tensor.name!r} lies in an unknown shard {piece.file}"
            lies.append(piece.byte_range)
    for shard in shards:
        if not _follow_each_other(ranges[shard.file, shard.rank], shard.num_bytes):
            return f"tensors do not tile {shard.file}"
    return ""


def _tensor_fault(tensor: TensorEntry) -> str:
    whole = TensorSpec(tensor.name, tensor.dtype, tensor.global_shape)
    if whole.fault:
        return whole.fault
    if any(one.rank >= other.rank for one, other in pairwise(tensor.pieces)):
        return "has two pieces of one rank, or pieces that are not in order"
    if fault := boxes_tile(tensor.global_shape, (piece.box for piece in tensor.pieces)):
        return fault
    item = ITEM_BYTES[tensor.dtype]
    for piece in tensor.pieces:
        begin, end = piece.byte_range
        expected = math.prod(piece.shape) * item
        if begin < 0 or end - begin != expected:
            return f"takes {end - begin} bytes in {piece.file}, its shape {expected}"
    return ""


def _follow_each_other(ranges: list[tuple[int, int]], num_bytes: int) -> bool:
    """Without hole or overlap up to the end of the file; a file may hold no tensor at all."""
    ranges.sort()
    ends = [*(begin for begin, _ in ranges[1:]), num_bytes]
    return not ranges or [end for _, end in ranges] == ends
