"""What checkpoints of a run cost: given by a person, measured from its run directory, or assumed.

step_s        one step of training
state_bytes   one checkpoint, all ranks together
copy_s        a snapshot into shared memory, as the loop feels it
save_s        what one save to a farther tier costs the loop beyond that, be it waiting or CPU
disk_s        from the boundary until the step is committed on disk
upload_s      from there until it is committed in the object tier
restore_s     from a fault until training goes on
mtbf_s        between two failures, of whatever kind
disk_share    of the failures: shared memory is gone, the disk is not
object_share  of the failures: the disk is gone as well
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from relit_platform.machines.failure_rates import (
    SHARES,
    Kind,
    expected_mtbf_s,
    kind_of,
    rates,
)
from relit_platform.machines.save_costs import (
    Span,
    cost_s,
    ends_of,
    plain_step_s,
    sample,
    steps_of,
)

Json = dict[str, Any]
Origin = Literal["given", "measured", "assumed"]

# Per GB, from the measurements that the engine was designed by; benchmarks/ repeats them.
COPY_S_PER_GB = 0.061
SAVE_S_PER_GB = 0.21
DISK_S_PER_GB = 0.53
UPLOAD_S_PER_GB = 10.0
ENOUGH = 3  # measurements of a kind, for their median to say something


@dataclass(frozen=True, slots=True)
class Cost:
    """A number in the unit of its name, and where it comes from."""

    value: float
    origin: Origin


Costs = Mapping[str, Cost]


def assumed(state_bytes: float, ranks: int, mtbf_s: float = 0.0) -> dict[str, Cost]:
    """What is likely for a state of this size; every number can be given instead.

    mtbf_s: what the specification expects, 0: what large fleets report.
    """
    size_gb = state_bytes / 1e9
    values = {
        "step_s": 1.0,
        "state_bytes": state_bytes,
        "copy_s": COPY_S_PER_GB * size_gb / max(1, ranks),
        "save_s": SAVE_S_PER_GB * size_gb / max(1, ranks),
        "disk_s": DISK_S_PER_GB * size_gb,
        "upload_s": UPLOAD_S_PER_GB * size_gb,
        "restore_s": 10.0,
        "mtbf_s": expected_mtbf_s(ranks, mtbf_s),
        "disk_share": SHARES["disk"],
        "object_share": SHARES["object"],
    }
    return {name: Cost(value, "assumed") for name, value in values.items()}


def measured(
    rows: Sequence[Json],
    events: Iterable[Json],
    incidents: Sequence[Json],
    expected_s: float = 0.0,
) -> dict[str, float]:
    """What a run directory tells; a cost that it says nothing about is left out.

    expected_s: seconds between two failures, as the specification expects them; 0: nothing.
    """
    commits = [e for e in events if e.get("kind") == "ckpt.committed"]
    disk = [e for e in commits if _data(e).get("tier") == "disk"]
    outward = [e for e in commits if _data(e).get("tier") == "object"]
    found: dict[str, float | None] = {
        **_of_steps(rows, disk),
        "state_bytes": _median([float(_data(e).get("bytes") or 0) for e in disk[-ENOUGH:]], 1),
        "disk_s": _median([float(_data(e).get("seconds") or 0) for e in disk], 1),
        "upload_s": _median([float(_data(e).get("seconds") or 0) for e in outward], 1),
        "restore_s": _median([float(i.get("downtime_s") or 0) for i in incidents], 1),
        **_of_failures(rows, incidents, expected_s),
    }
    return {name: value for name, value in found.items() if value is not None}


def _of_steps(rows: Sequence[Json], commits: Sequence[Json]) -> dict[str, float | None]:
    """From the times of the rows: see relit_platform.machines.save_costs."""
    ended = {end.step: end.at_s for end in ends_of(rows)}
    saves = [
        Span(ended[step], ended[step] + max(1e-3, float(_data(commit).get("seconds") or 0)))
        for commit in commits
        if (step := int(commit.get("step") or 0)) in ended
    ]
    steps = steps_of(ends_of(rows))
    step_s = plain_step_s(steps, saves) if len(steps) >= ENOUGH else None
    samples = [taken for save in saves if (taken := sample(steps, save))]
    enough = step_s is not None and len(samples) >= ENOUGH
    return {"step_s": step_s, "save_s": cost_s(samples, step_s or 0.0) if enough else None}


def _of_failures(
    rows: Sequence[Json], incidents: Sequence[Json], expected_s: float
) -> dict[str, float | None]:
    """By what was seen and by what was expected before; see machines.failure_rates."""
    if not incidents or len(rows) < 2:
        return {}
    seen: dict[Kind, int] = {}
    for incident in incidents:
        kind = kind_of(str((incident.get("restore") or {}).get("tier") or ""))
        seen[kind] = seen.get(kind, 0) + 1
    prior_s = expected_mtbf_s(int(rows[-1].get("world") or 1), expected_s)
    trained_s = sum(step.seconds for step in steps_of(ends_of(rows)))
    found = rates(prior_s, seen, trained_s)
    whole = sum(found.values())
    return {
        "mtbf_s": 1 / whole,
        "disk_share": found["disk"] / whole,
        "object_share": found["object"] / whole,
    }


def _data(event: Json) -> Json:
    data = event.get("data")
    return data if isinstance(data, dict) else {}


def _median(values: Sequence[float], enough: int) -> float | None:
    known = [value for value in values if value > 0]
    return statistics.median(known) if len(known) >= enough else None
