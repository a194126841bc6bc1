"""The trainers are killed 0 to 50 ms after a boundary: the step is committed all the same.

Two real processes fill their slots and ask for the persist; SIGKILL follows, before the agent has
heard of it or after, while it hashes, writes or publishes. The node commits, and a second life of
the run goes on with that step, bit for bit. 5 rounds, and 50 with RELIT_KILLS=50 (`make fuzz`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import stopped_run
import torch
from coordinator_harness import request
from stopped_run import WORLD, Life, state_of

from relit_platform.facts import RunHistory
from relit_storage.checkpoint.image import ImageLayout, TensorSpec

KILLS = int(os.environ.get("RELIT_KILLS", "5"))
LONGEST_S = 0.05
STEP = 10

# What a rank does at a boundary, without torch: fill the slot, flip its state, pin it, ask.
RANK = """
import sys
from relit_platform.node.slots import Slot
image = open(sys.argv[1], "rb").read()
rank, step, world = (int(arg) for arg in sys.argv[2:5])
path = input()
slot = Slot.open(path)
slot.begin(1, step, rank, world)
slot.image[:] = image
slot.set_extras(b'{"step": %d, "rank": %d}' % (step, rank))
slot.commit()
slot.pin()
print("asked", flush=True)
input()
"""


class Rank:
    """One trainer process and its slot."""

    def __init__(self, life: Life, image: Path, rank: int) -> None:
        self.rank, self.name = rank, f"w{rank}"
        args = [sys.executable, "-c", RANK, str(image), str(rank), str(STEP), str(WORLD)]
        self.process = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        life.keeper.hello(self.name, self.process.pid, epoch=1)
        self.path = life.keeper.open_slots(self.name, 2, image.stat().st_size, 1000)[0]

    def boundary(self) -> None:
        """Blocks until the slot is complete and pinned."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(self.path.encode() + b"\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"asked\n"

    def ask(self, life: Life) -> None:
        """The messages that the rank has sent, as they arrive."""
        life.coordinator.persisting(STEP, 1, self.rank, WORLD)
        life.keeper.persist(self.name, self.path, STEP, 1)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def images() -> Iterator[list[Path]]:
    """Each rank's share of the state, as it lies in a slot."""
    state = sorted(state_of(STEP).items())
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="relit-test-") as folder:
        files = []
        for rank in range(WORLD):
            share = state[rank::WORLD]
            layout = ImageLayout.plan([TensorSpec(n, "F32", tuple(t.shape)) for n, t in share], {})
            image = bytearray(layout.total_bytes)
            image[: layout.header_bytes] = layout.header
            for name, tensor in share:
                at = layout.offset(name)
                image[at : at + tensor.nbytes] = tensor.numpy().tobytes()
            files.append(Path(folder) / f"{rank}.image")
            files[-1].write_bytes(image)
        yield files


@pytest.mark.parametrize("number", range(KILLS))
def test_committed_all_the_same(images: list[Path], tmp_path: Path, number: int) -> None:
    delay_s = LONGEST_S * number / max(1, KILLS - 1)
    life = Life(tmp_path, epoch=1)
    ranks: list[Rank] = []
    try:
        for rank in range(WORLD):
            ranks.append(Rank(life, images[rank], rank))
        life.join(*(request(rank.name) for rank in ranks))
        for each in ranks:
            each.boundary()
        heard_first = number % 2 == 0
        if heard_first:
            for each in ranks:
                each.ask(life)
        time.sleep(delay_s)  # the moment of the kill is what is varied
        for each in ranks:
            each.kill()
        if not heard_first:
            for each in ranks:
                each.ask(life)
        life.settle(lambda: life.committed("disk") == STEP)
    finally:
        for each in ranks:
            each.kill()
        life.close()
    history = RunHistory(generation=1, last_row_step=STEP, saved_step=STEP)
    resumed = stopped_run.resume(tmp_path, history)
    assert (resumed.step, resumed.tier, resumed.refusals) == (STEP, "disk", [])
    assert resumed.tensors is not None
    for name, tensor in state_of(STEP).items():
        assert torch.equal(resumed.tensors[name], tensor), name
