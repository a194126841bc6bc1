"""Faults addressed by (rank, step, phase): the rank kills itself for real, exactly there.

A drill is a JSON object in the spec's `faults`:

    {"kind": "kill", "rank": 1, "step": 500, "phase": "backward"}

kind: "kill" (SIGKILL), "raise" (a RuntimeError in the user's loop), "raise_always" (the same at
every visit), "exit" (os._exit(1)). step is the step being computed (1-based: the step whose
completion makes run.step_no equal to it). phase: "forward", "backward" (after the first
all-reduce was launched), "sync" (before the wait), "update" (after the optimizer, before the
boundary), "snapshot" (half of the slot is written), "boundary" (after the snapshot), "end" (the
last step of all, when every rank has completed it). Two more hit a rank while a generation forms,
and name the step that comes after: "form" (it has a place, the group is not up yet), "restore" (the
group is up, state is on its way).

A redone step meets the same address again, so each drill fires once per run: it creates its mark
file exclusively, in the node's disk directory, before it acts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

STEP_PHASES = ("forward", "backward", "sync", "update", "snapshot", "boundary")
PHASES = (*STEP_PHASES, "end", "form", "restore")
KINDS = ("kill", "raise", "raise_always", "exit")


class DrillError(RuntimeError):
    """What a "raise" drill raises in the user's loop."""


class Drill:
    """Checked by the rank at every phase; costs one dict look-up when nothing is due."""

    def __init__(self, faults: Sequence[Mapping[str, Any]], marks_dir: str) -> None:
        self._marks_dir = marks_dir
        self._due: dict[tuple[int, int, str], list[tuple[int, str]]] = {}
        for number, fault in enumerate(faults):
            address = (int(fault["rank"]), int(fault["step"]), str(fault.get("phase", "backward")))
            self._due.setdefault(address, []).append((number, str(fault.get("kind", "kill"))))

    def check(self, rank: int, step: int, phase: str) -> None:
        """Act if a fault is addressed here. Called by the rank's own thread."""
        if not self._due:
            return
        for number, kind in self._due.get((rank, step, phase), ()):
            if kind == "raise_always" or self._mark(number):
                act(kind, f"drill {number}: {kind} at rank {rank}, step {step}, {phase}")

    def wants(self, rank: int, step: int, phase: str) -> bool:
        """True if `check` would act here at its first visit; arms a hook in mid-backward."""
        return bool(self._due) and (rank, step, phase) in self._due

    def _mark(self, number: int) -> bool:
        os.makedirs(self._marks_dir, exist_ok=True)
        path = os.path.join(self._marks_dir, f"drill-{number:04d}.fired")
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return False
        os.close(fd)
        return True


def act(kind: str, text: str) -> None:
    """Do it: SIGKILL to self does not return."""
    print(f"relit {text}", flush=True)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(1)
    raise DrillError(text)


def validate(fault: Mapping[str, Any]) -> list[str]:
    """What is wrong with one drill, as 'field: reason' texts; empty if nothing."""
    problems = []
    for field in ("rank", "step"):
        if not isinstance(fault.get(field), int) or isinstance(fault.get(field), bool):
            problems.append(f"{field}: must be an integer, is {fault.get(field)!r}")
    if fault.get("phase", "backward") not in PHASES:
        problems.append(f"phase: {fault.get('phase')!r} is none of {', '.join(PHASES)}")
    if fault.get("kind", "kill") not in KINDS:
        problems.append(f"kind: {fault.get('kind')!r} is none of {', '.join(KINDS)}")
    extra = sorted(set(fault) - {"kind", "rank", "step", "phase"})
    if extra:
        problems.append(f"unknown keys: {', '.join(extra)}")
    return problems
