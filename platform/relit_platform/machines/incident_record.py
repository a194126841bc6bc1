"""From an open incident to its record and the one sentence that every surface shows. Pure."""

from __future__ import annotations

import itertools
from typing import Any

from relit_platform.machines.incident_state import PHASES, Evidence, OpenIncident

CLASSES = {
    "controller": "controller",
    "exception": "user_error",
    "exit": "worker_crash",
    "node_lost": "node_lost",
    "restore_refused": "store",
    "timeout": "hang",
    "collective_error": "unknown",
    "ray_train": "controller",
}


def make_record(found: OpenIncident, end_s: float, *, recovered: bool) -> dict[str, Any]:
    """The record of B.5. end_s: when the first new step was complete, or the run was over."""
    cause = max(found.evidence, key=lambda e: (e.weight, -e.at_s))
    began_s = fault_at(found)
    phases = split(found, began_s, max(end_s, began_s))
    formed = found.formed_data
    start = int(formed.get("start_step", found.completed_step))
    lost = max(0, found.completed_step - start)
    downtime_s = sum(phases[name] for name in PHASES)
    record: dict[str, Any] = {
        "v": 1,
        "recovered": recovered,
        "cause": _cause(cause, found),
        "victims": _victims(cause, found),
        "detect": {
            "method": cause.method,
            "at_s": found.noticed_at_s,
            "latency_s": phases["detect"],
        },
        "lost": {
            "steps": lost,
            "worker_seconds": round(downtime_s * max(1, found.world_before), 6),
        },
        "restore": {
            "source": formed.get("source", ""),
            "tier": formed.get("tier", ""),
            "rank": formed.get("source_rank"),
            "step": start,
            "skipped": list(formed.get("refusals") or ()),
        },
        "world": {"before": found.world_before, "after": int(formed.get("world") or 0)},
        "generation": {"before": found.generation, "after": found.formed},
        "at_s": began_s,
        "step": found.completed_step,
        "phases": phases,
        "downtime_s": downtime_s,
        "budget": dict(found.budget),
    }
    record["headline"] = headline(record)
    return record


def fault_at(found: OpenIncident) -> float:
    """When it began: the earliest process exit that was seen, else the earliest evidence."""
    exits = [e.at_s for e in found.evidence if e.method == "exit"]
    return min(exits or [e.at_s for e in found.evidence])


def split(found: OpenIncident, began_s: float, end_s: float) -> dict[str, float]:
    """Seconds per phase. Clocks of several hosts differ, so marks are held in order first."""
    noticed = max(began_s, found.noticed_at_s)
    if not found.formed:
        marks = [noticed, end_s, end_s, end_s]
    else:
        entered = max(found.entered.values(), default=found.formed_at_s)
        marks = [noticed, found.filled_at_s, found.formed_at_s, entered]
    ordered = [began_s]
    for mark in [*marks, end_s]:
        ordered.append(min(max(mark, ordered[-1]), end_s))
    lengths = [round(b - a, 6) for a, b in itertools.pairwise(ordered)]
    detect, wait, planning, entering, replay = lengths
    loading = min(found.restore_s, entering)
    return {
        "detect": detect,
        "wait": wait,
        "rendezvous": round(entering - loading, 6),
        "restore": round(planning + loading, 6),
        "replay": replay,
    }


def _cause(cause: Evidence, found: OpenIncident) -> dict[str, Any]:
    codes = {
        "exit": "process_ended",
        "controller": "supervisor_lost",
        "ray_train": "train_controller_lost",
    }
    code = codes.get(cause.method)
    return {
        "class": CLASSES[cause.method],
        "code": code or cause.method,
        "rank": cause.rank,
        "node": cause.node_id,
        "worker_id": cause.worker_id,
        "pid": cause.pid,
        "exception": cause.text if cause.method == "exception" else "",
        "evidence": [e.to_json() for e in found.evidence],
    }


def _victims(cause: Evidence, found: OpenIncident) -> list[int]:
    """Ranks whose only evidence is that a peer went away."""
    worst: dict[int, int] = {}
    for e in found.evidence:
        if e.rank is not None:
            worst[e.rank] = max(worst.get(e.rank, 0), e.weight)
    return sorted(rank for rank, weight in worst.items() if weight == 0 and rank != cause.rank)


def headline(record: dict[str, Any]) -> str:
    """One sentence per question: what, how noticed, what was lost, where the time went."""
    return " ".join(
        [
            f"Incident {{id}}: {_what(record)} at step {record['step']}.",
            f"Noticed in {record['detect']['latency_s']:.2f} s by {_method(record)}.",
            _went_back(record),
            _time(record),
            f"World {record['world']['before']} to {record['world']['after']}.",
        ]
    )


def _what(record: dict[str, Any]) -> str:
    cause = record["cause"]
    ended = sorted({e["rank"] for e in cause["evidence"] if e["method"] == "exit"})
    there = sorted({e["rank"] for e in cause["evidence"] if e["method"] == "node_lost"})
    node = f" on node {cause['node'][:8]}" if cause["node"] else ""
    match cause["class"]:
        case "controller" if cause["code"] == "train_controller_lost":
            return "Ray Train's controller was lost"
        case "controller":
            return "the supervisor was lost"
        case "user_error":
            return f"rank {cause['rank']}{node} raised {cause['exception']}"
        case "store":
            return f"rank {cause['rank']}{node} refused a checkpoint file"
        case "node_lost":
            ranks = "rank" if len(there) == 1 else "ranks"
            return f"node {cause['node'][:8]} was lost with {ranks} {', '.join(map(str, there))}"
        case "worker_crash" if len(ended) > 1:
            return f"ranks {', '.join(map(str, ended))} ended unexpectedly{node}"
        case "worker_crash":
            return f"rank {cause['rank']}{node} ended unexpectedly (pid {cause['pid']})"
    return f"rank {cause['rank']}{node} lost its peers"


def _method(record: dict[str, Any]) -> str:
    exits = any(e["method"] == "exit" for e in record["cause"]["evidence"])
    return {
        "exit": "process exit",
        "node_lost": "a broken collective or Ray's health check",
        "exception": "its exception",
        "collective_error": "a broken collective",
        "restore_refused": "its checksum",
        "timeout": "a timeout",
        "ray_train": "the end of its run",
        "controller": "the end of its workers" if exits else "the next supervisor",
    }[record["detect"]["method"]]


def _went_back(record: dict[str, Any]) -> str:
    restore, lost = record["restore"], record["lost"]["steps"]
    if not record["recovered"]:
        return "Not recovered."
    where = {
        "member": f"state from the memory of rank {restore['rank']}",
        "checkpoint": f"state restored from the {restore['tier']} tier",
        "fresh": "started anew, for there was no checkpoint yet",
    }.get(restore["source"], "state kept")
    if lost:
        steps = "1 step" if lost == 1 else f"{lost} steps"
        return f"Went back {steps} to {restore['step']}, {where}."
    return f"No step lost, {where}."


def _time(record: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {record['phases'][name]:.2f}" for name in PHASES)
    return f"{record['downtime_s']:.2f} s down: {parts}."
