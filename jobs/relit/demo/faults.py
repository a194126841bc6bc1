"""The demo's failures: real SIGKILLs, addressed by step, to pids that the run itself reports."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Kill this process once the run has completed `step` steps. rank only for target "rank"."""

    target: Literal["rank", "supervisor"]
    step: int
    rank: int = 0

    def describe(self) -> str:
        """Who is killed, for the progress display."""
        return f"rank {self.rank}" if self.target == "rank" else "the supervisor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A fault that was carried out: which process, and what the status said just before."""

    fault: Fault
    pid: int
    seen_step: int

    def sentence(self) -> str:
        """What was done, for people."""
        return f"SIGKILL to {self.fault.describe()} (pid {self.pid}) after step {self.seen_step}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON for `relit demo --json`."""
        return {"target": self.fault.describe(), "pid": self.pid, "seen_step": self.seen_step}


def plan_faults(steps: int, workers: int) -> tuple[Fault, ...]:
    """The last rank at a third of the steps, the supervisor at two thirds."""
    return (
        Fault(target="rank", step=max(1, steps // 3), rank=workers - 1),
        Fault(target="supervisor", step=max(2, 2 * steps // 3)),
    )


def victim(fault: Fault, status: Mapping[str, Any]) -> int | None:
    """The pid to kill now, or None while the step is not reached or no such process is known."""
    if (status.get("step") or 0) < fault.step:
        return None
    if fault.target == "supervisor":
        return status.get("supervisor_pid") or None
    for worker in status.get("workers") or ():
        if worker.get("rank") == fault.rank:
            return worker.get("pid") or None
    return None


def kill_ray_process(pid: int) -> bool:
    """SIGKILL, only if the pid is a Ray worker on this host that belongs to this user.

    A status written on another host names pids that may be anything here. The pidfd pins the
    process, so that it is this one that is looked at and this one that is killed. False if the
    process is gone or is not Ray's.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except (ProcessLookupError, OSError):
        return False
    try:
        if not _is_own_ray_worker(pid):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(pidfd)


def _is_own_ray_worker(pid: int) -> bool:
    folder = Path(f"/proc/{pid}")
    try:
        command = (folder / "cmdline").read_bytes()
        return folder.stat().st_uid == os.getuid() and command.startswith(b"ray::")
    except OSError:
        return False
