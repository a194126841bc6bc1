from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from run_files import Driver, FakeJobs, submit, write_code

from relit.client import Client
from relit.handle import JobHandle
from relit.reading import RunReader
from relit.run_state import START_GRACE_S, RunFiles, derive_state
from relit.wording import committed_line, event_line, spacing_line, state_line
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.run import layout
from relit_storage.run.lease import MARGIN_S
from relit_storage.stores.local import LocalStore

NOW = 1_000_000.0
LIVE = NOW + 10
GONE = NOW - 500
JUST = {"at_s": NOW - 1}
OLD = {"at_s": NOW - START_GRACE_S - 1}
ENDED = {"state": "STOPPED", "epoch": 1}

STATES: list[tuple[str, RunFiles, str]] = [
    ("result wins", RunFiles(result={"state": "FAILED"}, lease_until_s=LIVE), "FAILED"),
    ("live", RunFiles(status={"state": "RUNNING"}, lease_until_s=LIVE), "RUNNING"),
    ("live, no status yet", RunFiles(lease_until_s=LIVE), "PENDING"),
    ("old status", RunFiles(status=ENDED, epoch=2, lease_until_s=LIVE), "PENDING"),
    ("result is due", RunFiles(status=ENDED, epoch=1, lease_until_s=LIVE), "STOPPING"),
    ("within the margin", RunFiles(status={"state": "RUNNING"}, lease_until_s=NOW - 1), "RUNNING"),
    ("a tool's lease", RunFiles(status={"state": "RUNNING"}, lease_until_s=LIVE, tool="t"), "LOST"),
    ("import", RunFiles(submitted=False, lease_until_s=LIVE, tool="t"), "PENDING"),
    ("just submitted", RunFiles(attempt=JUST), "PENDING"),
    ("nothing submitted", RunFiles(submitted=False), "IMPORTED"),
    ("being imported", RunFiles(submitted=False, lease_until_s=LIVE), "PENDING"),
    ("imported", RunFiles(submitted=False, lease_until_s=0.0), "IMPORTED"),
    ("just resumed", RunFiles(attempt=JUST, lease_until_s=0.0), "PENDING"),
    ("resumed after a loss", RunFiles(attempt=JUST, lease_until_s=GONE), "PENDING"),
    ("never started", RunFiles(attempt=OLD), "LOST"),
    ("expired", RunFiles(status={"state": "RUNNING"}, attempt=OLD, lease_until_s=GONE), "LOST"),
    ("left", RunFiles(attempt=OLD, lease_until_s=0.0), "LOST"),
    ("died young", RunFiles(attempt={"at_s": NOW - 60}, lease_until_s=NOW - 20), "LOST"),
    ("nothing at all", RunFiles(), "LOST"),
]


@pytest.mark.parametrize(("files", "state"), [s[1:] for s in STATES], ids=[s[0] for s in STATES])
def test_state_follows_from_the_files_alone(files: RunFiles, state: str) -> None:
    found, reason = derive_state(files, "r", NOW)
    assert found == state
    assert ("relit resume r" in reason) == (state == "LOST")


@pytest.fixture
def job(tmp_path: Path) -> JobHandle:
    client = Client(store=str(tmp_path / "store"), transport=FakeJobs())
    return submit(client, write_code(tmp_path / "code"), run_id="run-1")


def test_a_whole_run_is_read_from_a_copy_of_its_directory(job: JobHandle, tmp_path: Path) -> None:
    now = time.time()
    driver = Driver(job.reader.store, job.id, now)
    driver.event("generation.formed", now, generation=1, step=0)
    driver.event("worker.exited", now + 1, level="warning", step=3)
    for step in (1, 2, 3):
        driver.rows.append({"step": step, "loss": 1.0 / step})
    driver.rows.flush(now)
    incident = json.dumps({"id": 1, "headline": "Incident 1"}).encode()
    driver.store.put(layout.incident_key(1), incident)
    driver.store.put("logs/w-1/000000.log", b"one\n")
    driver.store.put("logs/w-1/000001.log", b"two\n")
    driver.status(state="RUNNING", step=3, workers=[{"rank": 0, "worker_id": "w-1"}])
    driver.result(now + 2, state="SUCCEEDED", step=3, loss=0.33, value={"a": 1})
    shutil.copytree(tmp_path / "store" / "default", tmp_path / "copy" / "default")
    read = Client(transport=FakeJobs()).get(str(tmp_path / "copy" / "default" / "run-1"))
    assert [e["kind"] for e in read.events()] == ["generation.formed", "worker.exited"]
    assert [e["seq"] for e in read.events(since=1)] == [2]
    assert [row["step"] for row in read.metrics()] == [1, 2, 3]
    assert [i["headline"] for i in read.incidents()] == ["Incident 1"]
    assert list(read.logs(rank=0)) == ["one\n", "two\n"]
    assert (list(read.logs(rank=7)), read.reader.workers()) == ([], ["w-1"])
    status = read.status()
    assert (status["state"], status["loss"], status["value"]) == ("SUCCEEDED", 0.33, {"a": 1})
    assert read.result()["value"] == {"a": 1}


def test_following_ends_with_the_run_and_repeats_nothing(job: JobHandle) -> None:
    now = time.time()
    driver = Driver(job.reader.store, job.id, now)
    driver.event("one", now)
    seen: list[str] = []
    for event in job.events(follow=True):
        seen.append(event["kind"])
        if event["kind"] == "one":
            driver.event("two", now)
        else:
            driver.result(now, state="SUCCEEDED")
    assert seen == ["one", "two"]


def test_torn_files_are_passed_over(job: JobHandle) -> None:
    store = job.reader.store
    driver = Driver(store, job.id, time.time())
    for key in (layout.STATUS, layout.incident_key(1), layout.attempt_key(2)):
        store.put(key, b'{"state": "RUN')
    assert job.status()["state"] == "PENDING"
    assert job.incidents() == []
    assert len(job.reader.attempts()) == 1
    assert driver.lease.epoch == 1


def test_checkpoints_are_the_commits_in_force(job: JobHandle) -> None:
    log = CommitLog(job.reader.store)
    log.append_epoch(1, at_s=NOW)
    for step in (10, 20):
        key = layout.manifest_key(step, 1)
        log.append_commit(
            epoch=1, generation=1, step=step, manifest_key=key, manifest_sha256="0" * 64,
            manifest_bytes=1, at_s=NOW,
        )  # fmt: skip
    assert [c["step"] for c in job.reader.checkpoints()] == [20, 10]


def test_a_lease_is_judged_by_the_reader_s_clock(job: JobHandle, tmp_path: Path) -> None:
    Driver(job.reader.store, job.id, NOW, ttl_s=10)
    store = LocalStore(str(tmp_path / "store"))
    clock = iter([NOW, NOW + 10 + MARGIN_S + 1])
    reader = RunReader(store, job.reader.run_key, clock=lambda: next(clock))
    assert [reader.is_driven(), reader.is_driven()] == [True, False]


EVENTS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"kind": "a.b", "t": 1.25, "gen": 2, "step": 7, "data": {"x": 0.5, "at_s": 1, "y": []}},
        ["1.2 s", "g2", "step 7", "a.b", "x=0.5"],
    ),
    ({"kind": "incident.closed", "t": 1, "data": {"headline": "H."}}, ["incident.closed: H."]),
    ({"kind": "log.refused", "t": None, "level": "error", "data": None}, ["ERROR log.refused"]),
]


@pytest.mark.parametrize(("event", "words"), EVENTS)
def test_event_lines(event: dict[str, Any], words: list[str]) -> None:
    for word in words:
        assert word in event_line(event)


def test_state_and_commit_lines() -> None:
    status = {"run_id": "r", "state": "RUNNING", "step": 5, "total_steps": 9, "loss": 1.5}
    assert state_line(status) == "r RUNNING at step 5/9, loss 1.5000"
    assert committed_line({"committed": {"disk": 4, "memory": 5}}) == "memory 5, disk 4"
    assert committed_line({"committed": {"disk": None}}) == "none yet"


@pytest.mark.parametrize(
    ("spacing", "line"),
    [
        (None, ""),
        ({"reason": "x"}, ""),
        ({"disk_every_s": 12.456, "object_every_s": 75}, "disk every 12.5 s, object every 75 s"),
        ({"disk_every_s": "soon", "object_every_s": 75.0}, "object every 75 s"),
    ],
)
def test_the_spacing_that_a_run_has_set_by_itself(spacing: Any, line: str) -> None:
    assert spacing_line({"spacing": spacing}) == line


def test_a_result_that_came_while_we_looked_is_no_loss(
    job: JobHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    Driver(job.reader.store, job.id, time.time() - 500).result(time.time(), state="SUCCEEDED")
    looks = [None]
    read = job.reader.result
    monkeypatch.setattr(job.reader, "result", lambda: looks.pop() if looks else read())
    monkeypatch.setattr(job.reader, "_clock", lambda: time.time() + START_GRACE_S + 1)
    assert job.status()["state"] == "SUCCEEDED"
