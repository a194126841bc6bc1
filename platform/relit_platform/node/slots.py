"""A slot: one file on tmpfs that holds a rank's newest snapshot and survives the rank.

    page 0         words of 8 bytes: magic, state, pin, sequence, geometry, facts of the snapshot
    extras         JSON, up to extras_capacity bytes, rounded up to a page
    image          the safetensors image, page aligned

One process writes a slot (the rank it was opened for); any process of the node reads it. The
protocol of a snapshot is `begin`, fill `image`, `set_extras`, `commit`:

    begin    state := WRITING, sequence := the next odd one, facts
    commit   checksums of facts and extras, sequence := even, state := COMPLETE, last

so a kill at any point leaves the state at WRITING, or the older snapshot COMPLETE and untouched.
A reader takes the sequence before and after its copy; a writer in between is thus always noticed.
Each word is stored by one aligned 8-byte store, never byte by byte. Readers in other processes
rely on stores becoming visible in program order, as x86-64 guarantees; elsewhere the checksum of
facts and extras still catches a header that is half visible.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from relit_platform.errors import BudgetError, UsageError
from relit_storage.errors import CorruptShardError

PAGE_BYTES = 4096
READ_TRIES = 1000  # a writer is inside begin or commit for microseconds
MAGIC = int.from_bytes(b"RELITSL1", "little")

# Indexes of 8-byte words in page 0. Geometry is written once; facts change with each snapshot.
_MAGIC, _STATE, _PIN, _SEQUENCE = 0, 1, 2, 3
_IMAGE_BYTES, _EXTRAS_CAPACITY, _IMAGE_OFFSET, _GEOMETRY_CRC = 4, 5, 6, 7
_GENERATION, _STEP, _RANK, _WORLD, _EXTRAS_BYTES, _EXTRAS_CRC, _FACTS_CRC = 8, 9, 10, 11, 12, 13, 14
_CUT, _SENT = 15, 16  # of the peer tier; no part of the facts
_FINAL = 17  # bytes of the image that the snapshot being written has no more to do with
_POPULATE_READ = 22  # MADV_POPULATE_READ, which the mmap module does not name


class SlotState(IntEnum):
    """What a slot's state word says about its content."""

    EMPTY = 0
    WRITING = 1
    COMPLETE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """What a slot says of itself. generation to extras_bytes mean something only if COMPLETE."""

    state: SlotState
    pinned: bool
    image_bytes: int
    extras_capacity: int
    generation: int
    step: int
    rank: int
    world: int
    extras_bytes: int

    @property
    def complete(self) -> bool:
        """True if the slot holds a whole snapshot."""
        return self.state is SlotState.COMPLETE


def slot_file_bytes(image_bytes: int, extras_capacity: int) -> int:
    """Size of the file of such a slot: what it takes out of the memory budget."""
    return _image_offset(extras_capacity) + _whole_pages(image_bytes)


def create_slot(path: str, image_bytes: int, extras_capacity: int) -> None:
    """Create an EMPTY slot file with all its memory reserved; 0600.

    Blocks about 0.35 s/GiB: a full tmpfs shows here as OSError(ENOSPC), and never as a SIGBUS in
    the middle of a step. The file appears under `path` only when it is ready; nothing is left
    behind on failure. Raises FileExistsError if `path` exists.
    """
    pending = f"{path}.pending"
    total_bytes = slot_file_bytes(image_bytes, extras_capacity)
    fd = os.open(pending, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, total_bytes)
        geometry = (image_bytes, extras_capacity, _image_offset(extras_capacity))
        crc = zlib.crc32(struct.pack("3Q", *geometry))
        os.pwrite(fd, struct.pack("8Q", MAGIC, SlotState.EMPTY, 0, 0, *geometry, crc), 0)
        os.link(pending, path)
    finally:
        os.close(fd)
        os.unlink(pending)


class Slot:
    """A mapped slot file. Use `Slot.open`. One thread at a time may write."""

    def __init__(self, path: str, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self._bytes = memoryview(mapping)
        self._words = self._bytes[:PAGE_BYTES].cast("Q")

    @classmethod
    def open(cls, path: str, prefault: bool = False) -> Slot:
        """Map an existing slot for reading and writing.

        prefault: also fill the page table, so that the first copy into the image takes no page
        faults; for the rank that writes. Raises CorruptShardError for a file that is not a slot,
        FileNotFoundError if there is none.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size < PAGE_BYTES:
                raise CorruptShardError(file=path, reason=f"{size} bytes, too short for a slot")
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if prefault else 0)
            slot = cls(path, mmap.mmap(fd, size, flags=flags))
        finally:
            os.close(fd)
        slot._check_geometry(size)
        return slot

    def close(self) -> None:
        """Unmap, unless views of the image are still held: then the last of them unmaps."""
        try:
            self._words.release()
            self._bytes.release()
            self._mapping.close()
        except BufferError:
            pass  # tensors over the image are still alive; the mapping goes with them

    @property
    def image(self) -> memoryview:
        """The image region, writable, exactly image_bytes long."""
        start = self._words[_IMAGE_OFFSET]
        return self._bytes[start : start + self._words[_IMAGE_BYTES]]

    def prepare(self, begin: int, end: int) -> None:
        """Fill the page table for image[begin:end] at once: a read of it takes no page faults."""
        at = self._words[_IMAGE_OFFSET] + begin
        first = at - at % PAGE_BYTES
        try:
            self._mapping.madvise(_POPULATE_READ, first, at + end - begin - first)
        except OSError:
            pass  # a kernel before 5.14: page by page, as the reader comes to them

    def begin(
        self, generation: int, step: int, rank: int, world: int, *, cut: bool = False
    ) -> None:
        """Give up the content and start a new snapshot. Raises UsageError if the slot is pinned.

        cut: every rank begins one of this step as such; the agent copies it to another node.
        """
        if self.pinned:
            raise UsageError(message=f"slot {self.path} is pinned and must not be overwritten.")
        words = self._words
        words[_STATE] = SlotState.WRITING
        words[_FINAL] = 0  # before the sequence: who reads what is growing must not take the old
        words[_SEQUENCE] = (words[_SEQUENCE] + 1) | 1  # another one, if that was odd already, too
        words[_GENERATION], words[_STEP] = generation, step
        words[_RANK], words[_WORLD] = rank, world
        words[_EXTRAS_BYTES] = 0
        words[_EXTRAS_CRC] = 0
        words[_CUT] = int(cut)

    def mark_final(self, num_bytes: int) -> None:
        """image[:num_bytes] and the extras are as they will be committed; by the rank, growing.

        For the agent, which may begin to write them to disk (growing.py).
        """
        self._words[_FINAL] = num_bytes

    @property
    def final_bytes(self) -> int:
        """What `mark_final` said last of the snapshot that is being written; 0 at first."""
        return self._words[_FINAL]

    def set_extras(self, data: bytes) -> None:
        """Store the rank's JSON beside the image; between `begin` and `commit`.

        Raises BudgetError if it is longer than the capacity: the caller opens bigger slots.
        """
        self._require_writing()
        capacity = self._words[_EXTRAS_CAPACITY]
        if len(data) > capacity:
            raise BudgetError(what="extras", needed_bytes=len(data), budget_bytes=capacity)
        self._bytes[PAGE_BYTES : PAGE_BYTES + len(data)] = data
        self._words[_EXTRAS_BYTES] = len(data)
        self._words[_EXTRAS_CRC] = zlib.crc32(data)

    def commit(self) -> None:
        """Make the new content count: from here on it survives this process."""
        self._require_writing()
        words = self._words
        words[_FACTS_CRC] = self._facts_crc()
        words[_SEQUENCE] += 1
        words[_STATE] = SlotState.COMPLETE

    @property
    def pinned(self) -> bool:
        """True while somebody persists this slot: its owner must not overwrite it."""
        return self._words[_PIN] != 0

    def pin(self) -> None:
        """Forbid overwriting; by the rank, before it asks the agent to persist."""
        self._words[_PIN] = 1

    def unpin(self) -> None:
        """Allow overwriting again; by the agent, when the bytes are on disk or given up."""
        self._words[_PIN] = 0

    @property
    def cut(self) -> bool:
        """True if this snapshot belongs on another node, too."""
        return self._words[_CUT] != 0

    @property
    def sent(self) -> bool:
        """True if this very snapshot is whole and on another node."""
        words = self._words
        return self._state() is SlotState.COMPLETE and words[_SENT] == words[_SEQUENCE]

    def mark_sent(self, sequence: int) -> None:
        """The snapshot of this `sequence()` is on another node; 0: none is. By the agent only."""
        self._words[_SENT] = sequence

    def sequence(self) -> int:
        """Counts begin and commit; equal before and after a read means nobody wrote between."""
        return self._words[_SEQUENCE]

    def info(self) -> SlotHeader:
        """What the slot says of itself, at one moment, also while its owner writes it.

        Raises CorruptShardError if a COMPLETE slot's facts fail their checksum.
        """
        words = self._words
        for _ in range(READ_TRIES):
            before = words[_SEQUENCE]
            header = self._read_header()
            intact = words[_FACTS_CRC] == self._facts_crc()
            if words[_SEQUENCE] != before or self._state() is not header.state:
                continue
            if header.complete and not intact:
                raise CorruptShardError(file=self.path, reason="slot header fails its checksum")
            return header
        raise CorruptShardError(file=self.path, reason="slot header never stands still")

    def claimed_step(self) -> tuple[int, int]:
        """(step, generation) as written, unchecked: to name a slot that was refused."""
        return self._words[_STEP], self._words[_GENERATION]

    def read_extras(self) -> bytes:
        """The JSON of a COMPLETE slot, checked. Raises CorruptShardError otherwise."""
        before = self._stable_sequence()
        data = bytes(self._bytes[PAGE_BYTES : PAGE_BYTES + self._words[_EXTRAS_BYTES]])
        crc = self._words[_EXTRAS_CRC]
        self.check_unchanged(before)
        if zlib.crc32(data) != crc:
            raise CorruptShardError(file=self.path, reason="extras fail their checksum")
        return data

    def copy_image_into(self, dest: memoryview) -> None:
        """Copy the image of a COMPLETE slot into `dest`, which has its length.

        Raises CorruptShardError if the slot is not COMPLETE, or if its owner overwrote it
        meanwhile; `dest` then holds garbage.
        """
        before = self._stable_sequence()
        dest[:] = self.image
        self.check_unchanged(before)

    def check_unchanged(self, sequence: int) -> None:
        """Raise CorruptShardError if the slot was written since `sequence()` was taken."""
        if self._words[_SEQUENCE] != sequence or self._state() is not SlotState.COMPLETE:
            raise CorruptShardError(file=self.path, reason="slot was overwritten")

    def _read_header(self) -> SlotHeader:
        words = self._words
        return SlotHeader(
            state=self._state(),
            pinned=self.pinned,
            image_bytes=words[_IMAGE_BYTES],
            extras_capacity=words[_EXTRAS_CAPACITY],
            generation=words[_GENERATION],
            step=words[_STEP],
            rank=words[_RANK],
            world=words[_WORLD],
            extras_bytes=words[_EXTRAS_BYTES],
        )

    def _require_writing(self) -> None:
        if self._state() is not SlotState.WRITING:
            raise UsageError(message=f"slot {self.path} is filled without begin().")

    def _stable_sequence(self) -> int:
        sequence = self._words[_SEQUENCE]
        if sequence & 1 or not self.info().complete:
            raise CorruptShardError(file=self.path, reason="slot holds no complete snapshot")
        return sequence

    def _state(self) -> SlotState:
        try:
            return SlotState(self._words[_STATE])
        except ValueError:
            raise CorruptShardError(file=self.path, reason="unknown state word") from None

    def _facts_crc(self) -> int:
        return zlib.crc32(self._bytes[_IMAGE_BYTES * 8 : _FACTS_CRC * 8])

    def _check_geometry(self, size: int) -> None:
        words = self._words
        geometry = self._bytes[_IMAGE_BYTES * 8 : _GEOMETRY_CRC * 8]
        if words[_MAGIC] != MAGIC or zlib.crc32(geometry) != words[_GEOMETRY_CRC]:
            self._refuse("not a slot file")
        if slot_file_bytes(words[_IMAGE_BYTES], words[_EXTRAS_CAPACITY]) != size:
            self._refuse(f"{size} bytes do not fit its header")

    def _refuse(self, reason: str) -> None:
        self.close()
        raise CorruptShardError(file=self.path, reason=reason)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _image_offset(extras_capacity: int) -> int:
    return PAGE_BYTES + _whole_pages(extras_capacity)
