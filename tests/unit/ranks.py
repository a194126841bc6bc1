"""Real rank processes for tests of collectives: spawned, on loopback, with a deadline for all."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from relit_platform.facts import Assignment, StateSource
from relit_platform.worker.process_group import open_rendezvous

HOST = "127.0.0.1"
DEADLINE_S = 60.0


def assignment(rank: int, world: int, endpoint: tuple[str, int], generation: int = 1) -> Assignment:
    """A place in a generation, as the manager would announce it."""
    return Assignment(
        generation=generation,
        epoch=1,
        rank=rank,
        world=world,
        members=tuple(f"w{r}" for r in range(world)),
        endpoint=endpoint,
        source=StateSource(kind="fresh", step=0),
    )


class Ranks:
    """`world` processes that run body(rank, world, endpoint, line); rank r talks on lines[r]."""

    def __init__(self, body: Callable[..., None], world: int = 2) -> None:
        context = multiprocessing.get_context("spawn")
        self.store, self.endpoint = open_rendezvous(HOST)
        self.lines: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (body, rank, world, self.endpoint, theirs)
            process = context.Process(target=_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.lines.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join(5)

    def ask(self, rank: int) -> Any:
        """The next message of a rank; EOFError if it died, TimeoutError if it says nothing."""
        if not self.lines[rank].poll(DEADLINE_S):
            raise TimeoutError(f"rank {rank} said nothing for {DEADLINE_S} s")
        return self.lines[rank].recv()

    def tell(self, rank: int, message: Any) -> None:
        """Send a message to a rank."""
        self.lines[rank].send(message)

    def kill(self, rank: int) -> float:
        """SIGKILL; returns the wall time of it."""
        self.processes[rank].kill()
        return time.time()

    def answers(self) -> list[Any]:
        """One message of every rank."""
        return [self.ask(rank) for rank in range(len(self.lines))]


def num_threads() -> int:
    """Threads of this process, native ones included."""
    return len(os.listdir("/proc/self/task"))


def threads_left(before: int) -> int:
    """Threads more than `before`; a joined thread may take the kernel a moment to forget."""
    deadline_s = time.monotonic() + 2.0
    while num_threads() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return num_threads() - before


def _main(
    body: Callable[..., None], rank: int, world: int, endpoint: tuple[str, int], line: Connection
) -> None:
    torch.set_num_threads(1)
    body(rank, world, endpoint, line)
