"""Adoption: a host that comes back under another node id keeps what it had committed."""

import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_harness import fail_rename

from relit_platform.facts import ShardPersisted
from relit_platform.node import adoption
from relit_platform.node.adoption import adopt_orphans, claim
from relit_platform.node.disk_tier import DiskTier
from relit_platform.node.fencing import Fence, load_fence, save_fence
from relit_platform.node.persist import Writing, persist_slot
from relit_platform.node.slots import Slot, create_slot
from relit_storage.checkpoint.durable import make_dirs
from relit_storage.checkpoint.image import ImageLayout, TensorSpec
from relit_storage.checkpoint.manifest import Manifest

LAYOUT = ImageLayout.plan([TensorSpec("w", "F32", (10,))], {})


@pytest.fixture
def run() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="relit-test-") as folder:
        yield Path(folder)


def folder_of(run: Path, node: str, owner_pid: int) -> str:
    folder = str(run / node)
    make_dirs(folder + "/logs")
    claim(folder, owner_pid)
    return folder


def dead_pid() -> int:
    """A pid that is claimed while it lives, and then ends."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    CHILDREN.append(child)
    return child.pid


CHILDREN: list[subprocess.Popen[bytes]] = []


def end_children() -> None:
    while CHILDREN:
        CHILDREN.pop().communicate()


def save(folder: str, node: str, step: int, rank: int, world: int) -> ShardPersisted:
    path = os.path.join(folder, f"slot-{step}-{rank}")
    create_slot(path, LAYOUT.total_bytes, 10)
    slot = Slot.open(path)
    slot.begin(1, step, rank, world)
    slot.image[: LAYOUT.header_bytes] = LAYOUT.header
    slot.commit()
    how = Writing(root=folder, node_id=node, chunk_bytes=4096, clock=lambda: 1.0)
    return persist_slot(slot, how)


def publish(folder: str, node: str, shard: ShardPersisted) -> None:
    manifest = Manifest.from_shards(
        [dataclasses.asdict(shard)], run_id="r", epoch=1, cursor=0, ids={}, created_at_s=1.0
    )
    DiskTier(folder, node).publish(shard.step, shard.generation, manifest.to_bytes())


def test_orphans_are_merged_once(run: Path) -> None:
    pid = dead_pid()
    for number, node in enumerate(("old-a", "old-b")):
        old = folder_of(run, node, pid)
        save(old, node, step=8, rank=number, world=2)
        Path(old, "logs", f"{node}.log").write_bytes(b"x")
        save_fence(old + "/fence.json", Fence(3, 10 + number))
    publish(str(run / "old-a"), "old-a", save(str(run / "old-a"), "old-a", 7, 0, 1))
    end_children()
    new = folder_of(run, "new", os.getpid())
    assert adopt_orphans(new) == ["old-a", "old-b"]
    assert adopt_orphans(new) == []
    tier = DiskTier(new, "new")
    records, refusals = tier.records()
    assert [(r.step, r.rank, r.node_id) for r in records] == [
        (7, 0, "new"),
        (8, 0, "new"),
        (8, 1, "new"),
    ]
    assert refusals == [] and tier.newest_published() == (1, 7)
    assert load_fence(new + "/fence.json") == Fence(3, 11)
    assert sorted(os.listdir(new + "/logs")) == ["old-a.log", "old-b.log"]
    assert os.listdir(run) == ["new"]


def test_the_living_and_strangers_are_left_alone(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(run, "living", os.getpid())
    (run / "code").mkdir()
    (run / "damaged").mkdir()
    (run / "damaged" / "owner.json").write_bytes(b"{")
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    folder_of(run, "elsewhere", dead_pid())
    end_children()
    monkeypatch.undo()
    assert adopt_orphans(folder_of(run, "new", os.getpid())) == []
    assert sorted(os.listdir(run)) == ["code", "damaged", "elsewhere", "living", "new"]


def test_after_a_reboot_the_same_pid_does_not_count(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot_id = run / "boot_id"
    boot_id.write_text("before\n")
    with monkeypatch.context() as patch:
        patch.setattr(adoption, "_BOOT_ID", str(boot_id))
        folder_of(run, "old", os.getpid())
    assert adopt_orphans(folder_of(run, "new", os.getpid())) == ["old"]


def test_cut_short_at_every_rename_it_is_finished_later(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest is never in our folder before its shards."""
    for fail_at in range(1, 20):
        pid = dead_pid()
        old = folder_of(run, f"old-{fail_at}", pid)
        publish(old, "old", save(old, "old", 7, 0, 1))
        end_children()
        new = folder_of(run, f"new-{fail_at}", os.getpid())
        with monkeypatch.context() as patch:
            calls = fail_rename(patch, fail_at)
            try:
                adopt_orphans(new)
            except OSError:
                pass  # stands for the death of the agent at this point
        tier = DiskTier(new, "new")
        assert len(tier.records()[0]) == 1 or tier.newest_published() is None
        adopt_orphans(new)
        assert tier.newest_published() == (1, 7) and len(tier.records()[0]) == 1
        if calls[0] < fail_at:
            break
    assert fail_at == 6  # the folder, three files of the shard, the manifest, and one more try
