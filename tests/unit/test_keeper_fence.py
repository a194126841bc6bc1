"""The keeper: what is published once stays, what is old is refused, the dead are reported."""

import dataclasses
import os
import time

import pytest
from node_harness import (
    Node,
    abandon,
    manifest_of,
    persisted,
    snapshot,
    worker,
)

from relit_platform.facts import ShardFailed, WorkerExited
from relit_platform.node.heartbeat import ControlPage, HeartbeatPage
from relit_platform.node.keeper import NodeKeeper
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


def test_a_later_node_of_this_host_inherits_the_disk(node: Node) -> None:
    first = node.boot()
    shard = persisted(node, first, worker(first)[0], step=7)
    first.publish(7, 1, manifest_of(shard))
    abandon(first)
    owner = node.root / "owner.json"
    owner.write_text(owner.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {2**22 + 1}'))
    later = NodeKeeper(
        "fedcba9876543210", "run-1", node.config, node.store, node.facts.append, clock=time.time
    )
    later.start()
    node.keepers.append(later)
    inventory = later.inventory()
    assert [(s.step, s.node_id) for s in inventory.disk] == [(7, "fedcba9876543210")]
    assert [place[:2] for place in inventory.manifests] == [(7, 1)]
    assert os.path.exists(os.path.join(inventory.disk_root, inventory.disk[0].file))
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
