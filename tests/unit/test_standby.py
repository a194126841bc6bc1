"""One idle process per node: when it is asked for, how it is found, what it has loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from relit_platform.node import standby
from relit_platform.node.processes import start_ticks
from relit_platform.node.standby import (
    LOOK_EVERY_S,
    RANK_OF,
    RAYLET_PID,
    REFUSED_MAX_S,
    REFUSED_S,
    SEEN_S,
    SETTLE_S,
    START_S,
    UNSEEN_MAX,
    Outlook,
    Seed,
    Standby,
    answered,
    heard,
    looked,
    sealed,
    standing,
)
from relit_platform.ray_train.prestart import HOOK, no_rank_env, rank_env
from relit_platform.run_config import RecoveryConfig, RunConfig, ScalingConfig
from relit_platform.worker.start import PRELOAD, THREADS

SEED = Seed(runtime_env='{"env_vars": {"A": "1"}}', job_id="01000000")
PROGRAM = """
import sys
from relit_platform.worker.start import preload
preload()
print("shlex" in sys.modules, flush=True)
sys.stdin.read()
"""
IDLE = "ray::IDLE"


def test_a_hello_puts_the_look_off_until_the_rank_has_started() -> None:
    first = heard(Outlook(), SEED, 100.0)
    assert first == Outlook(seed=SEED, look_at_s=100.0 + SETTLE_S)
    other = replace(SEED, job_id="02000000")  # after a resume: the newest rank counts
    assert heard(first, other, 102.0) == Outlook(seed=other, look_at_s=102.0 + SETTLE_S)


def started(ranks: int, epoch: int = 1) -> Outlook:
    """A node where so many ranks of an epoch have said hello by now."""
    outlook = Outlook()
    for number in range(ranks):
        outlook = heard(outlook, SEED, 100.0, epoch, number + 1)
    return outlook


@pytest.mark.parametrize(("there", "asked"), [(0, 4), (1, 3), (4, 0), (5, 0)])
def test_ranks_that_start_anew_are_asked_for_once_and_at_once(there: int, asked: int) -> None:
    outlook = sealed(started(4), 2, 101.0)
    assert outlook.look_at_s == 101.0
    assert sealed(outlook, 2, 102.0) == outlook  # it is told again
    outlook, missing = looked(outlook, 1, there, 101.0)
    assert missing == asked
    assert sealed(outlook, 2, 103.0) == outlook
    assert looked(outlook, 1, 1, 131.0)[1] == 0  # they went elsewhere: one is enough again


def test_the_first_seal_of_a_node_comes_when_its_ranks_are_there() -> None:
    assert sealed(started(4), 1, 101.0) == started(4)


def test_nothing_is_expected_where_no_rank_has_been() -> None:
    assert sealed(Outlook(), 4, 101.0) == Outlook(epoch=4)


def test_a_rank_that_came_before_the_look_is_expected_no_more() -> None:
    outlook = heard(sealed(started(2), 2, 101.0), SEED, 101.0, 2, 1)
    assert looked(outlook, 0, 0, 104.0)[1] == 1


@pytest.mark.parametrize(
    ("wanted", "there", "missing", "pause_s"),
    [
        (1, 0, 1, START_S),
        (1, 1, 0, LOOK_EVERY_S),
        (3, 1, 2, START_S),
        (8, 0, 8, START_S),
        (1, 4, 0, LOOK_EVERY_S),  # taken over from an earlier agent, or a rank without a hello yet
    ],
)
def test_a_look_asks_for_what_is_missing(
    wanted: int, there: int, missing: int, pause_s: float
) -> None:
    known = heard(Outlook(), SEED, 0.0)
    later = replace(known, look_at_s=50.0 + pause_s, unseen=missing)
    if missing:
        later = replace(later, asked_until_s=50.0 + SEEN_S)
    assert looked(known, wanted, there, 50.0) == (later, missing)


@pytest.mark.parametrize("wanted", [1, 2, 8])
def test_one_that_never_shows_up_is_not_asked_for_ever(wanted: int) -> None:
    def asked(known: Outlook, looks: int, there: int = 0) -> tuple[Outlook, int]:
        total = 0
        for _ in range(looks):
            known, count = looked(known, wanted, there, 0.0)
            total += count
        return known, total

    known, total = asked(heard(Outlook(), SEED, 0.0), 20)
    assert total == UNSEEN_MAX * wanted and known.gave_up
    known, total = asked(heard(known, SEED, 0.0), 20)
    assert total == 1  # a rank has started: it may have been in one of them
    known, total = asked(known, 1, there=wanted)
    assert total == 0
    assert asked(known, 20)[1] == UNSEEN_MAX * wanted  # it was seen, and is gone


def test_nothing_is_asked_before_a_rank_has_said_how_it_was_started() -> None:
    assert looked(Outlook(), 1, 0, 50.0)[1] == 0


def test_a_raylet_that_refuses_is_asked_less_and_less() -> None:
    known = heard(Outlook(), SEED, 0.0)
    pauses = []
    for _ in range(9):
        known, asked = looked(known, 1, 0, 0.0)
        assert asked == 1
        known = answered(known, "UNAVAILABLE", asked, 0.0)
        pauses.append(known.look_at_s)
    assert pauses[:3] == [REFUSED_S, 2 * REFUSED_S, 4 * REFUSED_S]
    assert pauses[-1] == REFUSED_MAX_S
    assert answered(known, "", 1, 0.0).refused == 0


def config(gpus: float, **env_vars: str) -> RunConfig:
    """Of a run whose ranks have so many GPUs."""
    return RunConfig(
        run_id="r1", name="r", experiment="e", store="memory://x", run_key="r", entry="",
        code_key="", code_sha="", scaling=ScalingConfig(gpus_per_worker=gpus), env_vars=env_vars,
    )  # fmt: skip


class Node:
    """A Standby whose raylet notes what it is asked for, and refuses while `refusal` is set."""

    def __init__(self, wanted: int = 1) -> None:
        self.asked: list[tuple[Seed, int]] = []
        self.said: list[str] = []
        self.refusal = ""
        self.looked = threading.Semaphore(0)
        self.told = threading.Event()
        self.standby = Standby(
            run_id="run-standby",
            wanted=wanted,
            ranks=lambda: {1},
            ask=self._ask,
            say=self._say,
            clock=time.monotonic,
        )

    def _say(self, why: str) -> None:
        self.said.append(why)
        self.told.set()

    def _ask(self, seed: Seed, count: int) -> None:
        self.asked.append((seed, count))
        self.looked.release()
        if self.refusal:
            raise ConnectionError(self.refusal)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between looks."""
    for name in ("SETTLE_S", "SEEN_S", "START_S", "LOOK_EVERY_S", "REFUSED_S"):
        monkeypatch.setattr(standby, name, 0.001)


@pytest.mark.usefixtures("at_once")
def test_a_node_asks_until_there_is_one_and_says_once_that_it_is_refused() -> None:
    node = Node()
    node.refusal = "no such call"
    node.standby.start()
    try:
        node.standby.offer(None)
        node.standby.offer(SEED)
        for _ in range(UNSEEN_MAX + 2):
            assert node.looked.acquire(timeout=30)
    finally:
        node.standby.close()
    assert set(node.asked) == {(SEED, 1)}
    assert node.said == ["ConnectionError: no such call"]


@pytest.mark.usefixtures("at_once")
def test_a_node_whose_processes_do_not_show_up_says_so_and_stops() -> None:
    node = Node()
    node.standby.start()
    try:
        node.standby.offer(SEED)
        assert node.told.wait(30)
    finally:
        node.standby.close()
    assert node.asked == [(SEED, 1)] * UNSEEN_MAX
    assert node.said == ["those asked for do not show up; the next is asked for at a hello"]


def test_a_node_where_something_stands_between_raylet_and_process_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RAYLET_PID, "1")
    node = Node()
    node.standby.start()
    node.standby.offer(SEED)
    node.standby.close()
    assert (node.asked, len(node.said)) == ([], 1)


@pytest.mark.usefixtures("at_once")
def test_none_is_asked_for_where_none_is_wanted() -> None:
    node = Node(wanted=0)
    node.standby.start()
    node.standby.offer(SEED)
    node.standby.close()
    assert node.asked == []


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """A child of ours as the raylet starts it for a rank of run-standby, loaded and idle."""
    env = {**os.environ, RANK_OF: "run-standby", PRELOAD: "no_such_module_at_all,shlex"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)  # by such a name Python does not find its own
    child = subprocess.Popen(
        [IDLE, "-c", PROGRAM],
        executable=sys.executable,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield child
    child.kill()
    child.communicate()


def test_a_standby_process_is_found_loaded_and_ended_with_the_run(
    process: subprocess.Popen[str],
) -> None:
    assert process.stdout is not None
    assert "no_such_module_at_all could not be loaded ahead" in process.stdout.readline()
    assert process.stdout.readline() == "True\n"
    mine = os.getpid()
    (found,) = standing("run-standby", mine, (), idle=True)
    assert (found.pid, found.start_ticks) == (process.pid, start_ticks(process.pid))
    assert standing("run-standby", mine, {process.pid}) == []  # it is a rank by now
    assert standing("run-standby", os.getppid(), ()) == []  # a rank's own child has its environment
    assert standing("run-stand", mine, ()) == []


def test_a_process_that_still_loads_counts_but_does_not_wait() -> None:
    env = {**os.environ, RANK_OF: "run-standby"}
    with subprocess.Popen([IDLE, "30"], executable="/bin/sleep", env=env) as child:
        try:
            assert [key.pid for key in standing("run-standby", os.getpid(), ())] == [child.pid]
            assert standing("run-standby", os.getpid(), (), idle=True) == []
        finally:
            child.kill()


def test_what_an_actor_of_the_users_runs_in_is_left_alone() -> None:
    env = {**os.environ, RANK_OF: "run-standby"}
    with subprocess.Popen(["ray::Helper", "30"], executable="/bin/sleep", env=env) as child:
        try:
            assert standing("run-standby", os.getpid(), ()) == []
        finally:
            child.kill()


def test_closing_ends_what_stands_by_and_no_rank(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)  # as if we were the raylet
    Node().standby.close()
    assert process.wait(30) == -9


def test_ranks_with_gpus_load_no_torch_ahead_and_other_actors_nothing() -> None:
    with_cpu, with_gpu = (rank_env(config(gpus))[PRELOAD].split(",") for gpus in (0.0, 1.0))
    assert "torch._dynamo" in with_cpu
    loaded = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    loaded += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded, *with_gpu]).returncode == 0
    assert subprocess.run([sys.executable, "-c", loaded, *with_cpu]).returncode == 1
    assert set(no_rank_env().values()) == {""}
    none = replace(config(0.0), recovery=RecoveryConfig(standby_processes=0))
    assert rank_env(none) == {}
    assert rank_env(config(0.0)).keys() == no_rank_env().keys() == {HOOK, PRELOAD, RANK_OF, THREADS}
    assert "torch" not in rank_env(config(0.0, TORCH_COMPILE_DISABLE="1"))[PRELOAD]
