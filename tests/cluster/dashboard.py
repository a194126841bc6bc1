"""What Ray's own dashboard and metrics endpoint say about a run, as its surfaces see it."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from relit.cluster import ClusterInfo, read_record

WAIT_S = 120.0  # Ray passes metrics on every ten seconds
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
    """Newest value by `name` or `name{label}` of a run's metrics, over all Prometheus targets."""
    found: dict[str, float] = {}
    for target in _targets():
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        for name, labels, value in filter(None, map(_sample, lines)):
            if labels.get("run") == run_id:
                own = labels.get("tier") or labels.get("state") or labels.get("cause")
                found[f"{name}{{{own}}}" if own else name] = value
    return found


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
