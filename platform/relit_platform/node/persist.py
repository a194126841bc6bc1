"""From a slot in shared memory to files on this node's disk.

Three files per shard, in this order: the image, its extras, and a record that describes both. The
record is the shard's own commit: with it the other two are complete and synced, without it they
are rubbish. It never leaves the node; the manifest repeats what it says.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from relit_platform.facts import ShardPersisted
from relit_platform.node.growing import GivenUp, Growing
from relit_platform.node.slots import Slot, SlotHeader
from relit_storage.checkpoint.checksum import checksum, chunk_checksums, num_chunks
from relit_storage.checkpoint.durable import make_dirs, read_file, sync_dir, write_file
from relit_storage.checkpoint.image import MAX_REASON, parse_header
from relit_storage.checkpoint.manifest import MAX_MANIFEST_BYTES
from relit_storage.checkpoint.manifest_schema import INDEXED, check_types
from relit_storage.checkpoint.shard import write_shard
from relit_storage.errors import CommitConflictError, CorruptShardError
from relit_storage.run.layout import extras_key, manifest_key, shard_key, step_prefix

RECORD_SUFFIX = ".record"
MAX_WORLD = 100_000  # file names have five digits for a rank
_TYPES: dict[str, object] = {
    "step": int,
    "generation": int,
    "rank": int,
    "world": int,
    "node_id": str,
    "file": str,
    "num_bytes": int,
    "chunk_bytes": int,
    "checksums": [str],
    "extras_file": str,
    "extras_bytes": int,
    "extras_checksum": str,
    "tensors": [INDEXED],
    "seconds": float,
    "at_s": float,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How a node writes: below `root`, hashed by chunks, not faster than `pace` allows.

    pace is called before each chunk of an image with its bytes, and may block.
    """

    root: str
    node_id: str
    chunk_bytes: int
    clock: Callable[[], float]
    pace: Callable[[int], None] = lambda num_bytes: None


def persist_slot(slot: Slot, how: Writing) -> ShardPersisted:
    """Write a COMPLETE, pinned slot; durable on return. Blocks for the disk, and for the pace.

    Doing it again is cheap and answers the same. Raises CorruptShardError if the slot holds no
    whole snapshot or was overwritten meanwhile, CommitConflictError if a published step holds
    other bytes, OSError if the disk fails; then there is no record of this shard.
    """
    began_s = time.monotonic()
    header = slot.info()
    if not header.complete:
        raise CorruptShardError(file=slot.path, reason="slot holds no complete snapshot")
    sequence = slot.sequence()
    found = read_record(how.root, header.step, header.generation, header.rank)
    if found is not None and _same(found, slot):
        return dataclasses.replace(found, node_id=how.node_id)
    _refuse_if_published(how.root, header)
    make_dirs(os.path.join(how.root, step_prefix(header.step, header.generation)))
    _forget_record(how.root, header)
    written = _write_files(slot, header, how, how.pace)
    slot.check_unchanged(sequence)
    return _record(written, how, began_s)


def persist_growing(growing: Growing, how: Writing) -> ShardPersisted:
    """Write a snapshot while it is still being copied; durable, whole and pinned on return.

    Blocks for the copy, too. Raises GivenUp if nothing comes of it, or if there is something of
    this shard on disk, which only `persist_slot` may replace; else as `persist_slot`. Then there is
    no record of this shard.
    """
    began_s, slot, header = time.monotonic(), growing.slot, growing.header
    if read_record(how.root, header.step, header.generation, header.rank) is not None:
        raise GivenUp("there is a record of this shard")
    _refuse_if_published(how.root, header)
    growing.reach(1)  # its header and extras are there
    folder = os.path.join(how.root, step_prefix(header.step, header.generation))
    make_dirs(folder)
    _forget_record(how.root, header)  # one that does not load
    done_bytes = 0

    def pace(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        growing.reach(done_bytes)
        how.pace(num_bytes)

    try:
        written = _write_files(slot, header, how, pace)
        if not growing.whole():
            raise GivenUp("another snapshot has begun in its slot")
    except BaseException:
        _remove_if_empty(folder)  # nobody knows of this step, so nobody would delete it
        raise
    return _record(written, how, began_s)


def record_path(root: str, step: int, generation: int, rank: int) -> str:
    """Where the record of a shard lies."""
    return os.path.join(root, extras_key(step, generation, rank)[: -len(".json")] + RECORD_SUFFIX)


def read_record(root: str, step: int, generation: int, rank: int) -> ShardPersisted | None:
    """The record of a shard whose files are there with the right sizes, else None."""
    try:
        return load_record(root, record_path(root, step, generation, rank))
    except (FileNotFoundError, CorruptShardError):
        return None


def load_record(root: str, path: str) -> ShardPersisted:
    """Parse a record and look at its files. Raises CorruptShardError with the reason, OSError."""
    raw = read_file(path, MAX_MANIFEST_BYTES)
    try:
        fields = json.loads(raw.decode())
        check_types(fields, _TYPES, "record")
        fields["checksums"] = tuple(fields["checksums"])
        fields["tensors"] = tuple(fields["tensors"])
        record = ShardPersisted(**fields)
    except (ValueError, RecursionError) as error:
        reason = f"record does not parse: {error}"[:MAX_REASON]
        raise CorruptShardError(file=path, reason=reason) from error
    _check_place(record, root, path)
    _check_numbers(record, path)
    for name, size in ((record.file, record.num_bytes), (record.extras_file, record.extras_bytes)):
        full = os.path.join(root, name)
        found = os.stat(full).st_size if os.path.exists(full) else None
        if found != size:
            reason = "is missing" if found is None else f"{found} bytes, expected {size}"
            raise CorruptShardError(file=full, reason=reason)
    return record


def _check_place(record: ShardPersisted, root: str, path: str) -> None:
    place = record.step, record.generation, record.rank
    names = (shard_key(*place), extras_key(*place))
    if (record.file, record.extras_file) != names or record_path(root, *place) != path:
        raise CorruptShardError(file=path, reason="record of another shard")


def _check_numbers(record: ShardPersisted, path: str) -> None:
    if not record.rank < record.world <= MAX_WORLD:
        reason = f"rank {record.rank} in a world of {record.world}"
        raise CorruptShardError(file=path, reason=reason)
    chunks = num_chunks(record.num_bytes, max(1, record.chunk_bytes))
    if not record.chunk_bytes or len(record.checksums) != chunks:
        reason = f"{len(record.checksums)} checksums for {record.num_bytes} bytes"
        raise CorruptShardError(file=path, reason=reason)


def _same(record: ShardPersisted, slot: Slot) -> bool:
    """Does the slot hold the bytes of the record? Costs one hash of the slot, no read of disk."""
    return (
        record.num_bytes == slot.info().image_bytes
        and record.checksums == chunk_checksums(slot.image, record.chunk_bytes)
        and record.extras_checksum == checksum(slot.read_extras())
    )


def _refuse_if_published(root: str, header: SlotHeader) -> None:
    key = manifest_key(header.step, header.generation)
    if os.path.exists(os.path.join(root, key)):
        raise CommitConflictError(step=header.step, key=key)


def _forget_record(root: str, header: SlotHeader) -> None:
    """A record must not outlive the bytes it describes, so it goes before they are replaced."""
    path = record_path(root, header.step, header.generation, header.rank)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    sync_dir(os.path.dirname(path))


def _remove_if_empty(folder: str) -> None:
    """A step's folder of one generation, and the step's."""
    path = folder.rstrip("/")
    try:
        os.rmdir(path)
        os.rmdir(os.path.dirname(path))
    except OSError:
        pass  # other ranks' files, or another generation's, are there


def _record(written: ShardPersisted, how: Writing, began_s: float) -> ShardPersisted:
    """Make a shard count whose files are written. began_s: of the monotonic clock."""
    seconds = round(time.monotonic() - began_s, 6)
    written = dataclasses.replace(written, seconds=seconds, at_s=how.clock())
    record = json.dumps(dataclasses.asdict(written), sort_keys=True).encode()
    write_file(record_path(how.root, written.step, written.generation, written.rank), [record])
    return written


def _write_files(
    slot: Slot, header: SlotHeader, how: Writing, pace: Callable[[int], None]
) -> ShardPersisted:
    place = header.step, header.generation, header.rank
    layout = parse_header(slot.image, header.image_bytes, slot.path)
    shard = write_shard(
        os.path.join(how.root, shard_key(*place)), slot.image, how.chunk_bytes, pace
    )
    extras = slot.read_extras()
    write_file(os.path.join(how.root, extras_key(*place)), [extras])
    return ShardPersisted(
        step=header.step,
        generation=header.generation,
        rank=header.rank,
        world=header.world,
        node_id=how.node_id,
        file=shard_key(*place),
        num_bytes=shard.num_bytes,
        chunk_bytes=shard.chunk_bytes,
        checksums=shard.checksums,
        extras_file=extras_key(*place),
        extras_bytes=len(extras),
        extras_checksum=checksum(extras),
        tensors=layout.index(),
        seconds=0.0,
        at_s=0.0,
    )
