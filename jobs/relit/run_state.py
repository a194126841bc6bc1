"""What state a run is in, judged from its files alone.

    result.json there                          its state: SUCCEEDED, FAILED, STOPPED
    lease in force                             the state in status.json, PENDING before the first,
                                               STOPPING between the last one and result.json
    a job was submitted a moment ago           PENDING
    nothing was ever submitted                 IMPORTED: a home of checkpoints, for other runs
    otherwise                                  LOST, with the way to go on

A Ray job's own status is never used: a killed driver says nothing about the run (a detached
supervisor outlives it). LOST is not final: `resume` continues, and a supervisor that Ray brings
back takes the lease again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relit_storage.run.lease import MARGIN_S

PENDING, FINISHING, LOST, IMPORTED = "PENDING", "STOPPING", "LOST", "IMPORTED"
TERMINAL = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
OVER = TERMINAL | {LOST, IMPORTED}  # nobody drives it
TOOL = "relit ckpt"  # what the holder of a tool's lease begins with
START_GRACE_S = 180.0  # from the submit of a job to the supervisor's lease: cluster start, queueing


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The small files that decide. lease_until_s is None without a lease, 0 once released; epoch
    is the lease's. submitted: there is a specification. tool: who holds the lease, if it is a tool
    that works on the run's checkpoints and not a supervisor.
    """

    result: Mapping[str, Any] | None = None
    status: Mapping[str, Any] | None = None
    attempt: Mapping[str, Any] | None = None
    lease_until_s: float | None = None
    epoch: int = 0
    submitted: bool = True
    tool: str = ""


def derive_state(files: RunFiles, run_id: str, now: float) -> tuple[str, str]:
    """(state, reason) at wall time `now` in Unix seconds."""
    if files.result is not None:
        return str(files.result.get("state", "FAILED")), str(files.result.get("reason") or "")
    in_force = files.lease_until_s is not None and files.lease_until_s + MARGIN_S > now
    if in_force and not (files.tool and files.submitted):
        return _live_state(files)
    if not files.submitted:
        return IMPORTED, "holds checkpoints that were imported; runs begin with them by `init`"
    submitted_s = float((files.attempt or {}).get("at_s", 0.0))
    if now - submitted_s < START_GRACE_S and submitted_s > (files.lease_until_s or 0.0):
        return PENDING, "submitted; its supervisor has not started yet"
    return LOST, _lost_reason(files, run_id, now)


def _live_state(files: RunFiles) -> tuple[str, str]:
    status = files.status or {}
    state = str(status.get("state") or PENDING)
    if state in TERMINAL and int(status.get("epoch") or 0) < files.epoch:
        # After a resume the old status stays until the new supervisor writes its first one.
        return PENDING, "its supervisor has just started"
    if state in TERMINAL:
        return FINISHING, "its result is being written"
    return state, str(status.get("reason") or "")


def _lost_reason(files: RunFiles, run_id: str, now: float) -> str:
    go_on = f"`relit resume {run_id}` continues it"
    step = (files.status or {}).get("step")
    if step:
        go_on += f"; its newest known step is {step}"
    if files.tool and (files.lease_until_s or 0.0) + MARGIN_S > now:
        return f"nobody drives it, and {files.tool} works on its checkpoints; then {go_on}"
    if files.lease_until_s is None:
        return f"its supervisor never started; {go_on}"
    if files.lease_until_s == 0.0:
        return f"its supervisor left without a result; {go_on}"
    ago_s = now - files.lease_until_s
    return f"its supervisor's lease expired {ago_s:.0f} s ago; {go_on}"
