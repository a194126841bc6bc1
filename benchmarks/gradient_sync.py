"""Our gradient sync against DistributedDataParallel: two gloo processes, one thread each.

    python benchmarks/gradient_sync.py [--seconds N] [--case NAME] [--bucket-mib N] [--noise]

Both loops run in the same two processes and take turns in short blocks, so that a busy machine
hurts both alike; the figures are medians over all timed steps of rank 0. Ours carries the
float64 control vector of a real step, the peer carries nothing extra. Prints a JSON list of rows
{name, ours, peer, peer_name, ratio, floor, unit, command, machine}; ratio is the throughput of
ours over the peer's, floor the least that is accepted. On stderr: CPU time per step of rank 0, and
the wall time that the fastest fifth of its steps took at most, which a busy machine disturbs less.
`--noise` runs the peer in both places: how far its ratio is from 1 is what the machine adds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed import broadcast, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

from relit.examples.gpt import GPT
from relit_platform.facts import Assignment, StateSource
from relit_platform.worker.gradient_sync import BUCKET_BYTES, GradientSync
from relit_platform.worker.process_group import close_group, form_group, open_rendezvous

WORLD = 2
FLOOR = 0.97
PEER = "DistributedDataParallel(gradient_as_bucket_view=True)"
HOST = "127.0.0.1"
ROUNDS = (15, 60)  # at least and at most; a round is one turn of each loop
Step = Callable[[int], None]


def gpt(seed: int) -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    """The demo's GPT on 16 rows of 64 bytes a rank."""
    torch.manual_seed(seed)
    rows = torch.randint(0, 256, (64, 16, 65))

    def loss(model: nn.Module, step: int) -> Tensor:
        batch = rows[step % len(rows)]
        logits = model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return GPT(width=64, layers=2, heads=4, context=64), loss


def linears(seed: int) -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
    """24 linear layers of 768 x 768: 54 MiB of gradients, many buckets."""
    torch.manual_seed(seed)
    rows = torch.randn(16, 32, 768)

    def loss(model: nn.Module, step: int) -> Tensor:
        out: Tensor = model(rows[step % len(rows)])
        return out.square().mean()

    return nn.Sequential(*[nn.Linear(768, 768) for _ in range(24)]), loss


# Model, steps of one turn, name and floor of the row. Only the demo's job has a floor: linears are
# here to choose BUCKET_BYTES, and a loaded machine moves their ratio by more than 3 %.
CASES = {
    "gpt": (gpt, 20, "throughput_sync_vs_ddp", FLOOR),
    "linears": (linears, 2, "throughput_sync_linears_vs_ddp", None),
}


def _ours(
    case: str, assignment: Assignment, store: Any, bucket_bytes: int
) -> tuple[Step, Callable[[], object]]:
    model, loss_of = CASES[case][0](0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    group = form_group(assignment, store, 60.0)
    sync = GradientSync(model.parameters(), bucket_bytes)
    sync.attach(group)

    def step(number: int) -> None:
        loss = loss_of(model, number)
        sync.control[0] = float(loss.detach())
        sync.begin(sync=True)
        torch.autograd.backward(loss / WORLD)
        sync.finish()
        optimizer.step()
        sync.zero()
        float(sync.control[0])

    return step, lambda: close_group(group)


def _peer(case: str) -> tuple[Step, Callable[[], object]]:
    model, loss_of = CASES[case][0](0)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss = loss_of(wrapped, number)
        float(loss.detach())
        torch.autograd.backward(loss)
        optimizer.step()

    return step, lambda: None


def agreed_rounds(fit: float, least: int, most: int) -> int:
    """How many rounds fit into the time, as rank 0 sees it; on every rank."""
    rounds = torch.tensor([min(most, max(least, int(fit)))])
    broadcast(rounds, src=0)
    return int(rounds)


def _rank(
    rank: int, port: int, case: str, seconds: float, bucket_bytes: int | None, answers: Any
) -> None:
    """One process: set both loops up, let them take turns, report rank 0's times."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore(HOST, port, is_master=False)
    source = StateSource(kind="fresh", step=0)
    assignment = Assignment(
        generation=1,
        epoch=1,
        rank=rank,
        world=WORLD,
        members=("a", "b"),
        endpoint=(HOST, port),
        source=source,
    )
    init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    ours = _ours(case, assignment, store, bucket_bytes) if bucket_bytes else _peer(case)
    loops = {"ours": ours, "peer": _peer(case)}
    turn = CASES[case][1]
    times: dict[str, list[float]] = {name: [] for name in loops}
    cpu_s = dict.fromkeys(loops, 0.0)
    rounds, began_s, number = 1, time.monotonic(), 0
    while number < rounds + 1:  # the first round only warms up
        for name in sorted(loops, reverse=bool(number % 2)):
            before_s = time.process_time()
            for index in range(turn):
                start = time.perf_counter()
                loops[name][0](number * turn + index)
                if number:
                    times[name].append(time.perf_counter() - start)
            cpu_s[name] += (time.process_time() - before_s) if number else 0.0
        if number == 0:
            rounds = agreed_rounds(seconds / (time.monotonic() - began_s), *ROUNDS)
        number += 1
    if rank == 0:
        for name, total in cpu_s.items():
            used = f"{1e3 * total / rounds / turn:.2f} ms CPU per step, fastest fifth"
            fast = sorted(times[name])[len(times[name]) // 5]
            print(f"{case}, {name}: {used} {fast * 1e3:.2f} ms", file=sys.stderr)
        answers.put({name: statistics.median(values) for name, values in times.items()})
    for _, close in loops.values():
        close()
    destroy_process_group()


def machine() -> str:
    """What the figures were measured on; no host name."""
    load = f"load {os.getloadavg()[0]:.1f} after"
    return f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {load}"


def measure(case: str, seconds: float, bucket_bytes: int | None = BUCKET_BYTES) -> dict[str, Any]:
    """Run one case; a row of the result table. bucket_bytes None: the peer against itself."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    store, (_, port) = open_rendezvous(HOST)
    ranks = [
        context.Process(target=_rank, args=(rank, port, case, seconds, bucket_bytes, answers))
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    medians = answers.get(timeout=600)
    for process in ranks:
        process.join(30)
    del store
    ours, peer = 1 / medians["ours"], 1 / medians["peer"]
    return {
        "name": CASES[case][2] if bucket_bytes else f"noise_sync_{case}_ddp_vs_ddp",
        "ours": round(ours, 2),
        "peer": round(peer, 2),
        "peer_name": PEER,
        "ratio": round(ours / peer, 4),
        "floor": CASES[case][3] if bucket_bytes else None,
        "unit": "steps/s",
        "command": "python benchmarks/gradient_sync.py",
        "machine": machine(),
    }


def main() -> int:
    """Measure all cases, print and perhaps write the rows; 1 if one is below its floor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure a case")
    parser.add_argument("--case", choices=sorted(CASES), action="append")
    parser.add_argument("--bucket-mib", type=float, default=BUCKET_BYTES / (1 << 20))
    parser.add_argument("--noise", action="store_true", help="the peer against itself")
    parser.add_argument("--out", help="also write the rows to this file")
    options = parser.parse_args()
    bucket_bytes = None if options.noise else int(options.bucket_mib * (1 << 20))
    rows = [measure(case, options.seconds, bucket_bytes) for case in options.case or sorted(CASES)]
    text = json.dumps(rows, indent=1)
    print(text)
    if options.out:
        with open(options.out, "w") as file:
            file.write(text)
    return 0 if all(row["ratio"] >= (row["floor"] or 0.0) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
