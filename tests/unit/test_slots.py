"""Slots: a reader sees the old snapshot or the new one, whatever dies in between."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from relit_platform.errors import BudgetError, UsageError
from relit_platform.node.slots import Slot, SlotState, create_slot, slot_file_bytes
from relit_storage.errors import CorruptShardError

IMAGE_BYTES = 1 << 16


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "a.slot")
    create_slot(path, IMAGE_BYTES, 1000)
    return path


def fill(slot: Slot, step: int, commit: bool = True) -> None:
    slot.begin(generation=1, step=step, rank=0, world=2)
    slot.image[:] = bytes([step % 251]) * IMAGE_BYTES
    slot.set_extras(b'{"step":%d}' % step)
    if commit:
        slot.commit()


def test_a_new_slot_is_empty_and_reserved(path: str) -> None:
    header = Slot.open(path).info()
    assert header.state is SlotState.EMPTY and not header.pinned
    assert (header.image_bytes, header.extras_capacity) == (IMAGE_BYTES, 1000)
    stat = os.stat(path)
    assert stat.st_size == slot_file_bytes(IMAGE_BYTES, 1000) == stat.st_blocks * 512
    assert stat.st_mode & 0o777 == 0o600


def test_what_one_process_commits_another_mapping_reads(path: str) -> None:
    fill(Slot.open(path, prefault=True), 7)
    reader = Slot.open(path)
    header = reader.info()
    assert header.complete
    assert (header.generation, header.step, header.rank, header.world) == (1, 7, 0, 2)
    assert reader.read_extras() == b'{"step":7}'
    copy = bytearray(IMAGE_BYTES)
    reader.copy_image_into(memoryview(copy))
    assert copy == bytes([7]) * IMAGE_BYTES


def test_an_unfinished_snapshot_counts_for_nothing(path: str) -> None:
    slot = Slot.open(path)
    fill(slot, 7)
    fill(slot, 8, commit=False)
    reader = Slot.open(path)
    assert reader.info().state is SlotState.WRITING
    with pytest.raises(CorruptShardError, match="no complete snapshot"):
        reader.read_extras()
    fill(slot, 9)  # the owner goes on after an abandoned copy
    assert reader.info().step == 9


def test_a_read_that_was_overwritten_is_refused(path: str) -> None:
    slot = Slot.open(path)
    fill(slot, 7)
    before = slot.sequence()
    fill(slot, 8)
    with pytest.raises(CorruptShardError, match="overwritten"):
        slot.check_unchanged(before)


def test_a_pinned_slot_is_not_overwritten(path: str) -> None:
    slot = Slot.open(path)
    fill(slot, 7)
    slot.pin()
    with pytest.raises(UsageError, match="pinned"):
        slot.begin(1, 8, 0, 2)
    Slot.open(path).unpin()
    slot.begin(1, 8, 0, 2)


def test_misuse_is_an_error(path: str) -> None:
    slot = Slot.open(path)
    with pytest.raises(UsageError):
        slot.commit()
    slot.begin(1, 1, 0, 1)
    with pytest.raises(BudgetError):
        slot.set_extras(b"x" * 1001)
    with pytest.raises(FileExistsError):
        create_slot(path, 1, 1)
    assert os.listdir(os.path.dirname(path)) == ["a.slot"]


def test_close_while_views_are_alive(path: str) -> None:
    slot = Slot.open(path)
    image = slot.image
    slot.close()
    image[0] = 1


# Bytes 0-7 magic, 8-15 state, 32-63 geometry, 64-119 facts of the snapshot.
@pytest.mark.parametrize("at", [0, 9, 33, 41, 49, 57, 65, 73, 81, 89, 97, 105, 113])
def test_a_damaged_header_is_refused(path: str, at: int) -> None:
    fill(Slot.open(path), 7)
    with open(path, "r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 0x40]))
    with pytest.raises(CorruptShardError):
        Slot.open(path).info()


def test_a_truncated_file_is_refused(path: str) -> None:
    os.truncate(path, 4096)
    with pytest.raises(CorruptShardError, match="do not fit"):
        Slot.open(path)
    os.truncate(path, 10)
    with pytest.raises(CorruptShardError, match="too short"):
        Slot.open(path)


def test_concurrent_readers_never_see_a_mix(path: str) -> None:
    writer, reader = Slot.open(path), Slot.open(path)
    fill(writer, 1)
    stop = threading.Event()

    def write() -> None:
        step = 2
        while not stop.is_set():
            fill(writer, step)
            step += 1

    thread = threading.Thread(target=write)
    thread.start()
    copy, whole, torn = bytearray(IMAGE_BYTES), 0, 0
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        try:
            reader.copy_image_into(memoryview(copy))
        except CorruptShardError:
            torn += 1
            continue
        whole += 1
        assert copy.count(copy[0]) == IMAGE_BYTES
    stop.set()
    thread.join()
    assert whole > 0


def test_headers_are_of_one_moment(path: str) -> None:
    writer, reader, stop = Slot.open(path), Slot.open(path), threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            writer.begin(generation=number, step=number, rank=number, world=number)
            writer.commit()

    thread = threading.Thread(target=write)
    thread.start()
    complete = 0
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        header = reader.info()
        if header.complete:
            complete += 1
            assert header.generation == header.step == header.rank == header.world
    stop.set()
    thread.join()
    assert complete > 0


WRITER = """
import sys
from relit_platform.node.slots import Slot
slots, size, step = [Slot.open(p) for p in sys.argv[1:3]], int(sys.argv[3]), int(sys.argv[4])
print("ready", flush=True)
while True:
    slot = slots[step % 2]
    slot.begin(1, step, 0, 1)
    slot.image[:] = bytes([step % 251]) * size
    slot.set_extras(b'{"step":%d}' % step)
    slot.commit()
    step += 1
"""


def newest(paths: list[str]) -> list[int]:
    found = []
    for path in paths:
        slot = Slot.open(path)
        header = slot.info()
        if header.complete:
            copy = bytearray(IMAGE_BYTES)
            slot.copy_image_into(memoryview(copy))
            assert copy == bytes([header.step % 251]) * IMAGE_BYTES
            assert slot.read_extras() == b'{"step":%d}' % header.step
            found.append(header.step)
        slot.close()
    return found


def test_kill_matrix(tmp_path: Path) -> None:
    """SIGKILL at random moments: at least one of two slots is whole, and both tell the truth."""
    paths = [str(tmp_path / name) for name in ("a.slot", "b.slot")]
    for path in paths:
        create_slot(path, IMAGE_BYTES, 100)
    rng, step, torn = random.Random(3), 1, 0
    for _ in range(25):
        args = [sys.executable, "-c", WRITER, *paths, str(IMAGE_BYTES), str(step)]
        child = subprocess.Popen(args, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.002 + rng.random() * 0.01)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        found = newest(paths)
        assert found and max(found) >= step - 1
        torn += len(found) < 2
        step = max(found) + 1
    assert torn > 0, "no kill hit the middle of a copy: the test proves nothing"
