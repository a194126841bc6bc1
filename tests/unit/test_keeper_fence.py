"""The keeper: what is published once stays, what is old is refused, the dead are reported."""

import dataclasses
import errno
import gc
import os
import threading
import time
import weakref
from typing import Any

import pytest
from node_harness import (
    NODE,
    Node,
    abandon,
    manifest_of,
    persisted,
    snapshot,
    worker,
)

from relit_platform.errors import PlatformError
from relit_platform.facts import ShardFailed, ShardPersisted, WorkerExited
from relit_platform.node import adoption, fencing, workers
from relit_platform.node import keeper as keeper_module
from relit_platform.node.fencing import Fence, load_fence
from relit_platform.node.heartbeat import ControlPage, HeartbeatPage
from relit_platform.node.keeper import NodeKeeper
from relit_platform.node.processes import kill_and_wait
from relit_platform.node.task_thread import TaskThread
from relit_storage.errors import CommitConflictError, FencedError, ManifestError
from relit_storage.run.layout import manifest_key

# ---- publish, fence ----


def test_publishing_is_exclusive_and_repeatable(node: Node) -> None:
    keeper = node.boot()
    shard = persisted(node, keeper, worker(keeper)[0], step=7)
    data = manifest_of(shard)
    keeper.publish(7, 1, data)
    keeper.publish(7, 1, data)
    with pytest.raises(CommitConflictError):
        keeper.publish(7, 1, manifest_of(shard, created_at_s=2.0))
    assert (node.root / manifest_key(7, 1)).read_bytes() == data


def test_a_manifest_that_this_node_cannot_keep_is_refused(node: Node) -> None:
    keeper = node.boot()
    shard = persisted(node, keeper, worker(keeper)[0], step=7)
    other = dataclasses.replace(shard, checksums=("00",) * len(shard.checksums))
    for data in (manifest_of(other), manifest_of(shard)[:-1]):
        with pytest.raises(ManifestError):
            keeper.publish(7, 1, data)
    with pytest.raises(ManifestError):
        keeper.publish(8, 1, manifest_of(shard))
    (node.root / shard.file).unlink()
    with pytest.raises(ManifestError, match="not on this node"):
        keeper.publish(7, 1, manifest_of(shard))
    assert keeper.inventory().manifests == ()


def test_an_older_generation_is_refused(node: Node) -> None:
    keeper = node.boot()
    path = worker(keeper)[0]
    old = persisted(node, keeper, path, step=7, generation=1)
    new = persisted(node, keeper, path, step=6, generation=2)
    keeper.publish(6, 2, manifest_of(new))
    with pytest.raises(FencedError):
        keeper.publish(7, 1, manifest_of(old))
    keeper.seal(epoch=1, generation=3)  # this very process is a worker of epoch 1
    with pytest.raises(FencedError):
        keeper.publish(6, 2, manifest_of(new))
    snapshot(keeper, path, 9, generation=2)
    keeper.persist("w0", path, 9, 2)
    assert "generation 2 is over" in node.wait_for(ShardFailed)[0].reason


def test_a_manager_vouches_for_one_step_of_an_older_generation(node: Node) -> None:
    keeper = node.boot()
    paths = worker(keeper)
    keeper.seal(epoch=1, generation=3)  # this very process is a worker of epoch 1
    for path, step in zip(paths, (7, 8), strict=False):
        snapshot(keeper, path, step, generation=2)
    keeper.persist("w0", paths[0], 7, 2, vouched=1)
    shard = node.wait_for(ShardPersisted)[0]
    keeper.persist("w0", paths[1], 8, 2)
    assert "generation 2 is over" in node.wait_for(ShardFailed)[0].reason, "the rank's own word"
    keeper.publish(7, 2, manifest_of(shard))
    keeper.seal(epoch=1, generation=3)
    with pytest.raises(FencedError):
        keeper.publish(7, 2, manifest_of(shard))
    assert [place[:2] for place in keeper.inventory().manifests] == [(7, 2)]


def test_a_manager_whose_epoch_is_over_vouches_for_nothing(node: Node) -> None:
    keeper = node.boot()
    path = worker(keeper)[0]
    snapshot(keeper, path, 7, generation=2)
    keeper._fence.seal(epoch=2, generation=3)  # without the end of this very process
    with pytest.raises(FencedError):
        keeper.persist("w0", path, 7, 2, vouched=1)
    with pytest.raises(FencedError):
        keeper.publish(7, 2, b"")


def test_seal_kills_older_epochs_and_lasts(node: Node) -> None:
    keeper = node.boot()
    keeper.hello("old", node.child(), epoch=1)
    keeper.hello("new", node.child(), epoch=2)
    keeper.seal(epoch=2, generation=5)
    assert node.children[0].wait(5) == -9
    assert node.children[1].poll() is None
    with pytest.raises(FencedError):
        keeper.hello("late", os.getpid(), epoch=1)
    with pytest.raises(FencedError):
        keeper.seal(epoch=1, generation=9)
    keeper.seal(epoch=2, generation=4)
    abandon(keeper)
    again = node.boot()
    assert again.inventory().fence == 5
    with pytest.raises(FencedError):
        again.hello("late", os.getpid(), epoch=1)


def test_a_later_node_of_this_host_inherits_the_disk_and_the_memory(node: Node) -> None:
    first = node.boot()
    shard = persisted(node, first, worker(first, pid=node.child())[0], step=7)
    first.publish(7, 1, manifest_of(shard))
    abandon(first)
    for owner in (node.root / "owner.json", node.shm / "relit" / "run-1" / NODE[:8] / "owner.json"):
        text = owner.read_text()
        owner.write_text(text.replace(f'"pid": {os.getpid()}', f'"pid": {2**22 + 1}'))
    later = NodeKeeper(
        "fedcba9876543210", "run-1", node.config, node.store, node.facts.append, clock=time.time
    )
    later.start()
    node.keepers.append(later)
    inventory = later.inventory()
    assert [(s.step, s.node_id) for s in inventory.disk] == [(7, "fedcba9876543210")]
    assert [place[:2] for place in inventory.manifests] == [(7, 1)]
    assert os.path.exists(os.path.join(inventory.disk_root, inventory.disk[0].file))
    assert [(s.step, s.node_id) for s in inventory.memory] == [(7, "fedcba9876543210")]
    assert os.listdir(node.shm / "relit" / "run-1") == ["fedcba98"]


# ---- workers ----


def test_the_end_of_a_process_is_reported_at_once(node: Node) -> None:
    keeper = node.boot()
    paths = keeper.hello("w1", node.child(), 1)
    page = HeartbeatPage.open(paths.heartbeat_path)
    page.beat(rank=1, generation=3, step=41, phase="backward")
    assert [(b.rank, b.step, b.phase) for b in keeper.heartbeats()] == [(1, 41, "backward")]
    node.children[0].kill()
    killed_s = time.monotonic()
    fact = node.wait_for(WorkerExited)[0]
    assert time.monotonic() - killed_s < 1.0
    assert (fact.worker_id, fact.pid) == ("w1", node.children[0].pid)
    assert (fact.last_step, fact.last_phase) == (41, "backward")
    assert keeper.heartbeats() == [] and not os.path.exists(paths.heartbeat_path)


def test_a_stop_reaches_the_workers_page(node: Node) -> None:
    keeper = node.boot()
    control = ControlPage.open(keeper.hello("w0", os.getpid(), 1).control_path)
    assert control.stop_requested == 0
    keeper.set_stop(3)
    assert control.stop_requested == 3


# ---- a full disk, a full memory, a process that does not die ----


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_keeps_no_node_out_of_a_restore(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = node.boot()
    keeper.hello("old", node.child(), 1)
    saved = load_fence(keeper._folders.fence)
    with monkeypatch.context() as full:
        full.setattr(fencing, "save_fence", no_space)
        keeper.seal(epoch=2, generation=5)
        assert [fact.worker_id for fact in node.wait_for(WorkerExited)] == ["old"]
        with pytest.raises(FencedError):
            keeper.hello("late", os.getpid(), 1)
    assert load_fence(keeper._folders.fence) == saved
    keeper.seal(epoch=2, generation=5)  # the same again, with room: now it is durable
    assert load_fence(keeper._folders.fence) == Fence(2, 5)


def test_an_agent_comes_back_on_a_full_disk(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    abandon(node.boot())
    monkeypatch.setattr(adoption, "write_file", no_space)
    node.boot()


def test_a_full_memory_hides_no_exit(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = node.boot()
    for name in ("a", "b"):
        keeper.hello(name, node.child(), 1)
    monkeypatch.setattr(workers, "write_file", no_space)
    for child in node.children:
        child.kill()
    assert {fact.worker_id for fact in node.wait_for(WorkerExited, 2)} == {"a", "b"}
    assert keeper.heartbeats() == []


def test_a_worker_that_does_not_die_spares_no_other(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = node.boot()
    stuck = node.child()
    for name, pid in (("stuck", stuck), ("one", node.child()), ("two", node.child())):
        keeper.hello(name, pid, 1)

    def kill(pid: int, ticks: int, timeout_s: float) -> bool:
        return pid != stuck and kill_and_wait(pid, ticks, timeout_s)

    monkeypatch.setattr(keeper_module, "kill_and_wait", kill)
    with pytest.raises(PlatformError, match="stuck"):
        keeper.seal(epoch=2, generation=1)
    assert {fact.worker_id for fact in node.wait_for(WorkerExited, 2)} == {"one", "two"}


def test_a_thread_that_waits_holds_nothing_of_its_last_task() -> None:
    class Held:
        """What a task works on."""

    thread = TaskThread("t", 1, lambda name, error: None)
    thread.start()
    held, done = Held(), threading.Event()
    seen = weakref.ref(held)

    def task(held: Held = held) -> None:
        done.set()

    thread.submit("key", task)
    del task, held
    assert done.wait(10)
    deadline_s = time.monotonic() + 10
    while thread.pending() or seen() is not None:
        gc.collect()
        assert time.monotonic() < deadline_s
    thread.close(1)
