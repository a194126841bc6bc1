"""A run on Ray's own surfaces: its job's card in the dashboard, its gauges for Prometheus."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from relit.cluster import ClusterInfo, read_record
from relit.handle import JobHandle

GAUGES = {
    "relit_step",
    "relit_loss",
    "relit_world_size",
    "relit_generation",
    "relit_committed_step{memory}",
    "relit_committed_step{disk}",
    "relit_committed_step{object}",
    "relit_state{RUNNING}",
    "relit_recoveries_total{worker_crash}",
    "relit_recoveries_total{controller}",
    "relit_downtime_seconds_total",
}
WAIT_S = 90.0  # Ray passes metrics on every ten seconds
POLL_S = 0.5

Found = TypeVar("Found")


def local_cluster() -> ClusterInfo:
    """The lab's cluster."""
    info = read_record()
    assert info is not None
    return info


def card(run_id: str) -> dict[str, Any]:
    """The Ray job of a run, as GET /api/jobs/ of the dashboard tells it; {} before it is there."""
    with urllib.request.urlopen(f"{local_cluster().dashboard_url}/api/jobs/", timeout=30) as answer:
        jobs = json.load(answer)
    mine = [job for job in jobs if str(job.get("submission_id") or "").startswith(f"{run_id}-a")]
    return mine[-1] if mine else {}


def samples(run_id: str) -> dict[str, float]:
    """Largest value by `name` or `name{label}` of a run's metrics, over all Prometheus targets.

    Ray goes on for minutes to show what a dead process said last; what counts steps, generations or
    recoveries is larger in its successor.
    """
    found: dict[str, float] = {}
    for target in _targets():
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        for name, labels, value in filter(None, map(_sample, lines)):
            if labels.get("run") == run_id:
                own = labels.get("tier") or labels.get("state") or labels.get("cause")
                key = f"{name}{{{own}}}" if own else name
                found[key] = max(value, found.get(key, value))
    return found


def check_card(job: JobHandle, owner: str) -> None:
    """The Ray job of a running run says whose it is, and how far."""
    told = until(
        lambda: card(job.id),
        # The first message after the start, and after a recovery, may come before a loss is known.
        lambda seen: re.search("RUNNING at step .* loss ", str(seen.get("message"))) is not None,
    )
    metadata = told["metadata"]
    assert (metadata["name"], metadata["owner"], metadata["run_id"]) == (job.id, owner, job.id)
    assert metadata["state"] == "RUNNING" and told["status"] == "RUNNING"
    assert told["message"].startswith(f"{job.id} RUNNING at step") and "loss" in told["message"]


def check_gauges(job: JobHandle, since: int, step: int, recoveries: Mapping[str, int]) -> None:
    """Prometheus gets all of a run that has gone on from step `since` and holds the one after
    `step`, so that the newest rows wait for the next boundary; recoveries: by cause.
    """
    wanted = {f"relit_recoveries_total{{{cause}}}": count for cause, count in recoveries.items()}
    now = {"relit_generation": job.status()["generation"], **wanted}
    found = until(
        lambda: samples(job.id),
        # They come together every ten seconds: some may be from before the hold.
        lambda seen: (
            set(seen) >= GAUGES
            and since < seen["relit_step"] <= step
            and all(seen[name] == now[name] for name in now)
        ),
    )
    assert found["relit_world_size"] == 2.0 and found["relit_state{FAILED}"] == 0.0
    assert found["relit_committed_step{object}"] % 40 == 0
    assert found["relit_downtime_seconds_total"] > 0.0


def _targets() -> list[str]:
    """What Ray's service discovery file offers to Prometheus."""
    file = Path(local_cluster().temp_dir) / "prom_metrics_service_discovery.json"
    groups = json.loads(file.read_text())
    return [str(target) for group in groups for target in group["targets"]]


def _sample(line: str) -> tuple[str, dict[str, str], float] | None:
    match = re.fullmatch(r"ray_(relit_\w+)\{(.*)\} (\S+)", line)
    if match is None:
        return None
    return match[1], dict(re.findall(r'(\w+)="([^"]*)"', match[2])), float(match[3])


def until(look: Callable[[], Found], ready: Callable[[Found], bool]) -> Found:
    """Look again and again until `ready`; fails with what was seen last."""
    deadline_s = time.monotonic() + WAIT_S
    seen = look()
    while not ready(seen):
        assert time.monotonic() < deadline_s, seen
        time.sleep(POLL_S)
        seen = look()
    return seen
