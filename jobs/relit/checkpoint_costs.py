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

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
Origin = Literal["given", "measured", "assumed"]

# Per GB, from the measurements that the engine was designed by; benchmarks/ repeats them.
COPY_S_PER_GB = 0.061
SAVE_S_PER_GB = 0.21
DISK_S_PER_GB = 0.53
UPLOAD_S_PER_GB = 10.0
# Large fleets report 3.8 to 6.5 failures in 1,000 node-days; here one node is one rank.
NODE_DAYS_PER_FAILURE = 200.0
ENOUGH = 3  # measurements of a kind, for their median to say something
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Cost:
    """A number in the unit of its name, and where it comes from."""

    value: float
    origin: Origin


Costs = Mapping[str, Cost]


def assumed(state_bytes: float, ranks: int) -> dict[str, Cost]:
    """What is likely for a state of this size; every number can be given instead."""
    size_gb = state_bytes / 1e9
    values = {
        "step_s": 1.0,
        "state_bytes": state_bytes,
        "copy_s": COPY_S_PER_GB * size_gb / max(1, ranks),
        "save_s": SAVE_S_PER_GB * size_gb / max(1, ranks),
        "disk_s": DISK_S_PER_GB * size_gb,
        "upload_s": UPLOAD_S_PER_GB * size_gb,
        "restore_s": 10.0,
        "mtbf_s": NODE_DAYS_PER_FAILURE * DAY_S / max(1, ranks),
        "disk_share": 0.2,
        "object_share": 0.1,
    }
    return {name: Cost(value, "assumed") for name, value in values.items()}


def measured(
    rows: Sequence[Json], events: Iterable[Json], incidents: Sequence[Json]
) -> dict[str, float]:
    """What a run directory tells; a cost that it says nothing about is left out."""
    commits = [e for e in events if e.get("kind") == "ckpt.committed"]
    disk = [e for e in commits if _data(e).get("tier") == "disk"]
    outward = [e for e in commits if _data(e).get("tier") == "object"]
    found: dict[str, float | None] = {
        **_of_steps(rows, {int(e.get("step") or 0) for e in disk}),
        "state_bytes": _median([float(_data(e).get("bytes") or 0) for e in disk[-ENOUGH:]], 1),
        "disk_s": _median([float(_data(e).get("seconds") or 0) for e in disk], 1),
        "upload_s": _median([float(_data(e).get("seconds") or 0) for e in outward], 1),
        "restore_s": _median([float(i.get("downtime_s") or 0) for i in incidents], 1),
        **_of_failures(rows, incidents),
    }
    return {name: value for name, value in found.items() if value is not None}


def _of_steps(rows: Sequence[Json], saved: set[int]) -> dict[str, float | None]:
    """From the times of the rows: a save delays the row of the step that comes after it."""
    plain: list[float] = []
    after: list[float] = []
    for row, following in itertools.pairwise(rows):
        in_line = int(following["step"]) == int(row["step"]) + 1
        if in_line and row.get("generation") == following.get("generation"):
            gap_s = float(following.get("at_s") or 0) - float(row.get("at_s") or 0)
            (after if int(row["step"]) in saved else plain).append(gap_s)
    step_s, after_s = _median(plain or after, ENOUGH), _median(after, ENOUGH)
    both = plain and step_s is not None and after_s is not None
    return {
        "step_s": step_s if step_s else None,
        "save_s": max(0.0, after_s - step_s) if both and after_s and step_s else None,
    }


def _of_failures(rows: Sequence[Json], incidents: Sequence[Json]) -> dict[str, float | None]:
    """Rates by what was seen, and by what was expected before: a calm hour proves little."""
    if not incidents or len(rows) < 2:
        return {}
    wall_s = float(rows[-1].get("at_s") or 0) - float(rows[0].get("at_s") or 0)
    tiers = [str((i.get("restore") or {}).get("tier") or "") for i in incidents]
    expected, weight = assumed(0, 1), 2.0
    shares = {
        f"{tier}_share": (tiers.count(tier) + weight * expected[f"{tier}_share"].value)
        / (len(tiers) + weight)
        for tier in ("disk", "object")
    }
    ranks = max(1, int(rows[-1].get("world") or 1))
    prior_s = NODE_DAYS_PER_FAILURE * DAY_S / ranks
    by_prior = (prior_s + max(0.0, wall_s)) / (1 + len(incidents))
    return {"mtbf_s": by_prior, **shares}


def _data(event: Json) -> Json:
    data = event.get("data")
    return data if isinstance(data, dict) else {}


def _median(values: Sequence[float], enough: int) -> float | None:
    known = [value for value in values if value > 0]
    return statistics.median(known) if len(known) >= enough else None
