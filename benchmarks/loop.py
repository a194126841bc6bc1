"""The whole step of a rank against a plain DistributedDataParallel loop: what relit costs.

    python benchmarks/loop.py [--seconds N] [--profile]

Two ranks train the demo's GPT. Ours is the path of a real run: loader, reseed, heartbeat, gradient
sync, boundary, metric rows, a snapshot into shared memory at every step and a persist to disk at
every 50th, by a real NodeKeeper in a process of its own. Only Ray is left out: agent and manager
are reached through pipes. The peer reads the same batches with the same loader and keeps nothing:
no checkpoints, no rows, no heartbeat. Both loops live in the same two processes and take turns.

Three rows, all of rank 0: the ratio of the medians over all steps; `every_step_throughput`, the
median over the rounds of the ratio of two whole turns, which also holds what does not happen at
every step (persists, sending rows, preparing batches); and the same of the process's CPU time,
which a busy machine disturbs least.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import multiprocessing
import os
import pstats
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from gradient_sync import HOST, PEER, WORLD, agreed_rounds, machine
from torch._C._distributed_c10d import TCPStore
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel

from relit.examples.gpt import DEFAULTS, GPT, SHAPE, learning_rate
from relit_platform.facts import Assignment, JoinRequest, RowBatch, StateSource
from relit_platform.node.keeper import NodeKeeper
from relit_platform.run_config import CheckpointConfig, RunConfig
from relit_platform.worker.context import RankContext
from relit_platform.worker.drill import Drill
from relit_platform.worker.member import Member
from relit_platform.worker.process_group import open_rendezvous
from relit_platform.worker.recorder import Recorder
from relit_storage.data.corpus import stdlib_paths
from relit_storage.data.loader import Loader
from relit_storage.data.token_writing import prepare_text
from relit_storage.data.tokens import TokenDataset
from relit_storage.stores.local import LocalStore

TURN = 50  # steps: one persist in each turn of ours
STEPS = 100_000  # of the run as it was asked for; the benchmark ends before
GLOBAL_BATCH = 32
CORPUS_FILES = 200
WRITTEN_AFTER_S = 2.5
ROUNDS = (6, 40)  # at least and at most; a round is one turn of each loop
RUN_ID = f"bench-{os.getpid()}"
NUMBERS = itertools.count(1)
Step = Callable[[], None]


class Control:
    """The parent's side: a keeper for both ranks, and a manager that only counts rows."""

    def __init__(self, config: RunConfig) -> None:
        self.keeper = NodeKeeper(
            node_id="bench",
            run_id=config.run_id,
            config=config.checkpoint,
            store=LocalStore(config.store),
            report=lambda fact: None,
            clock=time.time,
        )
        self.joined: dict[int, JoinRequest] = {}
        self.all_here = threading.Barrier(WORLD)
        self.row_steps: deque[tuple[float, int]] = deque()
        self.written = 0

    def serve(self, rank: int, pipe: Any) -> None:
        """Answer one rank's calls, in a thread, until it hangs up."""
        while True:
            try:
                number, target, method, args = pipe.recv()
            except (EOFError, ConnectionError):
                return
            on = self.keeper if target == "agent" else self
            place = (rank,) if target == "manager" else ()
            pipe.send((number, getattr(on, method)(*place, *args)))

    def join(self, rank: int, request: JoinRequest, wait_s: float) -> Assignment:
        """A place in generation 1, once both have asked."""
        self.joined[rank] = request
        self.all_here.wait(60)
        return Assignment(
            generation=1,
            epoch=1,
            rank=rank,
            world=WORLD,
            members=tuple(self.joined[r].worker_id for r in range(WORLD)),
            endpoint=self.joined[0].endpoint,
            source=StateSource(kind="fresh", step=0),
        )

    def rows(self, rank: int, batch: RowBatch) -> int:
        """Rows are taken to be written WRITTEN_AFTER_S later, as by a supervisor."""
        if batch.rows:
            self.row_steps.append((time.monotonic(), int(batch.rows[-1]["step"])))
        while self.row_steps and time.monotonic() - self.row_steps[0][0] > WRITTEN_AFTER_S:
            self.written = self.row_steps.popleft()[1]
        return self.written

    def fact(self, rank: int, fact: object) -> None:
        """Nothing is logged here."""

    def persisting(self, rank: int, *what: Any) -> None:
        """Nothing is committed here."""


class PipeLink:
    """What an ActorLink is to a rank, over a pipe."""

    def __init__(self, pipe: Any, target: str, answers: dict[int, Any]) -> None:
        self._pipe = pipe
        self._target = target
        self._answers = answers  # of both links over one pipe, by the call's number

    def call(self, method: str, *args: Any, timeout_s: float = 30.0) -> Any:
        number = self.send(method, *args)
        while number not in self._answers:
            self._receive()
        return self._answers.pop(number)

    def send(self, method: str, *args: Any) -> int:
        number = next(NUMBERS)
        self._pipe.send((number, self._target, method, args))
        return number

    def answered(self, number: int) -> tuple[bool, Any]:
        while self._pipe.poll():
            self._receive()
        over = number in self._answers
        answer = self._answers.get(number)
        if over:
            self._answers.clear()  # of calls that nobody waits for
        return over, answer

    def _receive(self) -> None:
        number, answer = self._pipe.recv()
        self._answers[number] = answer


class PipeManager:
    """What a ManagerClient is to a rank."""

    def __init__(self, link: PipeLink) -> None:
        self.link = link

    def join(self, request: JoinRequest, wait_s: float = 5.0) -> Assignment:
        reply: Assignment = self.link.call("join", request, wait_s)
        return reply

    def lost(self, generation: int, wait_s: float = 1.0) -> bool:
        return False


def _context(config: RunConfig, pipe: Any) -> RankContext:
    """As worker.entry builds it, with pipes for actors."""
    answers: dict[int, Any] = {}
    agent = PipeLink(pipe, "agent", answers)
    manager = PipeManager(PipeLink(pipe, "manager", answers))
    worker_id = f"bench-{os.getpid()}"
    paths = agent.call("hello", worker_id, os.getpid(), 1)
    recorder = Recorder(
        config=config,
        worker_id=worker_id,
        store=LocalStore(config.store),
        agent=agent,  # type: ignore[arg-type]
        manager=manager.link,  # type: ignore[arg-type]
        heartbeat_path=paths.heartbeat_path,
        control_path=paths.control_path,
    )
    member = Member(
        config=config,
        worker_id=worker_id,
        epoch=1,
        node_id="bench",
        pid=os.getpid(),
        host=HOST,
        manager=manager,  # type: ignore[arg-type]
        recorder=recorder,
    )
    drill = Drill((), config.checkpoint.disk_dir)
    recorder.drill = drill
    device = torch.device("cpu")
    return RankContext(member=member, recorder=recorder, drill=drill, seed=0, device=device)


def _model() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(**{name: DEFAULTS[name] for name in SHAPE})
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)


def _ours(run: RankContext, data: TokenDataset) -> Step:
    """The body of relit.examples.gpt.train, one step at a time."""
    model, optimizer = _model()
    run.register(model=model, optimizer=optimizer)
    batches: Iterator[dict[str, torch.Tensor]] = run.batches(
        data, global_batch=GLOBAL_BATCH, steps=STEPS
    )

    def step() -> None:
        batch = next(batches)  # the boundary of the step before is in here
        optimizer.param_groups[0]["lr"] = learning_rate(run.step_no, DEFAULTS | {"steps": STEPS})
        loss = model.loss(batch["x"], batch["y"])
        run.backward(loss)
        run.step(optimizer, loss=loss)

    return step


def _peer(rank: int, store: Any, data: TokenDataset) -> Step:
    """The same loop as anybody would write it."""
    model, optimizer = _model()
    init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    loader = Loader(data, global_batch=GLOBAL_BATCH, seed=0, steps=STEPS)
    done = 0

    def step() -> None:
        nonlocal done
        (share,) = loader.micro_batches(done, rank, WORLD)
        x, y = torch.from_numpy(share["x"]), torch.from_numpy(share["y"])
        optimizer.param_groups[0]["lr"] = learning_rate(done, DEFAULTS | {"steps": STEPS})
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(wrapped(x).flatten(0, 1), y.flatten())
        float(loss.detach())
        torch.autograd.backward(loss)
        optimizer.step()
        done += 1

    return step


def _rank(
    rank: int, config: RunConfig, port: int, pipe: Any, answers: Any, seconds: float, profile: bool
) -> None:
    """One process: both loops by turns; rank 0 answers with every step's seconds."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore(HOST, port, is_master=False)
    data = TokenDataset.open(config.config["data"])
    loops = {"ours": _ours(_context(config, pipe), data), "peer": _peer(rank, store, data)}
    turns: dict[str, list[list[float]]] = {
        name: [] for loop in loops for name in (loop, f"{loop}_cpu")
    }
    profiler = cProfile.Profile()

    def turn(name: str) -> list[float]:
        return [_timed(loops[name]) for _ in range(TURN)]

    began_s = time.monotonic()
    for name in loops:  # to warm up
        turn(name)
    for number in range(agreed_rounds(seconds / (time.monotonic() - began_s), *ROUNDS)):
        for name in sorted(loops, reverse=bool(number % 2)):
            if profile and name == "ours":
                profiler.enable()
            cpu_s = time.process_time()
            turns[name].append(turn(name))
            turns[f"{name}_cpu"].append([time.process_time() - cpu_s])
            profiler.disable()
    if rank == 0 and profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(45)
    if rank == 0:
        answers.put(turns)
    threading.Event().wait()  # until the parent ends both: nobody misses a peer


def _timed(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(seconds: float, profile: bool = False) -> dict[str, list[list[float]]]:
    """Seconds of every step of rank 0, by loop and turn."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory(prefix="relit-bench-") as folder:
        config = _config(Path(folder))
        files = stdlib_paths()[:CORPUS_FILES]
        prepare_text(files, config.config["data"], block_len=64, rows_per_group=1024)
        control = Control(config)
        control.keeper.start()
        store, (_, port) = open_rendezvous(HOST)
        ranks = []
        for rank in range(WORLD):
            here, there = context.Pipe()
            threading.Thread(target=control.serve, args=(rank, here), daemon=True).start()
            args = (rank, config, port, there, answers, seconds, profile)
            ranks.append(context.Process(target=_rank, args=args))
        try:
            for process in ranks:
                process.start()
            return _answer(answers, ranks)
        finally:
            for process in ranks:
                process.kill()
                process.join()
            control.keeper.close(remove_disk=True)
            del store


def _answer(answers: Any, ranks: list[Any]) -> dict[str, list[list[float]]]:
    """What rank 0 measured; RuntimeError once a rank has ended without."""
    while True:
        try:
            turns: dict[str, list[list[float]]] = answers.get(timeout=1.0)
            return turns
        except queue.Empty:
            codes = [process.exitcode for process in ranks]
            if any(code is not None for code in codes):
                raise RuntimeError(f"a rank ended early, exit codes {codes}") from None


def _config(root: Path) -> RunConfig:
    """A run with the default cadence: memory at every step, disk at every 50th."""
    return RunConfig(
        run_id=RUN_ID,
        name="bench",
        experiment="bench",
        store=str(root / "store"),
        run_key="bench",
        entry="",
        code_key="",
        code_sha="",
        config={"data": str(root / "data")},
        checkpoint=CheckpointConfig(disk_dir=str(root / "disk")),
    )


def table_rows(turns: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """The rows of the result table; ratio is above 1 where ours is faster, or takes less CPU."""
    steps = {name: statistics.median(chain.from_iterable(its)) for name, its in turns.items()}
    totals = {name: [sum(turn) for turn in its] for name, its in turns.items()}
    whole = {name: statistics.median(its) / TURN for name, its in totals.items()}

    def paired(suffix: str) -> float:
        pairs = zip(totals["ours" + suffix], totals["peer" + suffix], strict=True)
        return statistics.median(peer / ours for ours, peer in pairs)

    return [
        _row(
            "throughput_full_vs_ddp",
            1 / steps["ours"],
            1 / steps["peer"],
            steps["peer"] / steps["ours"],
            "steps/s",
        ),
        _row(
            "every_step_throughput",
            1 / whole["ours"],
            1 / whole["peer"],
            paired(""),
            "steps/s",
            0.97,
        ),
        _row(
            "cpu_full_vs_ddp",
            whole["ours_cpu"] * 1e3,
            whole["peer_cpu"] * 1e3,
            paired("_cpu"),
            "CPU ms/step",
        ),
    ]


def _row(
    name: str, ours: float, peer: float, ratio: float, unit: str, floor: float | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "ours": round(ours, 2),
        "peer": round(peer, 2),
        "peer_name": f"{PEER}, no checkpoints",
        "ratio": round(ratio, 4),
        "floor": floor,
        "unit": unit,
        "command": "python benchmarks/loop.py",
        "machine": machine(),
    }


def main() -> int:
    """Measure and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure")
    parser.add_argument("--profile", action="store_true", help="cProfile of ours on stderr")
    options = parser.parse_args()
    table = table_rows(measure(options.seconds, options.profile))
    print(json.dumps(table, indent=1))
    return 0 if all(r["floor"] is None or r["ratio"] >= r["floor"] for r in table) else 1


if __name__ == "__main__":
    sys.exit(main())
