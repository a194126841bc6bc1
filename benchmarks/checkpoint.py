"""What a checkpoint costs the training loop and when it is durable, against PyTorch's own.

    python benchmarks/checkpoint.py [--rounds N] [--layers N]

The state is GPT-2's with AdamW: 12 layers make 592 tensors, 1.49 GB. One process trains; every
round takes one checkpoint by each method, in rotating order, so that a busy machine hurts all
alike. Ours is the path of a real run: a Snapshotter's copy into the agent's slot, made beside the
loop, and the persist and publish of a NodeKeeper in a process of its own. Two loops: `host` is many
tiny operations under Python's lock, as a process that feeds a GPU has, `cpu` keeps both cores busy.
Both are one forward and backward pass of STEP_S seconds after another; at the end of each ours
settles, that is, waits for what is left of the copy, as run.backward does. The snapshots that a run
copies at the boundary to look whether the state stands still (1, 2, 4, 8, ...) are the row `look`.

    stall    seconds that the loop stands still: at the boundary, and when it settles
    durable  seconds from the call until file, directory and manifest are synced
    lost     stall + iterations not done until it is durable, in seconds of undisturbed work:
             durable - iterations done / their undisturbed rate
    cpu      CPU seconds of all processes concerned, less what as many iterations take undisturbed,
             in all threads of the loop

Figures are medians over the rounds; rows go to stdout, what each method took to stderr. PyTorch's
savers sync their files; `default` is dcp.async_save as it comes, `tuned` keeps its stager, in a
thread and in a process, whichever is better in the figure at hand. Prior measurements by the same
method: docs/log.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from relit_platform.facts import ShardPersisted
from relit_platform.node.keeper import NodeKeeper
from relit_platform.run_config import CheckpointConfig
from relit_platform.worker.ownership import owned
from relit_platform.worker.snapshot import Snapshotter
from relit_storage.checkpoint.image import TensorSpec
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.stores.local import LocalStore

RUN_ID = f"bench-ckpt-{os.getpid()}"
TICKS = os.sysconf("SC_CLK_TCK")
PART_BYTES = 16 << 20
STEP_S = 0.5  # of one forward and backward pass; GPT-2's on a GPU
LOOKS = 8  # the next look after this many snapshots is the 16th
TUNED = ("dcp thread", "dcp process")
ASYNC = ("dcp default", *TUNED)
Done = Callable[[], bool]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Taken:
    """One checkpoint, in seconds; see the module's text."""

    stall: float
    durable: float
    lost: float
    cpu: float


def gpt2_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Parameters, and AdamW's two moments and step of each."""
    wide = {"attn.weight": (2304, 768), "attn.bias": (2304,), "proj.weight": (768, 768)}
    wide |= {"proj.bias": (768,), "fc.weight": (3072, 768), "fc.bias": (3072,)}
    wide |= {"out.weight": (768, 3072), "out.bias": (768,)}
    wide |= {f"{norm}.{part}": (768,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
    shapes: dict[str, tuple[int, ...]] = {"wte": (50257, 768), "wpe": (1024, 768)}
    shapes |= {f"ln_f.{part}": (768,) for part in ("weight", "bias")}
    shapes |= {f"h.{n}.{name}": shape for n in range(layers) for name, shape in wide.items()}
    state = {f"model.{name}": shape for name, shape in shapes.items()}
    for name, shape in shapes.items():
        state |= {f"optim.{name}.{part}": shape for part in ("exp_avg", "exp_avg_sq")}
        state[f"optim.{name}.step"] = ()
    return state


def gpt2_state(layers: int) -> dict[str, Tensor]:
    """Such a state; float32, on the CPU."""
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in gpt2_shapes(layers).items()}


def _agent(folder: str, pipe: Any) -> None:
    """The agent's process: a keeper; says "durable" once a step is published."""

    def report(fact: object) -> None:
        if isinstance(fact, ShardPersisted):
            ids = {"config": "c", "code": "c", "data": "d"}
            manifest = Manifest.from_shards(
                [asdict(fact)], run_id=RUN_ID, epoch=1, cursor={}, ids=ids, created_at_s=fact.at_s
            )
            keeper.publish(fact.step, fact.generation, manifest.to_bytes())
            pipe.send(("durable", fact.step))

    config = CheckpointConfig(disk_dir=f"{folder}/disk", memory_budget_bytes=16 << 30)
    store = LocalStore(f"{folder}/store")
    keeper = NodeKeeper("bench", RUN_ID, config, store, report, time.time)
    keeper.start()
    try:
        while True:
            method, args = pipe.recv()
            if method == "close":
                return
            answer = getattr(keeper, method)(*args)
            if method in ("hello", "open_slots"):
                pipe.send(answer)
    finally:
        keeper.close(remove_disk=True)


class Ours:
    """A rank's side: what worker.recorder does at a boundary that is due on disk."""

    def __init__(self, folder: str, state: dict[str, Tensor]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self.process = context.Process(target=_agent, args=(folder, there))
        self.process.start()
        self._worker = f"bench-{os.getpid()}"
        self._call("hello", self._worker, os.getpid(), 1)
        self._snapshotter = Snapshotter(
            self._worker,
            lambda *slots: self._call("open_slots", self._worker, *slots),
            staging="overlap",
        )
        self._state = state
        self._still = frozenset(state)
        self._step = 0

    def save(self, folder: str) -> Done:
        """One snapshot, and its persist in the agent's process."""
        del folder  # the agent's own
        self.snapshot(self._still, self._persist, self._announce)
        return lambda: bool(self._pipe.poll()) and self._pipe.recv() == ("durable", self._step)

    def settle(self) -> None:
        """At the end of a backward pass."""
        outcome = self._snapshotter.settle()
        assert outcome is None or outcome.path, outcome
        assert not self._snapshotter.moving, self._snapshotter.moving

    def snapshot(
        self,
        still: frozenset[str] = frozenset(),
        whole: Callable[[str], object] = len,
        begun: Callable[[str], object] = len,
    ) -> None:
        """Into shared memory; `still` beside the loop."""
        self._step += 1
        taken = self._snapshotter.take(
            step=self._step,
            generation=1,
            rank=0,
            world=1,
            tensors=self._state,
            extras={},
            still=still,
            on_begun=begun,
            on_whole=whole,
        )
        assert taken.path is not None, taken.reason

    def look(self) -> None:
        """A snapshot and its end; the 1st, 2nd, 4th and 8th are copied at once and compared."""
        self.snapshot(self._still)
        self.settle()

    def _persist(self, path: str) -> None:
        self._snapshotter.pin(path)
        self._pipe.send(("persist", (self._worker, path, self._step, 1)))

    def _announce(self, path: str) -> None:
        self._pipe.send(("persist_growing", (self._worker, path, self._step, 1)))

    def close(self) -> None:
        """End the agent; its files go."""
        self._pipe.send(("close", ()))
        self.process.join()
        self._snapshotter.close()

    def _call(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        return self._pipe.recv()


def peers(state: dict[str, Tensor]) -> dict[str, Callable[[str], Done]]:
    """The savers of torch.distributed.checkpoint; each answers whether its last save is done."""
    thread = DefaultStager(StagingOptions(False, False, False, False))
    process = DefaultStager(StagingOptions(False, True, False, False))

    def tuned(folder: str, stager: DefaultStager, kind: AsyncCheckpointerType) -> Done:
        future: Any = async_save(
            state,
            storage_writer=FileSystemWriter(folder, thread_count=1),
            async_stager=stager,
            async_checkpointer_type=kind,
        )
        return lambda: bool(future.done())

    def default(folder: str) -> Done:
        future: Any = async_save(state, checkpoint_id=folder)
        return lambda: bool(future.done())

    return {
        "dcp default": default,
        "dcp thread": lambda folder: tuned(folder, thread, AsyncCheckpointerType.THREAD),
        "dcp process": lambda folder: tuned(folder, process, AsyncCheckpointerType.PROCESS),
    }


def host_loop() -> Callable[[], object]:
    """Many tiny operations: the interpreter's lock decides how fast it goes."""
    tiny = [torch.randn(64) for _ in range(8)]

    def iterate() -> object:
        x = tiny[0]
        for other in tiny:
            x = x * 0.9 + other
        return sum({number: number * 3 for number in range(60)}.values())

    return iterate


def cpu_loop() -> Callable[[], object]:
    """A small network, forward and backward."""
    data = torch.randn(384, 384)
    model = nn.Sequential(nn.Linear(384, 384), nn.GELU(), nn.Linear(384, 384))
    return lambda: torch.autograd.backward(model(data).sum())


def undisturbed(iterate: Callable[[], object], seconds: float = 1.5) -> tuple[float, float]:
    """Iterations per second, and CPU seconds of this process per iteration."""
    count, began_s, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began_s < seconds:
        iterate()
        count += 1
    return count / (time.perf_counter() - began_s), (time.process_time() - cpu) / count


def cpu_s() -> float:
    """CPU seconds of this process and all below it, ended ones that were waited for included."""
    total, todo = 0.0, [os.getpid()]
    while todo:
        pid = todo.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            todo += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except OSError:
            continue
        total += sum(map(int, fields[11:13])) / TICKS
    return total


def take(
    save: Callable[[str], Done],
    folder: str,
    iterate: Callable[[], object],
    settle: Callable[[], object] = lambda: None,
) -> Taken:
    """One checkpoint while the loop goes on."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    rate, iteration_cpu_s = undisturbed(iterate)
    cpu, began_s = cpu_s(), time.perf_counter()
    done = save(folder)
    stall = time.perf_counter() - began_s
    count = 0
    step_end_s = time.perf_counter() + STEP_S
    while not done():
        iterate()
        count += 1
        now_s = time.perf_counter()
        if now_s >= step_end_s:
            settle()
            waited_s = time.perf_counter() - now_s
            stall += waited_s
            step_end_s = now_s + waited_s + STEP_S
    durable = time.perf_counter() - began_s
    settle()
    lost = max(stall, durable - count / rate)
    return Taken(stall, durable, lost, max(0.0, cpu_s() - cpu - count * iteration_cpu_s))


def direct_write_s(path: str, state: dict[str, Tensor]) -> float:
    """The floor: as many bytes as the state has, by direct I/O out of standing memory, synced."""
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    source = torch.zeros(PART_BYTES + 4096, dtype=torch.uint8)
    begin = -source.data_ptr() % 4096
    part: Any = source[begin : begin + PART_BYTES].numpy()
    began_s = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
    for _ in range(num_bytes // PART_BYTES):
        os.write(fd, part)
    os.fsync(fd)
    os.close(fd)
    took_s = time.perf_counter() - began_s
    os.unlink(path)
    return took_s


def copy_s(state: dict[str, Tensor], kept: list[Tensor]) -> float:
    """The floor of any copy that blocks: the state into memory that is there already."""
    began_s = time.perf_counter()
    torch._foreach_copy_(kept, list(state.values()))
    return time.perf_counter() - began_s


def measure(folder: str, loop: str, rounds: int, layers: int) -> tuple[dict[str, Taken], Row]:
    """Medians by method, and the floors and the snapshot alone."""
    torch.set_num_threads(1 if loop == "host" else 2)
    iterate = host_loop() if loop == "host" else cpu_loop()
    state = gpt2_state(layers)
    ours = Ours(folder, state)
    methods = {"ours": ours.save, **peers(state)}
    kept = [torch.zeros_like(tensor) for tensor in state.values()]
    taken: dict[str, list[Taken]] = defaultdict(list)
    floors: dict[str, list[float]] = defaultdict(list)
    try:
        for number in range(1, LOOKS + 1):
            began_s = time.perf_counter()
            ours.look()
            if number & (number - 1) == 0:
                floors["look"].append(time.perf_counter() - began_s)
        for number in range(rounds + 1):
            names = list(methods)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                settle = ours.settle if name == "ours" else lambda: None
                result = take(methods[name], f"{folder}/peer", iterate, settle)
                if number:  # the first of each is to warm up
                    taken[name].append(result)
            floors["write"].append(direct_write_s(f"{folder}/floor", state))
            floors["copy"].append(copy_s(state, kept))
            began_s = time.perf_counter()
            ours.snapshot()
            floors["snapshot"].append(time.perf_counter() - began_s)
    finally:
        ours.close()
    medians = {name: _median(its) for name, its in taken.items()}
    for name, it in medians.items():
        print(f"{loop} {name}: {it}", file=sys.stderr)
    return medians, {name: statistics.median(its[1:]) for name, its in floors.items()}


def _median(its: list[Taken]) -> Taken:
    fields = ("stall", "durable", "lost", "cpu")
    return Taken(*(statistics.median(getattr(one, field) for one in its) for field in fields))


def table_rows(loop: str, took: dict[str, Taken], floors: Row) -> list[Row]:
    """The rows of one loop; every ratio is above 1 where ours is better. Floors are the bars."""
    ours = took["ours"]

    def best(names: tuple[str, ...], what: str) -> tuple[float, str]:
        return min((getattr(took[name], what), name) for name in names)

    def row(name: str, mine: float, other: tuple[float, str], floor: float | None) -> Row:
        return {
            "name": f"{name}_{loop}",
            "ours": round(mine, 4),
            "peer": round(other[0], 4),
            "peer_name": other[1],
            "ratio": round(other[0] / max(mine, 1e-9), 3),
            "floor": floor,
            "unit": "s",
            "command": "python benchmarks/checkpoint.py",
            "machine": machine(),
        }

    return [
        row("stall_vs_dcp_default", ours.stall, best(("dcp default",), "stall"), 15.0),
        row("stall_vs_dcp_tuned", ours.stall, best(TUNED, "stall"), 4.0),
        row("snapshot_vs_copy", floors["snapshot"], (floors["copy"], "a plain copy"), 1 / 1.2),
        row("look_vs_copy", floors["look"], (floors["copy"], "a plain copy"), None),
        row("lost_vs_best_peer", ours.lost, best(ASYNC, "lost"), 4 / 3 if loop == "host" else 2.0),
        row("durable_vs_best_peer", ours.durable, best(ASYNC, "durable"), 2.0),
        row("durable_vs_direct_write", ours.durable, (floors["write"], "direct I/O"), 0.8),
        row("save_cpu_vs_best_peer", ours.cpu, best(ASYNC, "cpu"), 4.0),
    ]


def share_row() -> Row:
    """Bytes that each of two ranks stages of a replicated state, against one rank alone."""
    shapes = gpt2_shapes(12)
    specs = [TensorSpec(name, "F32", shape) for name, shape in shapes.items()]
    shares = [sum(spec.num_bytes for spec in owned(specs, rank, 2)) for rank in range(2)]
    whole = sum(spec.num_bytes for spec in specs)
    return {
        "name": "staged_bytes_of_two_ranks",
        "ours": max(shares),
        "peer": whole,
        "peer_name": "one rank's",
        "ratio": round(whole / max(shares), 3),
        "floor": round(1 / 0.55, 3),
        "unit": "bytes",
        "command": "python benchmarks/checkpoint.py",
        "machine": machine(),
    }


def machine() -> str:
    """What the figures were measured on; no host name."""
    load = f"load {os.getloadavg()[0]:.1f} after"
    return f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {load}"


def main() -> int:
    """Measure both loops and print the rows; 1 if one is below its floor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3, help="checkpoints of each method")
    parser.add_argument("--layers", type=int, default=12, help="of GPT-2; 12 make 1.49 GB")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="relit-bench-") as folder:
        init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        table = [share_row()]
        for loop in ("host", "cpu"):
            took, floors = measure(folder, loop, options.rounds, options.layers)
            table += table_rows(loop, took, floors)
        destroy_process_group()
    print(json.dumps(table, indent=1))
    return 0 if all(r["floor"] is None or r["ratio"] >= r["floor"] for r in table) else 1


if __name__ == "__main__":
    sys.exit(main())
