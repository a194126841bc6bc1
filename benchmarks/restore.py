"""How long a rank takes to have its state back, from shared memory and from disk.

    python benchmarks/restore.py [--rounds N] [--layers N]

The state is that of benchmarks/checkpoint.py, GPT-2's with AdamW in one shard, registered as one
module. Ours is what a rank does that is given a restore plan: `load_plan` reads, checks and fills
the registered tensors, in several threads, and `restore` loads them. Beside it, in rotating order,
by one thread unless said otherwise: for memory, copying the state from one place into another that
is there already; for disk, reading the file's bytes by direct I/O into memory that is there, 16 MiB
at a time, two at a time, with nothing checked and nothing copied on; and torch.load, the peer that
people use, of the same state. Each way to read has a file of its own, for the disk may remember
what was read last, and all are put out of the page cache before each reading.

    restore_memory_vs_copy    restore_disk_vs_read    restore_disk_vs_torch_load
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from checkpoint import gpt2_state, machine
from torch import Tensor, nn

from relit_platform.facts import RestorePlan, ShardSource
from relit_platform.node.slots import Slot, create_slot
from relit_platform.worker.filling import rooms
from relit_platform.worker.restore import load_plan
from relit_platform.worker.snapshot import Snapshotter
from relit_platform.worker.state_tree import flatten, restore
from relit_storage.checkpoint.checksum import checksum
from relit_storage.checkpoint.shard import write_shard

CHUNK_BYTES = 16 << 20
STREAMS = 2
Row = dict[str, Any]


class Registered(nn.Module):
    """The tensors of a state as one object that a run can register."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_buffer(name.replace(".", "-"), tensor)


def snapshot(folder: str, objects: dict[str, Any]) -> str:
    """Their state in one slot; its path."""

    def open_slots(count: int, image_bytes: int, extras: int) -> Sequence[str]:
        paths = [f"{folder}/{number}.slot" for number in range(count)]
        for path in paths:
            create_slot(path, image_bytes, extras)
        return paths

    tensors, skeleton = flatten(objects)
    snapshotter = Snapshotter("bench", open_slots)
    taken = snapshotter.take(
        step=1,
        generation=1,
        rank=0,
        world=1,
        tensors=tensors,
        extras={"step": 1, "objects": skeleton},
    )
    snapshotter.close()
    assert taken.path is not None, taken.reason
    return taken.path


def plans(path: str, folder: str) -> dict[str, RestorePlan]:
    """The slot, and the same on disk, as the planner names them."""
    slot = Slot.open(path)
    file, beside = f"{folder}/shard", f"{folder}/extras"
    ref = write_shard(file, slot.image, CHUNK_BYTES)
    extras = slot.read_extras()
    Path(beside).write_bytes(extras)
    slot.close()
    memory = ShardSource(
        rank=0,
        tier="memory",
        node_id="bench",
        location=path,
        extras_location="",
        num_bytes=ref.num_bytes,
        chunk_bytes=0,
        checksums=(),
        extras_bytes=len(extras),
        extras_checksum="",
    )
    disk = ShardSource(
        rank=0,
        tier="disk",
        node_id="bench",
        location=file,
        extras_location=beside,
        num_bytes=ref.num_bytes,
        chunk_bytes=ref.chunk_bytes,
        checksums=ref.checksums,
        extras_bytes=len(extras),
        extras_checksum=checksum(extras),
    )
    return {
        shard.tier: RestorePlan(step=1, generation=1, world=1, tier=shard.tier, shards=(shard,))
        for shard in (memory, disk)
    }


def restored(plan: RestorePlan, objects: dict[str, Any]) -> None:
    """Into what is registered, as worker/member.py does it."""

    def there(extras: Any, shapes: Any) -> dict[str, Tensor]:
        return rooms(objects, shapes, extras["objects"])

    tensors, extras = load_plan(plan, rooms=there)
    restore(objects, tensors, extras[0]["objects"], give=True)


def direct_read(path: str, room: mmap.mmap) -> None:
    """Every byte of the file, past the page cache, into memory that is there."""
    fd, size = os.open(path, os.O_RDONLY | os.O_DIRECT), os.path.getsize(path)
    view = memoryview(room)

    def part(begin: int) -> None:
        os.preadv(fd, [view[begin : min(begin + CHUNK_BYTES, len(view))]], begin)

    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(part, range(0, size, CHUNK_BYTES)))
    os.close(fd)


def cold(path: str) -> None:
    """Put a file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def measure(folder: str, shm: str, rounds: int, layers: int) -> dict[str, float]:
    """Median seconds by what was done."""
    torch.set_num_threads(1)
    state = gpt2_state(layers)
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    objects = {"state": Registered(live)}
    ours = plans(snapshot(shm, {"state": Registered(state)}), folder)
    shutil.copyfile(f"{folder}/shard", f"{folder}/peer")
    torch.save(state, f"{folder}/torch.pt")
    room = mmap.mmap(-1, -(-os.path.getsize(f"{folder}/shard") // CHUNK_BYTES) * CHUNK_BYTES)
    room[:] = bytes(len(room))

    def torch_load() -> None:
        loaded = torch.load(f"{folder}/torch.pt", weights_only=True)
        torch._foreach_copy_(list(live.values()), list(loaded.values()))

    ways: dict[str, Callable[[], None]] = {
        "memory": lambda: restored(ours["memory"], objects),
        "copy": lambda: torch._foreach_copy_(list(live.values()), list(state.values())),
        "disk": lambda: restored(ours["disk"], objects),
        "read": lambda: direct_read(f"{folder}/peer", room),
        "torch.load": torch_load,
    }
    took: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for file in ("shard", "peer", "torch.pt"):
                cold(f"{folder}/{file}")
            began_s = time.perf_counter()
            ways[name]()
            if number:  # the first of each is to warm up
                took[name].append(time.perf_counter() - began_s)
    if any(not torch.equal(live[name], tensor) for name, tensor in state.items()):
        raise RuntimeError("what was restored is not what was saved")
    return {name: statistics.median(its) for name, its in took.items()}


def table_rows(took: dict[str, float]) -> list[Row]:
    """The rows of the result table; every ratio is above 1 where ours is faster."""

    def row(name: str, ours: str, peer: str, peer_name: str, floor: float | None) -> Row:
        return {
            "name": name,
            "ours": round(took[ours], 4),
            "peer": round(took[peer], 4),
            "peer_name": peer_name,
            "ratio": round(took[peer] / took[ours], 3),
            "floor": floor,
            "unit": "s",
            "command": "python benchmarks/restore.py",
            "machine": machine(),
        }

    return [
        row("restore_memory_vs_copy", "memory", "copy", "a plain copy", 0.5),
        row("restore_disk_vs_read", "disk", "read", "direct I/O, two streams", 0.8),
        row("restore_disk_vs_torch_load", "disk", "torch.load", "torch.load", None),
    ]


def main() -> int:
    """Measure and print the rows; 1 if one is below its floor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5, help="restores of each kind")
    parser.add_argument("--layers", type=int, default=12, help="of GPT-2; 12 make 1.49 GB")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="relit-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="relit-bench-", dir="/dev/shm") as shm,
    ):
        table = table_rows(measure(folder, shm, options.rounds, options.layers))
    print(json.dumps(table, indent=1))
    return 0 if all(r["floor"] is None or r["ratio"] >= r["floor"] for r in table) else 1


if __name__ == "__main__":
    sys.exit(main())
