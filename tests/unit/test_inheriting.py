"""Ray started anew on a host: what shared memory held is the next node's, and nothing leaks."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_harness import LAYOUT, Node, abandon, fail_rename, snapshot, worker

from relit import doctor
from relit_platform.errors import BudgetError
from relit_platform.facts import Fact, ShardPersisted
from relit_platform.node import inheriting, slot_pool
from relit_platform.node import keeper as keeper_module
from relit_platform.node.adoption import claim
from relit_platform.node.keeper import NodeKeeper
from relit_platform.node.slots import Slot, create_slot

OLD, NEW = "aaaaaaaa11", "bbbbbbbb22"


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    """Owner of the old node; it lives until the test ends it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def boot(node: Node, node_id: str, owner_pid: int, run_id: str = "run-1") -> NodeKeeper:
    keeper = NodeKeeper(
        node_id,
        run_id,
        node.config,
        node.store,
        node.facts.append,
        clock=time.time,
        owner_pid=owner_pid,
    )
    keeper.start()
    node.keepers.append(keeper)
    return keeper


def facts_of(node: Node, kind: str) -> list[dict[str, Any]]:
    return [f.data for f in node.facts if isinstance(f, Fact) and f.kind == kind]


def left_behind(node: Node, raylet: subprocess.Popen[bytes]) -> str:
    """A node with two snapshots, of which the first waits for the disk, that ends at once."""
    old = boot(node, OLD, raylet.pid)
    worker_process = node.child()
    paths = worker(old, "aaaaaaaa-w0", worker_process)
    abandon(old)  # before it sees the pin
    snapshot(old, paths[0], 7)
    snapshot(old, paths[1], 8)
    Slot.open(paths[1]).unpin()
    end(node.children[-1])
    return paths[1]


def test_the_next_node_has_the_snapshots_of_the_last(
    node: Node, raylet: subprocess.Popen[bytes]
) -> None:
    newest = left_behind(node, raylet)
    size = os.stat(newest).st_size
    end(raylet)
    new = boot(node, NEW, os.getpid())
    held = {(info.step, info.node_id) for info in new.inventory().memory}
    assert held == {(7, NEW), (8, NEW)}
    [persisted] = node.wait_for(ShardPersisted)
    assert (persisted.step, persisted.node_id) == (7, NEW)
    assert os.listdir(node.shm / "relit" / "run-1") == [NEW[:8]]
    assert facts_of(node, "agent.inherited") == [
        {"node": OLD[:8], "slots": 2, "num_bytes": 2 * size, "reason": ""}
    ]
    moved = node.shm / "relit" / "run-1" / NEW[:8] / "slots" / Path(newest).name
    assert bytes(Slot.open(str(moved)).image[LAYOUT.header_bytes :]) == bytes([8]) * 20_000


def test_a_node_whose_raylet_lives_is_left_alone(
    node: Node, raylet: subprocess.Popen[bytes]
) -> None:
    newest = left_behind(node, raylet)
    new = boot(node, NEW, os.getpid())
    assert new.inventory().memory == () and os.path.exists(newest)
    assert facts_of(node, "agent.inherited") == []


def test_a_worker_that_outlived_its_raylet_is_ended_first(
    node: Node, raylet: subprocess.Popen[bytes]
) -> None:
    old = boot(node, OLD, raylet.pid)
    pid = node.child()
    snapshot(old, worker(old, "aaaaaaaa-w0", pid)[0], 7)
    abandon(old)
    end(raylet)
    new = boot(node, NEW, os.getpid())
    assert node.children[-1].wait(10) == -9
    assert [info.step for info in new.inventory().memory] == [7]


def test_one_that_does_not_die_keeps_its_memory(
    node: Node, raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = left_behind(node, raylet)
    end(raylet)
    with monkeypatch.context() as patch:
        patch.setattr(inheriting, "kill_and_wait", lambda pid, ticks, timeout_s: False)
        first = boot(node, NEW, os.getpid())
    [found] = facts_of(node, "agent.inherited")
    assert "does not die" in found["reason"] and found["slots"] == 0
    assert first.inventory().memory == () and os.path.exists(newest)
    abandon(first)
    again = boot(node, NEW, os.getpid())
    assert sorted(info.step for info in again.inventory().memory) == [7, 8]


def test_cut_short_at_every_rename_it_is_finished_later(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = str(node.shm / "relit" / "r" / "ours")
    os.makedirs(f"{ours}/slots")
    for fail_at in range(1, 10):
        orphan = node.shm / "relit" / "r" / f"old-{fail_at}"
        (orphan / "slots").mkdir(parents=True)
        pid = node.child()
        claim(str(orphan), pid)
        end(node.children[-1])
        for number in range(2):
            create_slot(str(orphan / "slots" / f"w{fail_at}.{number}.slot"), 100, 10)
        with monkeypatch.context() as patch:
            calls = fail_rename(patch, fail_at, KeyboardInterrupt)
            with contextlib.suppress(KeyboardInterrupt):  # the agent dies at this point
                inheriting.inherit(ours, 1.0)
        inheriting.inherit(ours, 1.0)
        assert os.listdir(node.shm / "relit" / "r") == ["ours"]
        assert len(os.listdir(f"{ours}/slots")) == 2 * fail_at
        if calls[0] < fail_at:
            break
    assert fail_at == 4  # the folder, two slots, and one more try


@pytest.mark.parametrize("fail_at", [1, 2])
def test_what_cannot_be_moved_is_said_and_keeps_no_agent_from_starting(
    node: Node, raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    left_behind(node, raylet)
    end(raylet)
    ours = str(node.shm / "relit" / "run-1" / NEW[:8])
    os.makedirs(f"{ours}/slots")
    with monkeypatch.context() as patch:
        fail_rename(patch, fail_at)
        [found] = inheriting.inherit(ours, 1.0)
    assert (found.reason, found.slots) == ("injected", 0)
    [found] = inheriting.inherit(ours, 1.0)
    assert (found.reason, found.slots) == ("", 2)


def test_copies_of_other_nodes_come_along(node: Node) -> None:
    ours = node.shm / "relit" / "r" / "ours"
    for name, owner in (("old-1", "1"), ("old-2", "2")):
        peers = ours.parent / name / "peers"
        peers.mkdir(parents=True)
        claim(str(peers.parent), node.child())
        end(node.children[-1])
        for file in ("rank-00001.0.slot", "rank-00001.0.slot.offer", f"rank-00001.{owner}.slot"):
            (peers / file).write_text(owner)
    ours.mkdir()
    found = inheriting.inherit(str(ours), 1.0)
    assert [(f.node, f.slots, f.num_bytes) for f in found] == [("old-1", 2, 3), ("old-2", 2, 3)]
    texts = {path.name: path.read_text() for path in (ours / "peers").iterdir()}
    assert texts == {
        "rank-00001.0.slot": "1",
        "rank-00001.0.slot.offer": "1",
        "rank-00001.1.slot": "1",
        "rank-00001.2.slot": "2",
        "rank-00001.2.slot.offer": "2",
        "rank-00001.4.slot": "2",
    }


def test_what_a_node_had_not_finished_to_take_over_comes_along(node: Node) -> None:
    ours, theirs = (node.shm / "relit" / "r" / name for name in ("ours", "theirs"))
    nested = theirs / "adopted-first" / "slots"
    for slots in (nested, theirs / "slots"):
        slots.mkdir(parents=True)
        (slots / f"{slots.parent.name}.0.slot").write_text("x")
    claim(str(theirs), node.child())
    end(node.children[-1])
    ours.mkdir()
    [found] = inheriting.inherit(str(ours), 1.0)
    assert (found.node, found.slots) == ("theirs", 2)
    assert sorted(os.listdir(ours / "slots")) == ["adopted-first.0.slot", "theirs.0.slot"]


def another_runs_memory(node: Node) -> Path:
    """A node folder of a run whose raylet is gone."""
    folder = node.shm / "relit" / "run-2" / "cccccccc"
    (folder / "slots").mkdir(parents=True)
    claim(str(folder), node.child())
    end(node.children[-1])
    create_slot(str(folder / "slots" / "w.0.slot"), 50_000, 10)
    return folder


def test_other_runs_keep_theirs_until_tmpfs_is_full(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = another_runs_memory(node)
    keeper = boot(node, NEW, os.getpid())
    assert other.exists()

    def create(path: str, image_bytes: int, extras_capacity: int) -> None:
        if other.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        create_slot(path, image_bytes, extras_capacity)

    monkeypatch.setattr(slot_pool, "create_slot", create)
    assert len(worker(keeper)) == 2
    assert not other.exists()
    [said] = facts_of(node, "agent.gave_back")
    assert said["num_bytes"] > 50_000


def test_nothing_but_a_full_tmpfs_is_a_reason_to_take_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = another_runs_memory(node)
    keeper = boot(node, NEW, os.getpid())
    keeper.hello("w0", os.getpid(), epoch=1)
    with pytest.raises(BudgetError):
        keeper.open_slots("w0", 2, node.config.memory_budget_bytes, 100)

    def create(path: str, image_bytes: int, extras_capacity: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(slot_pool, "create_slot", create)
    with pytest.raises(BudgetError):
        keeper.open_slots("w0", 2, 1000, 100)
    assert other.exists()


def test_of_another_containers_node_nobody_can_tell(node: Node) -> None:
    """Two containers may share a host's memory and its name, and see no process of each other."""
    other = another_runs_memory(node)
    owner = json.loads((other / "owner.json").read_text())
    (other / "owner.json").write_text(json.dumps({**owner, "pid_namespace": "pid:[1]"}))
    ours = node.shm / "relit" / "run-1" / NEW[:8]
    ours.mkdir(parents=True)
    assert inheriting.give_back(str(ours)) == 0 and other.exists()
    (other / "owner.json").write_text(json.dumps(owner))
    assert inheriting.give_back(str(ours)) > 50_000 and not other.exists()


def test_a_tmpfs_that_is_full_of_the_runs_own_memory_keeps_no_agent_from_starting(
    node: Node, raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    left_behind(node, raylet)
    end(raylet)

    def claimed(folder: str, owner_pid: int) -> None:
        if (node.shm / "relit" / "run-1" / OLD[:8]).exists() and str(node.shm) in folder:
            raise OSError(errno.ENOSPC, "No space left on device")
        claim(folder, owner_pid)

    monkeypatch.setattr(keeper_module, "claim", claimed)
    new = boot(node, NEW, os.getpid())
    assert sorted(info.step for info in new.inventory().memory) == [7, 8]
    assert [said["slots"] for said in facts_of(node, "agent.inherited")] == [2]


def test_the_doctor_says_what_nobody_keeps(node: Node) -> None:
    boot(node, NEW, os.getpid())
    assert doctor._abandoned(str(node.shm)).level == "ok"
    another_runs_memory(node)
    found = doctor._abandoned(str(node.shm))
    assert found.level == "warn" and "run-2" in found.found and str(node.shm) in found.found
