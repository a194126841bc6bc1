"""The keeper: acknowledged means durable, restart means go on, close leaves nothing."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from node_harness import (
    LAYOUT,
    NODE,
    Node,
    abandon,
    manifest_of,
    persisted,
    snapshot,
    wait_until,
    worker,
)
from safetensors.torch import load_file

from relit_platform.errors import BudgetError, UsageError
from relit_platform.facts import ShardFailed, ShardPersisted, ShardUploaded, WorkerExited
from relit_platform.node import keeper as keeper_module
from relit_platform.node import persisting
from relit_platform.node.keeper import NodeKeeper
from relit_platform.node.persist import persist_slot
from relit_platform.node.slots import Slot, slot_file_bytes
from relit_platform.node.uploads import STALE_UPLOAD_S
from relit_storage.errors import StoreError
from relit_storage.run.layout import manifest_key

# ---- persist ----


def test_a_slot_becomes_files_that_others_can_load(node: Node) -> None:
    keeper = node.boot()
    shard = persisted(node, keeper, worker(keeper)[0], step=7)
    assert (shard.step, shard.rank, shard.world, shard.node_id) == (7, 0, 1, NODE)
    assert len(shard.checksums) == -(-LAYOUT.total_bytes // 8192)
    assert load_file(node.root / shard.file)["w"].tolist() == [7] * 20_000
    assert json.loads((node.root / shard.extras_file).read_bytes()) == {"step": 7}


def test_persisting_twice_answers_the_same(node: Node) -> None:
    keeper = node.boot()
    path = worker(keeper)[0]
    first = persisted(node, keeper, path, step=7)
    assert persisted(node, keeper, path, step=7) == first


def test_other_bytes_never_replace_a_published_step(node: Node) -> None:
    keeper = node.boot()
    path = worker(keeper)[0]
    shard = persisted(node, keeper, path, step=7)
    keeper.publish(7, 1, manifest_of(shard))
    before = (node.root / shard.file).read_bytes()
    snapshot(keeper, path, 7)
    Slot.open(path).image[-1] = 99
    keeper.persist("w0", path, 7, 1)
    assert "already published" in node.wait_for(ShardFailed)[0].reason
    assert (node.root / shard.file).read_bytes() == before


def test_an_unpublished_step_is_replaced(node: Node) -> None:
    keeper = node.boot()
    path = worker(keeper)[0]
    first = persisted(node, keeper, path, step=7)
    snapshot(keeper, path, 7)
    Slot.open(path).image[-1] = 99
    keeper.persist("w0", path, 7, 1)
    assert node.wait_for(ShardPersisted, 2)[1].checksums != first.checksums


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No slot is persisted before it is set."""
    gate, real = threading.Event(), persist_slot

    def slow(*args: Any, **kwargs: Any) -> ShardPersisted:
        gate.wait(10)
        return real(*args, **kwargs)

    monkeypatch.setattr(persisting, "persist_slot", slow)
    return gate


def test_a_full_queue_is_a_failure_of_that_step_only(
    node: Node, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persisting, "PERSISTS_QUEUED", 8)
    keeper = node.boot()
    keeper.hello("w0", os.getpid(), 1)
    paths = keeper.open_slots("w0", 12, LAYOUT.total_bytes, 100)
    for step, path in enumerate(paths):
        snapshot(keeper, path, step)
        keeper.persist("w0", path, step, 1)
    failed = node.wait_for(ShardFailed, 3)
    gate.set()
    done = node.wait_for(ShardPersisted, 12 - len(failed))
    assert all("queue is full" in fact.reason for fact in failed)
    assert {f.step for f in done} | {f.step for f in failed} == set(range(12))
    wait_until(lambda: not any(Slot.open(p).pinned for p in paths), "all unpinned")


def test_all_ranks_of_a_large_node_may_ask_at_once(node: Node, gate: threading.Event) -> None:
    keeper = node.boot()
    for rank in range(16):
        keeper.hello(f"w{rank}", os.getpid(), 1)
        [path] = keeper.open_slots(f"w{rank}", 1, LAYOUT.total_bytes, 100)
        snapshot(keeper, path, 7, rank=rank, world=16)
        keeper.persist(f"w{rank}", path, 7, 1)
    gate.set()
    assert {fact.rank for fact in node.wait_for(ShardPersisted, 16)} == set(range(16))


@pytest.mark.parametrize("set_back_s", [0.0, 3600.0])
def test_a_lost_persist_message_is_made_good(
    node: Node, monkeypatch: pytest.MonkeyPatch, set_back_s: float
) -> None:
    """Also after the clock of the host has been set back."""
    monkeypatch.setattr(keeper_module, "SWEEP_EVERY_S", 0.02)
    asked: list[str] = []
    behind = [0.0]

    def clock() -> float:
        asked.append(threading.current_thread().name)
        return time.time() - behind[0]

    keeper = NodeKeeper(NODE, "run-1", node.config, node.store, node.facts.append, clock)
    keeper.start()
    node.keepers.append(keeper)
    wait_until(lambda: asked.count("_watch_loop") > 2, "the loop has begun")
    behind[0] = set_back_s
    snapshot(keeper, worker(keeper)[0], step=7)
    assert node.wait_for(ShardPersisted)[0].step == 7


def test_misuse_is_refused(node: Node) -> None:
    keeper = node.boot()
    path = worker(keeper)[0]
    with pytest.raises(UsageError):
        keeper.persist("w1", path, 7, 1)
    with pytest.raises(UsageError):
        keeper.persist("w0", "/etc/passwd", 7, 1)
    with pytest.raises(UsageError, match="not registered"):
        keeper.open_slots("w1", 1, 100, 100)
    for name in ("../x", "", ".hidden", "a/b"):
        with pytest.raises(UsageError):
            keeper.hello(name, os.getpid(), 1)


# ---- restart ----


def test_a_new_keeper_goes_on_where_the_old_one_was(node: Node) -> None:
    first = node.boot()
    paths = worker(first)
    shard = persisted(node, first, paths[0], step=7)
    first.publish(7, 1, manifest_of(shard))
    first.seal(1, 1)
    abandon(first)
    snapshot(first, paths[1], step=8)  # pinned while no keeper lives
    node.facts.clear()
    second = node.boot()
    assert node.wait_for(ShardPersisted)[0].step == 8
    inventory = second.inventory()
    assert {info.step for info in inventory.memory} == {7, 8}
    assert {shard.step for shard in inventory.disk} == {7, 8}
    assert [place[:2] for place in inventory.manifests] == [(7, 1)]
    assert inventory.fence == 1 and inventory.refusals == ()
    assert second.open_slots("w0", 1, LAYOUT.total_bytes, 1000)[0] not in paths
    assert [beat.worker_id for beat in second.heartbeats()] == ["w0"]


def test_a_death_between_two_lives_is_reported(node: Node) -> None:
    first = node.boot()
    worker(first, "w1", node.child())
    abandon(first)
    node.children[0].kill()
    node.children[0].wait()
    node.boot()
    assert node.wait_for(WorkerExited)[0].worker_id == "w1"


def test_rubbish_of_interrupted_writes_is_removed(node: Node) -> None:
    first = node.boot()
    path = worker(first)[0]
    shard = persisted(node, first, path, step=7)
    abandon(first)
    torn = (node.root / shard.file).parent / ".rank-00001.safetensors.0a0a0a0a.tmp"
    torn.write_bytes(b"x")
    Path(path + ".pending").write_bytes(b"x")
    Path(path.replace(".0.slot", ".9.slot")).write_bytes(b"no slot at all")
    second = node.boot()
    assert not torn.exists() and not Path(path + ".pending").exists()
    assert [refusal["tier"] for refusal in second.inventory().refusals] == ["memory"]


def test_what_is_no_slot_keeps_no_node_from_starting(node: Node) -> None:
    first = node.boot()
    path = worker(first)[0]
    snapshot(first, path, step=7)
    abandon(first)
    slots = Path(path).parent
    for name in ("folder", "w9.0.slot"):
        (slots / name).mkdir()
    os.mkfifo(slots / "w9.1.slot")
    (slots / "w9.2.slot").symlink_to("/dev/zero")
    (slots / "w9.3.slot").symlink_to("w9.3.slot")
    (slots / "w9.4.slot").write_bytes(b"x" * 9000)
    inventory = node.boot().inventory()
    assert [info.step for info in inventory.memory] == [7]
    assert len(inventory.refusals) == 6 and all(r["reason"] for r in inventory.refusals)


# ---- memory ----


def test_the_budget_holds_and_dead_slots_make_room(tmpfs: Path) -> None:
    size = slot_file_bytes(LAYOUT.total_bytes, 1000)
    node = Node(tmpfs, memory_budget_bytes=4 * size)
    keeper = node.boot()
    dead = worker(keeper, "w0", node.child())
    living = worker(keeper, "w1")
    keeper.hello("w2", os.getpid(), 1)
    with pytest.raises(BudgetError):
        keeper.open_slots("w2", 1, LAYOUT.total_bytes, 1000)
    for number, path in enumerate(dead):  # steps 1 and 2 of rank 0, as whole as the living one's
        snapshot(keeper, path, 1 + number)
        Slot.open(path).unpin()
    snapshot(keeper, living[0], 2)
    Slot.open(living[0]).unpin()
    node.children[0].kill()
    node.wait_for(WorkerExited)
    assert len(keeper.open_slots("w2", 1, LAYOUT.total_bytes, 1000)) == 1
    assert not os.path.exists(dead[0]) and os.path.exists(dead[1])
    with pytest.raises(BudgetError):
        keeper.open_slots("w2", 2, LAYOUT.total_bytes, 1000)
    keeper.close(remove_disk=True)
    node.children[0].wait()


def test_a_successor_gets_slots_though_all_that_the_dead_left_is_new(tmpfs: Path) -> None:
    """Of two nodes' ranks: no step is whole here, no commit on disk is newer."""
    node = Node(tmpfs, memory_budget_bytes=5 * slot_file_bytes(LAYOUT.total_bytes, 1000))
    keeper = node.boot()
    keeper.hello("w0", node.child(), 1)
    for step, path in enumerate(keeper.open_slots("w0", 3, LAYOUT.total_bytes, 1000), 1):
        snapshot(keeper, path, step, world=2)
        Slot.open(path).unpin()
    node.children[0].kill()
    node.wait_for(WorkerExited)
    keeper.hello("w1", os.getpid(), 1)
    own = keeper.open_slots("w1", 3, LAYOUT.total_bytes, 1000)
    assert sorted(info.step for info in keeper.inventory().memory) == [2, 3]
    for step, path in enumerate(own, 4):
        snapshot(keeper, path, step, generation=2, world=2)
        Slot.open(path).unpin()
    with pytest.raises(BudgetError):
        keeper.open_slots("w1", 1, LAYOUT.total_bytes, 1000)
    assert sorted(info.step for info in keeper.inventory().memory) == [2, 3, 4, 5, 6]
    keeper.close(remove_disk=True)
    node.children[0].wait()


def test_opening_is_repeatable_and_releasing_is_for_owners(node: Node) -> None:
    keeper = node.boot()
    paths = worker(keeper)
    assert worker(keeper) == paths
    keeper.release_slots("w1", paths)
    assert keeper.open_slots("w0", 2, LAYOUT.total_bytes, 1000) == paths
    keeper.release_slots("w0", [*paths, "/nowhere"])
    assert not any(os.path.exists(path) for path in paths)


# ---- object tier ----


def test_upload_carries_both_files(node: Node) -> None:
    keeper = node.boot()
    shard = persisted(node, keeper, worker(keeper)[0], step=7)
    node.store.failures = 2
    keeper.upload(7, 1, [0])
    assert node.wait_for(ShardUploaded)[0].rank == 0
    assert node.store.objects[shard.file] == (node.root / shard.file).read_bytes()
    assert node.store.objects[shard.extras_file] == b'{"step": 7}'


@pytest.mark.parametrize("fails", [False, True])
def test_parts_that_a_killed_agent_left_are_swept_when_the_next_one_starts(
    node: Node, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    swept: list[tuple[str, float]] = []

    def abandon_uploads(prefix: str, older_than_s: float) -> int:
        swept.append((prefix, older_than_s))
        if fails:
            raise StoreError(url="memory://test", key=prefix, cause="injected")
        return 1

    monkeypatch.setattr(node.store, "abandon_uploads", abandon_uploads, raising=False)
    keeper = node.boot()
    persisted(node, keeper, worker(keeper)[0], step=7)
    keeper.upload(7, 1, [0])
    assert node.wait_for(ShardUploaded)[0].rank == 0
    assert swept == [("", STALE_UPLOAD_S)]


def test_damage_on_disk_is_not_carried_on(node: Node) -> None:
    keeper = node.boot()
    shard = persisted(node, keeper, worker(keeper)[0], step=7)
    file = node.root / shard.file
    data = bytearray(file.read_bytes())
    data[9000] ^= 1
    file.write_bytes(data)
    keeper.upload(7, 1, [0, 5])
    failed = node.wait_for(ShardFailed, 2)
    assert {(f.rank, f.tier) for f in failed} == {(0, "object"), (5, "object")}
    assert "chunk 1 fails" in failed[0].reason and node.store.objects == {}


# ---- dropping, inventory, close ----


def test_drop_never_takes_the_newest(node: Node) -> None:
    keeper = node.boot()
    path = worker(keeper)[0]
    for step in (7, 8):
        keeper.publish(step, 1, manifest_of(persisted(node, keeper, path, step)))
    keeper.drop([(7, 1)], "disk")
    keeper.drop([(7, 1)], "disk")
    with pytest.raises(UsageError):
        keeper.drop([(8, 1)], "disk")
    assert [place[:2] for place in keeper.inventory().manifests] == [(8, 1)]
    assert os.listdir(node.root / "checkpoints" / "steps") == ["000000000008"]


def test_drop_in_the_object_tier(node: Node) -> None:
    keeper = node.boot()
    persisted(node, keeper, worker(keeper)[0], step=7)
    keeper.upload(7, 1, [0])
    node.wait_for(ShardUploaded)
    node.store.put(manifest_key(7, 1), b"m")
    keeper.drop([(7, 1)], "object")
    assert node.store.objects == {}


@pytest.mark.parametrize("damage", ["truncate", "delete", "garbage"])
@pytest.mark.parametrize("suffix", [".safetensors", ".json", ".record", "manifest.json"])
def test_damaged_files_are_refused_with_a_reason(node: Node, damage: str, suffix: str) -> None:
    keeper = node.boot()
    shard = persisted(node, keeper, worker(keeper)[0], step=7)
    keeper.publish(7, 1, manifest_of(shard))
    folder = (node.root / shard.file).parent
    name = suffix if suffix == "manifest.json" else "rank-00000" + suffix
    if damage == "delete":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(b"" if damage == "truncate" else b"garbage")
    inventory = keeper.inventory()
    assert not (inventory.disk and inventory.manifests)
    if damage != "delete" or suffix in (".safetensors", ".json"):
        assert inventory.refusals and inventory.refusals[0]["step"] == 7


def test_close_leaves_nothing(node: Node) -> None:
    keeper = node.boot()
    path = worker(keeper)[0]
    persisted(node, keeper, path, step=7)
    keeper.close(remove_disk=False)
    assert os.listdir(node.shm) == [] and node.root.exists()
    for shared in ("code", "drills", "ray_train"):
        (node.root.parent / shared).mkdir()
    keeper.close(remove_disk=True)
    assert os.listdir(node.disk) == []


def test_logs_are_shipped_while_they_grow(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "LOGS_EVERY_S", 0.02)
    keeper = node.boot()
    log = Path(keeper.hello("w0", os.getpid(), 1).log_path)
    log.write_bytes(b"one\n")
    wait_until(lambda: node.store.objects.get("logs/w0/000000.log") == b"one\n", "shipped")
    log.write_bytes(b"one\ntwo\n")
    keeper.close(remove_disk=False)
    assert node.store.objects["logs/w0/000000.log"] == b"one\ntwo\n"
