"""Saving steps back for training: a lower priority for its threads alone, a cap that is kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from relit_platform.node.task_thread import TaskThread
from relit_platform.node.yielding import LOWEST, DiskPace, step_back


def in_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns in a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(10)
    return found[0]


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("steps", [0, 3, LOWEST, 100])
def test_only_the_thread_that_asks_steps_back_and_what_it_starts(steps: int) -> None:
    ours = niceness()

    def work() -> tuple[bool, int, int]:
        return step_back(steps), niceness(), in_thread(niceness)

    done, own, child = in_thread(work)
    wanted = min(LOWEST, ours + steps)
    assert (own, child) == (wanted, wanted)
    assert done == (steps == 0 or wanted > ours)
    assert niceness() == ours


def test_a_priority_that_cannot_be_had_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refused)
    assert in_thread(lambda: step_back(3)) is False


def test_a_task_thread_begins_with_it() -> None:
    before = niceness()
    found: list[int] = []
    over = threading.Event()

    def look() -> None:
        found.append(niceness())
        over.set()

    tasks = TaskThread("t", 2, lambda name, error: None, lambda: step_back(2))
    tasks.start()
    tasks.submit("look", look)
    assert over.wait(10) and tasks.close(10)
    assert found == [min(LOWEST, before + 2)]


class Time:
    """A clock that goes on only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_the_cap_holds_over_many_pieces() -> None:
    time = Time()
    pace = DiskPace(1000, clock=lambda: time.now_s, sleep=time.sleep)
    for num_bytes in (500, 2000, 100, 400, 1000):
        pace.take(num_bytes)
    assert time.now_s == pytest.approx(50.0 + 3.0)  # the last piece still has to be paid for
    pace.take(1)
    assert time.now_s == pytest.approx(50.0 + 4.0)


def test_an_idle_disk_saves_up_nothing() -> None:
    time = Time()
    pace = DiskPace(1000, clock=lambda: time.now_s, sleep=time.sleep)
    time.now_s += 3600.0
    for _ in range(3):
        pace.take(1000)
    assert time.now_s == pytest.approx(3650.0 + 2.0)


@pytest.mark.parametrize(("bytes_per_s", "urgent"), [(0, ""), (1, "last"), (1, "stop")])
def test_without_a_cap_or_in_a_hurry_nothing_waits(bytes_per_s: int, urgent: str) -> None:
    time = Time()
    pace = DiskPace(bytes_per_s, clock=lambda: time.now_s, sleep=time.sleep)
    if urgent:
        pace.hurry(urgent)
    for _ in range(5):
        pace.take(1 << 30)
    assert time.now_s == 50.0


def test_the_cap_holds_again_when_nothing_is_urgent_any_more() -> None:
    time = Time()
    pace = DiskPace(1000, clock=lambda: time.now_s, sleep=time.sleep)
    pace.hurry("stop")
    pace.hurry("last")
    pace.calm("last")
    pace.take(5000)
    assert time.now_s == 50.0, "the stop is still asked for"
    pace.calm("stop")
    pace.calm("stop")
    pace.take(1000)
    pace.take(1000)
    assert time.now_s == pytest.approx(51.0)


def test_who_waits_for_the_cap_goes_on_at_once_when_it_becomes_urgent() -> None:
    pace = DiskPace(1)
    pace.take(1 << 30)  # paid for in some thirty years
    thread = threading.Thread(target=lambda: pace.take(1))
    thread.start()
    pace.hurry("last")
    thread.join(10)
    assert not thread.is_alive()
