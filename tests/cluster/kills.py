"""Seeded plans of rank kills, and what must hold for every incident that they cause."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness

from relit.handle import JobHandle
from relit_platform.worker.drill import STEP_PHASES
from relit_storage.data.ledger import LedgerRow, audit
from relit_storage.data.loader import Loader
from relit_storage.data.table import TableDataset

KILLS = int(os.environ.get("RELIT_DRILL_KILLS", "6"))
SEED = int(os.environ.get("RELIT_DRILL_SEED", "20"))
GAP = (4, 20)  # steps between two kills
SOON = (1, 6)  # steps to the kill that comes before the next one waits
HELD_STEPS = 2  # before a kill

Fault = dict[str, Any]
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """kills by step; at `hold_at` the loop waits until a spare or a standby process is there, for
    the kill that follows.
    """

    kills: list[Fault]
    hold_at: list[int] = field(default_factory=list)

    def met(self, records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
        """Those of a run's records that are of one kill for which the loop has waited; the rest."""
        hot: list[Record] = []
        cold: list[Record] = []
        left = list(self.kills)
        for record in records:
            here, left = of_record(record, left)
            waited = len(here) == 1 and here[0]["step"] - HELD_STEPS in self.hold_at
            (hot if waited else cold).append(record)
        return hot, cold

    @property
    def steps(self) -> int:
        """Length of a run in which every kill has happened well before the end."""
        return int(self.kills[-1]["step"]) + GAP[1]


def scattered(count: int, seed: int) -> Plan:
    """`count` kills over all phases and both ranks.

    Each kill with an even number meets what waits for a dead rank; the next one comes too soon.
    """
    dice = random.Random(seed)
    phases = [phase for _ in range(count // len(STEP_PHASES) + 1) for phase in _shuffled(dice)]
    plan, step = Plan([]), 0
    for number, phase in enumerate(phases[:count]):
        hot = number % 2 == 0
        low, high = GAP if hot else SOON
        step += dice.randint(low, high)
        if hot:
            plan.hold_at.append(step - HELD_STEPS)
        plan.kills.append(kill(dice.randrange(2), step, phase))
    return plan


def kill(rank: int, step: int, phase: str) -> Fault:
    """One drill."""
    return {"kind": "kill", "rank": rank, "step": step, "phase": phase}


def _shuffled(dice: random.Random) -> list[str]:
    return dice.sample(STEP_PHASES, len(STEP_PHASES))


def check_exact(job: JobHandle, calm: Mapping[int, float], data: Path, steps: int) -> None:
    """The run ended well, with the losses of the calm run, and read each sample when it should."""
    status = job.status()
    assert status["state"] == "SUCCEEDED", status
    assert harness.losses(job) == harness.head(calm, steps)
    rows = [LedgerRow.from_metric_row(row) for row in job.metrics()]
    digits = TableDataset.open(str(data / "train.parquet"))
    loader = Loader(digits, global_batch=rows[0].hi - rows[0].lo, seed=0, steps=steps)
    report = audit(rows, sum(digits.rows_per_block), sample_ids=loader.sample_ids)
    assert report.exact and report.num_steps == steps, report
    assert [event for event in job.events() if event["level"] == "error"] == []


def check_phases(record: Record) -> None:
    """Recovered, and every second of the downtime belongs to one phase."""
    assert record["recovered"], record
    assert abs(sum(record["phases"].values()) - record["downtime_s"]) < 1e-5, record
    assert min(record["phases"].values()) >= 0, record


def check_kills(job: JobHandle, faults: Sequence[Fault]) -> list[Record]:
    """The run's records explain exactly these kills, in order; returns them.

    A kill that comes before the recovery from the one before has shown a new step belongs to the
    same incident. While a rank lives no step is lost; if both ended, at most the one whose snapshot
    was cut. Only the killed ranks got another process.
    """
    records: list[Record] = [*job.incidents()]
    members, left = members_by_generation(job), list(faults)
    for record in records:
        check_phases(record)
        here, left = of_record(record, left)
        ended = exited(record)
        assert sorted(ended) == sorted(fault["rank"] for fault in here), (here, record)
        assert record["step"] in (here[-1]["step"] - 1, here[-1]["step"]), (here, record)
        nobody_left = set(ended) == set(range(record["world"]["before"]))
        assert record["lost"]["steps"] <= int(nobody_left), (here, record)
        before, after = (members[record["generation"][when]] for when in ("before", "after"))
        changed = {rank for rank in after if after[rank] != before[rank]}
        assert changed == set(ended), (here, before, after)
    assert not left, left
    return records


def of_record(record: Record, faults: list[Fault]) -> tuple[list[Fault], list[Fault]]:
    """The first faults, as many as the record has exits; and the rest."""
    count = len(exited(record))
    return faults[:count], faults[count:]


def exited(record: Record) -> list[int]:
    """Ranks whose processes ended in an incident."""
    return [e["rank"] for e in record["cause"]["evidence"] if e["method"] == "exit"]


def members_by_generation(job: JobHandle) -> dict[int, dict[int, str]]:
    """Worker id by rank of each generation; a worker id names one process life."""
    return {
        event["data"]["generation"]: {m["rank"]: m["worker_id"] for m in event["data"]["members"]}
        for event in job.events()
        if event["kind"] == "generation.formed"
    }


def was_waiting(record: Record, since_s: Mapping[tuple[int, int], float]) -> bool:
    """True if the worker that took the rank over had asked for a place before the fault."""
    if sum(e["method"] == "exit" for e in record["cause"]["evidence"]) > 1:
        return False  # one spare, two faults in one incident
    asked_s = since_s[record["generation"]["after"], record["cause"]["rank"]]
    return asked_s < float(record["at_s"])


def beyond_a_start_s(job: JobHandle, record: Record, lives: Path) -> float:
    """The part of a downtime in which no process was starting: downtime less the time from the
    start of the newest process that got a rank (from the fault, if it is older) to its asking.
    """
    newcomers = [
        member
        for event in job.events()
        if event["kind"] == "generation.formed"
        and event["data"]["generation"] == record["generation"]["after"]
        for member in event["data"]["members"]
        if member["newcomer"]
    ]
    last = max(newcomers, key=lambda member: float(member["waiting_since_s"]))
    asked_s, at_s = float(last["waiting_since_s"]), float(record["at_s"])
    began_s = max(float((lives / str(last["pid"])).read_text()), at_s)
    return float(record["downtime_s"]) - max(asked_s - began_s, 0.0)


def waiting_since_s(job: JobHandle) -> dict[tuple[int, int], float]:
    """By generation and rank: when the process that got it had asked for a place."""
    return {
        (event["data"]["generation"], m["rank"]): float(m["waiting_since_s"])
        for event in job.events()
        if event["kind"] == "generation.formed"
        for m in event["data"]["members"]
    }


def figures(records: Sequence[Record], job: JobHandle, lives: Path) -> str:
    """Minimum, median and maximum of the downtimes, and of what is not a process's start."""
    if not records:
        return "none"
    alone = [record for record in records if len(exited(record)) == 1]
    parts = {
        "downtime": [float(record["downtime_s"]) for record in records],
        # Of two kills in a row two processes start, one after the other.
        f"beyond a process start, {len(alone)} of one kill": [
            beyond_a_start_s(job, record, lives) for record in alone
        ],
    }
    spread = "; ".join(
        f"{name} {min(times):.2f} / {statistics.median(times):.2f} / {max(times):.2f} s"
        for name, times in parts.items()
        if times
    )
    return f"{len(records)} incidents, {spread}"
