"""Reading a committed step again to see whether it is whole; every refused file is named.

Without `deep`: the manifest (against the commit log, done by `take_inventory`), the size of each
file, and each image's header against the manifest. With it, every byte and its checksum, too.
"""

from __future__ import annotations

from collections.abc import Callable

from relit_storage.checkpoint.copies import Inventory, Refusal, StepCopy
from relit_storage.checkpoint.copy_reading import CopyReader, ref_of, refusing
from relit_storage.checkpoint.image import MAX_HEADER_BYTES, parse_header
from relit_storage.checkpoint.manifest_entries import ShardEntry
from relit_storage.errors import CorruptShardError
from relit_storage.run.layout import manifest_key

OnBytes = Callable[[int], None]


def verify_copy(
    copy: StepCopy, *, deep: bool, on_bytes: OnBytes = lambda count: None
) -> list[Refusal]:
    """Every file of a copy that is not what was committed; blocks for the reads.

    on_bytes hears of each piece of `copy.num_bytes` that is done with. StoreUnavailableError.
    """
    if copy.manifest is None:
        return [copy.refusal(manifest_key(copy.step, copy.generation), copy.problem)]
    reader = CopyReader(copy)
    refusals = []
    for shard in copy.manifest.shards:
        for file, check in ((shard.file, _check_image), (shard.extras_file, _check_extras)):
            try:
                check(reader, shard, deep, on_bytes)
            except CorruptShardError as error:
                refusals.append(copy.refusal(file, str(error.fields["reason"])))
    return refusals


def newest_whole(
    inventory: Inventory, *, deep: bool, tier: str, on_bytes: OnBytes = lambda count: None
) -> StepCopy | None:
    """The newest copy on a tier in which nothing is refused; reads until one is found."""
    for copy in inventory.copies:
        if copy.tier == tier and not verify_copy(copy, deep=deep, on_bytes=on_bytes):
            return copy
    return None


def _check_image(reader: CopyReader, shard: ShardEntry, deep: bool, on_bytes: OnBytes) -> None:
    ref = ref_of(shard)
    _check_header(reader, shard)
    if not deep:
        on_bytes(shard.num_bytes)
        return
    for index in range(len(ref.checksums)):
        reader.chunk(shard, index)
        begin, end = ref.chunk_range(index)
        on_bytes(end - begin)


def _check_header(reader: CopyReader, shard: ShardEntry) -> None:
    store, size = reader.store_of(shard.file, shard.num_bytes), shard.num_bytes
    with refusing(shard.file):
        length = int.from_bytes(store.get_range(shard.file, 0, 8), "little")
        head = store.get_range(shard.file, 0, 8 + min(length, MAX_HEADER_BYTES, size))
    layout = parse_header(head, size, shard.file)
    lies = {
        (spec.name, spec.dtype, spec.full_shape, spec.box, layout.offset(spec.name))
        for spec in layout.specs
    }
    expected = {
        (tensor.name, tensor.dtype, tensor.global_shape, piece.box, piece.byte_range[0])
        for tensor, piece in reader.pieces[shard.file]
    }
    if lies != expected:
        reason = "its header names other tensors than the manifest"
        raise CorruptShardError(file=shard.file, reason=reason)


def _check_extras(reader: CopyReader, shard: ShardEntry, deep: bool, on_bytes: OnBytes) -> None:
    reader.store_of(shard.extras_file, shard.extras_bytes)
    if deep:
        reader.extras(shard.rank)
    on_bytes(shard.extras_bytes)
