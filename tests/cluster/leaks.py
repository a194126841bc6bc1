"""What a finished run left behind: files, shared memory, processes, actors, placement groups.

result.json is written before the clean-up, so `left_by` looks again until nothing is found or
PATIENCE_S is over. The cluster is asked through its dashboard; tests run one job at a time, so
whatever lives there belongs to the run, except what Ray keeps for itself.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relit import cluster
from relit_platform.node.standby import started_for

PATIENCE_S = 30.0  # the keeper ends an idle cluster after 60
LOOK_EVERY_S = 0.2
RAYS_OWN = ("_AutoscalingCoordinatorActor",)


def left_by(root: Path, run_id: str, events: list[dict[str, Any]], *, disk: bool) -> list[str]:
    """One text for each thing; `events` name the run's workers, disk: its disk tier may stay."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        found = [
            *_files(root, run_id, disk),
            *_processes(events),
            *_standby(run_id),
            *_on_the_cluster(),
        ]
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(LOOK_EVERY_S)


def _files(root: Path, run_id: str, disk: bool) -> Iterator[str]:
    yield from map(str, Path("/dev/shm/relit").glob(run_id))
    if not disk:
        yield from map(str, (root / "disk").glob(run_id))
    for tier in ("store", "disk"):
        below = paths_below(root / tier)
        yield from (str(p) for p in below if "tmp" in p.name and run_id in p.parts)


def paths_below(folder: Path) -> Iterator[Path]:
    """Files and folders of a tree that others delete from meanwhile, which glob does not bear."""
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name) for name in (*folders, *files))


def _processes(events: list[dict[str, Any]]) -> Iterator[str]:
    """Workers that held a rank; a worker id ends with its pid and its start in clock ticks."""
    workers = {
        member["worker_id"]
        for event in events
        if event["kind"] == "generation.formed"
        for member in event["data"]["members"]
    }
    for worker in sorted(workers):
        _, pid, ticks = worker.rsplit("-", 2)
        if process_ticks(int(pid)) == int(ticks):
            yield f"worker process {pid}"


def _standby(run_id: str) -> Iterator[str]:
    """Whatever Ray started for the run's ranks, also what never became one, and what came of it."""
    for process in Path("/proc").glob("[0-9]*"):
        if started_for(process.name, run_id):
            yield f"process {process.name} started for a rank"


def process_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _on_the_cluster() -> Iterator[str]:
    for actor in listed("actors"):
        if actor["state"] != "DEAD" and actor["class_name"] not in RAYS_OWN:
            yield f"actor {actor['class_name']} {actor.get('name')} {actor['state']}"
    for group in listed("placement_groups"):
        if group["state"] != "REMOVED":
            yield f"placement group {group['placement_group_id']} {group['state']}"


def listed(what: str) -> list[dict[str, Any]]:
    """What the dashboard knows of: actors, nodes, placement_groups."""
    info = cluster.local_cluster()
    assert info is not None
    url = f"{info.dashboard_url}/api/v0/{what}?limit=10000"
    with urllib.request.urlopen(url, timeout=30) as answer:
        body = json.load(answer)
    assert body["result"], body["msg"]
    rows: list[dict[str, Any]] = body["data"]["result"]["result"]
    return rows
