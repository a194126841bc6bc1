"""Whom a drill kills: the pids of a run's processes that hold no rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relit.handle import JobHandle

ENTRYPOINT = "relit.entrypoint"


def pids_of(job: JobHandle, status: Mapping[str, Any], what: str) -> list[int]:
    """what: supervisor, manager, agent (of every node), driver, rank (the last), ranks (all)."""
    if what == "driver":
        found = list(_drivers(job.reader.run_key))
    elif what == "agent":
        found = [int(agent["pid"]) for agent in status["agents"]]
    elif what == "rank":
        found = [max((int(w["rank"]), int(w["pid"])) for w in status["workers"])[1]]
    elif what == "ranks":
        found = [int(w["pid"]) for w in status["workers"]]
    else:
        found = [int(status[f"{what}_pid"])]
    assert found, f"no {what} in {status}"
    return found


def _drivers(run_key: str) -> Iterator[int]:
    """Processes that run the entrypoint of the run's Ray job; not the shell around them."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # ended while we looked
        if words[1:3] == ["-m", ENTRYPOINT] and run_key in words:
            yield int(folder.name)


def send(pid: int, number: signal.Signals) -> None:
    """Any signal to one process."""
    assert pid > 1
    os.kill(pid, number)
