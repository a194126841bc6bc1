"""The Ray job's driver without Ray: its loop, its exit codes, what it says and hides."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_files import Driver, FakeJobs, submit, write_code

from relit import entrypoint
from relit.client import Client
from relit.entrypoint import Entrypoint
from relit.handle import JobHandle

SECRET = "a-value-to-hide"


class Actor:
    """Stands for the supervisor's handle; remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.stop = self

    def remote(self, reason: str) -> None:
        self.told.append(reason)


@pytest.fixture
def job(tmp_path: Path) -> JobHandle:
    client = Client(store=str(tmp_path / "store"), transport=FakeJobs())
    return submit(client, write_code(tmp_path / "code"), run_id="r1")


@pytest.fixture
def drive(
    job: JobHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, Actor]]:
    """Run the entrypoint; `refused` is what each ensured supervisor says in turn."""
    monkeypatch.setattr(entrypoint, "_connect", lambda: None)
    monkeypatch.setattr(entrypoint, "_POLL_S", 0.01)
    monkeypatch.setattr(entrypoint, "_LOOK_S", 0.05)
    monkeypatch.setenv("MY_TOKEN", SECRET)

    def run(refused: str = "", at_start: Callable[[], Any] = lambda: None) -> tuple[int, Actor]:
        actor = Actor()
        own = Entrypoint(str(tmp_path / "store"), job.reader.run_key)

        def ensure() -> str:
            if own._actor is None:
                at_start()
            own._actor = actor
            return refused

        monkeypatch.setattr(own, "_ensure_supervisor", ensure)
        handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
        try:
            return own.run(), actor
        finally:
            for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
                signal.signal(number, handler)

    return run


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 100), ("STOPPED", 103)])
def test_it_prints_the_events_hides_secrets_and_exits_as_the_run(
    job: JobHandle, drive: Any, capsys: pytest.CaptureFixture[str], state: str, code: int
) -> None:
    def play() -> None:
        driver = Driver(job.reader.store, job.id, time.time())
        driver.event("one", time.time(), data={"text": f"got {SECRET}"})
        driver.result(time.time(), state=state, step=9)

    assert drive(at_start=play)[0] == code
    said = capsys.readouterr().out
    assert "one  text=got [MY_TOKEN]" in said
    assert f"r1 {state} at step 9" in said
    assert SECRET not in said


def test_sigterm_becomes_one_stop_command(job: JobHandle, drive: Any) -> None:
    driver = Driver(job.reader.store, job.id, time.time())

    def end_when_told() -> None:
        while not driver.store.list("control/"):
            time.sleep(0.01)
        time.sleep(0.05)
        driver.result(time.time(), state="STOPPED")

    def play() -> None:
        threading.Thread(target=end_when_told, daemon=True).start()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()

    code, actor = drive(at_start=play)
    assert code == 103
    assert actor.told == ["the job received SIGTERM"]
    assert driver.store.list("control/") == ["control/000001-stop.json"]


def test_a_run_that_another_driver_holds_is_left_alone(job: JobHandle, drive: Any) -> None:
    Driver(job.reader.store, job.id, time.time())
    assert drive(refused="held by another")[0] == 2
    assert job.reader.result() is None


def test_a_run_that_cannot_start_says_why_for_good(job: JobHandle, drive: Any) -> None:
    assert drive(refused=f"no module, {SECRET}")[0] == 100
    result = job.result()
    assert result["state"] == "FAILED"
    assert result["reason"] == "it could not start: no module, [MY_TOKEN]"


def test_a_resumed_run_s_log_begins_with_the_resume(
    job: JobHandle, drive: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = Driver(job.reader.store, job.id, time.time())
    driver.event("before", time.time())
    driver.result(time.time(), state="STOPPED")
    job.resume()

    def play() -> None:
        again = Driver(job.reader.store, job.id, time.time())
        again.event("after", time.time())
        again.result(time.time(), state="SUCCEEDED")

    assert drive(at_start=play)[0] == 0
    said = capsys.readouterr().out
    assert "attempt 2 of r1; 1 earlier events" in said
    assert "before" not in said
    assert "after" in said
