"""Processes from outside: ends are seen, and only the meant process is killed."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from relit_platform.node.processes import ProcessKey, ProcessWatch, kill_and_wait, start_ticks


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as process:
        yield process
        process.kill()


def key_of(process: subprocess.Popen[bytes]) -> ProcessKey:
    ticks = start_ticks(process.pid)
    assert ticks is not None
    return ProcessKey(process.pid, ticks)


def test_an_end_is_seen_even_of_a_zombie(child: subprocess.Popen[bytes]) -> None:
    watch, key = ProcessWatch(), key_of(child)
    watch.add(key)
    watch.add(key)
    assert watch.poll() == []
    child.kill()
    assert watch.poll(wait_s=5.0) == [key]  # nobody has reaped it yet
    assert watch.poll() == []


def test_a_process_gone_before_is_reported_once(child: subprocess.Popen[bytes]) -> None:
    watch, key = ProcessWatch(), key_of(child)
    child.kill()
    child.wait()
    watch.add(key)
    assert watch.poll(wait_s=5.0) == [key]
    assert watch.poll() == []


def test_a_reused_pid_is_not_watched_and_not_killed(child: subprocess.Popen[bytes]) -> None:
    key = key_of(child)
    earlier = ProcessKey(key.pid, key.start_ticks - 1)
    watch = ProcessWatch()
    watch.add(earlier)
    assert watch.poll() == [earlier]
    assert kill_and_wait(earlier.pid, earlier.start_ticks, 5.0)
    assert child.poll() is None


def test_kill_waits_for_the_end(child: subprocess.Popen[bytes]) -> None:
    key = key_of(child)
    assert kill_and_wait(key.pid, key.start_ticks, 5.0)
    assert kill_and_wait(key.pid, key.start_ticks, 5.0)
    assert child.wait() == -9
    assert kill_and_wait(key.pid, key.start_ticks, 5.0)


def test_no_wait_when_nothing_ends(child: subprocess.Popen[bytes]) -> None:
    watch = ProcessWatch()
    watch.add(key_of(child))
    started_s = time.monotonic()
    assert watch.poll(wait_s=0.05) == []
    assert 0.04 < time.monotonic() - started_s < 2.0
    watch.close()


def test_start_ticks_of_nobody() -> None:
    assert start_ticks(2**22 + 1) is None
    assert start_ticks(os.getpid()) == start_ticks(os.getpid())
