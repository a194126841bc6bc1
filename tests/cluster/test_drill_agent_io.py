"""The agent dies for real in the middle of a persist and of an upload, then the whole node."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import damage
import harness
import heavy
import leaks
import pytest
import victims

from relit.handle import JobHandle
from relit_platform.control.object_tier import ObjectTier
from relit_platform.facts import RestorePlan
from relit_platform.machines.lineage import Lineage
from relit_platform.machines.restore import plan_restore
from relit_platform.worker.restore import load_plan
from relit_storage.checkpoint.commit_log import CommitLog

pytestmark = pytest.mark.cluster

STEPS, MEGABYTES, PAUSE_S = 160, 128, 0.05
FROM_STEP = 25  # a step on disk and one in the object tier are whole by then
DISK_EVERY = 10
SHAPE: dict[str, Any] = {
    "entry": "heavy.py:train",
    "config": {"steps": STEPS, "megabytes": MEGABYTES, "pause_s": PAUSE_S},
    "env": {"working_dir": str(Path(__file__).parent)},
    "checkpoint": {"disk_every_steps": DISK_EVERY, "object_every_steps": 20},
}


def being_persisted(lab: Any, run_id: str) -> list[Path]:
    """Unfinished shard files on the disk tier."""
    found = leaks.paths_below(lab.root / "disk" / run_id)
    return [path for path in found if path.name.startswith(".") and "safetensors" in path.name]


def being_uploaded(lab: Any) -> list[Path]:
    """Unfinished objects of the store that are larger than any log segment."""
    found = (lab.root / "store" / ".tmp").glob("*")
    return [path for path in found if size_bytes(path) > 1 << 20]


def size_bytes(path: Path) -> int:
    """0 for a file that was renamed since it was listed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def cut_short(job: JobHandle, at_work: Callable[[], list[Path]], whom: list[str]) -> list[Path]:
    """Kill them all while `at_work` finds unfinished files, and again until some stay unfinished.

    A kill that comes a moment too late finds the files renamed; then the next save is waited for.
    """
    while True:
        status = harness.until(job, agents_live)
        pids = [pid for what in whom for pid in victims.pids_of(job, status, what)]
        while not (found := at_work()):
            assert job.status()["state"] == "RUNNING", job.status()
        harness.kill(*pids)
        left = [path for path in found if path.exists()]
        if left:
            return left


def agents_live(status: Mapping[str, Any]) -> bool:
    """The agents that the status names are those of now, not killed ones."""
    return bool(status["agents"]) and all(harness.alive(int(a["pid"])) for a in status["agents"])


def check_end(lab: Any, job: JobHandle, calm: dict[int, float]) -> None:
    """The same losses as ever, and every commit of the object tier is whole and of one step."""
    assert job.wait(timeout_s=harness.WAIT_S)["state"] == "SUCCEEDED", job.status()
    assert harness.losses(job) == harness.head(calm, STEPS)
    assert [row["step"] for row in job.metrics()] == list(range(1, STEPS + 1))
    store = job.reader.store
    commits = ObjectTier(store, CommitLog(store), time.time).commits()
    assert commits[0].step == STEPS
    for commit in commits:
        plan = plan_restore([], [commit], Lineage(), (), ())
        assert isinstance(plan, RestorePlan)
        tensors, _ = load_plan(plan, store)
        parts = [tensor for name, tensor in tensors.items() if "part_" in name]
        found = {value for part in parts for value in part[::1000].tolist()}
        assert found == {heavy.PER_STEP * commit.step}
    assert lab.leaks(job.id) == []


def test_in_the_middle_of_a_persist_and_of_an_upload(lab: Any, calm: dict[int, float]) -> None:
    """First the agent alone. Then agent and ranks at once, and what was in memory is gone: the
    step before the one that was being written is restored.
    """
    job = lab.submit("heavy", **SHAPE)
    harness.at_step(job, FROM_STEP)
    cut_short(job, lambda: being_persisted(lab, job.id), ["agent"])
    cut_short(job, lambda: being_uploaded(lab), ["agent"])
    left = cut_short(job, lambda: being_persisted(lab, job.id), ["agent", "ranks"])
    for slot in Path("/dev/shm/relit", job.id).glob("*/slots/*"):
        slot.unlink()
    check_end(lab, job, calm)
    formed = damage.formations(job)[-1]
    cut = int(left[0].parent.parent.name)
    assert (formed["source"], formed["tier"]) == ("checkpoint", "disk"), formed
    assert formed["start_step"] == cut - DISK_EVERY, (formed, left)
