"""Persist and publish with the n-th I/O call failing, or the process ending there, for every n."""

import dataclasses
import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relit_platform.facts import ShardPersisted
from relit_platform.node import disk_tier, persist
from relit_platform.node.disk_tier import DiskTier
from relit_platform.node.slots import Slot, create_slot
from relit_storage.checkpoint import durable
from relit_storage.checkpoint.image import ImageLayout, TensorSpec
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.checkpoint.shard import ShardRef, verify_shard, write_shard
from relit_storage.errors import CorruptShardError

NODE = "node"
LAYOUT = ImageLayout.plan([TensorSpec("w", "F32", (3000,))], {})
IO_CALLS = ("open", "write", "fsync", "rename", "link", "unlink", "mkdir", "close")


class KilledHere(BaseException):
    """Stands for SIGKILL: no handler of ours may run code after it but clean-up of handles."""


class CountingOs:
    """`os` for a module: the n-th I/O call fails, or is the last one that ever happens."""

    def __init__(self, fail_at: int, killed: bool) -> None:
        self.calls, self.fail_at, self.killed = 0, fail_at, killed

    def __getattr__(self, name: str) -> Any:
        real: Callable[..., Any] = getattr(os, name)
        return self._counted(name, real) if name in IO_CALLS else real

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.killed and self.calls >= self.fail_at and name != "close":
                raise KilledHere
            if self.calls == self.fail_at and name != "close":
                raise OSError(errno.EIO, "injected")
            return real(*args, **kwargs)

        return call


@pytest.fixture
def root() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="relit-test-") as folder:
        yield folder


def slot_with(
    root: str, step: int, fill: int, name: str = "slot", layout: ImageLayout = LAYOUT
) -> Slot:
    path = os.path.join(root, name)
    if not os.path.exists(path):
        create_slot(path, layout.total_bytes, 100)
    slot = Slot.open(path)
    slot.begin(1, step, 0, 1)
    slot.image[: layout.header_bytes] = layout.header
    slot.image[layout.header_bytes :] = bytes([fill]) * (layout.total_bytes - layout.header_bytes)
    slot.set_extras(json.dumps({"fill": fill}).encode())
    slot.commit()
    return slot


def to(disk: str) -> persist.Writing:
    return persist.Writing(root=disk, node_id=NODE, chunk_bytes=4096, clock=lambda: 1.0)


def save(slot: Slot, disk: str) -> ShardPersisted:
    return persist.persist_slot(slot, to(disk))


def manifest_of(shard: ShardPersisted) -> bytes:
    return Manifest.from_shards(
        [dataclasses.asdict(shard)], run_id="r", epoch=1, cursor=0, ids={}, created_at_s=1.0
    ).to_bytes()


def check(disk: str, fills: set[int]) -> None:
    """What a restore would find: every record and manifest tells the truth about its files."""
    tier = DiskTier(disk, NODE)
    tier.clean()
    records, refusals = tier.records()
    manifests, more = tier.manifests()
    assert not refusals and not more
    for record in records:
        ref = ShardRef(
            num_bytes=record.num_bytes, chunk_bytes=record.chunk_bytes, checksums=record.checksums
        )
        verify_shard(os.path.join(disk, record.file), ref)
        extras = json.loads(Path(disk, record.extras_file).read_bytes())
        data = Path(disk, record.file).read_bytes()
        assert extras["fill"] in fills and data[-1] == extras["fill"]
    held = {(record.step, record.generation): record for record in records}
    for step, generation, data in manifests:
        assert Manifest.from_bytes(data).shards[0].checksums == held[step, generation].checksums


@pytest.mark.parametrize("killed", [False, True])
def test_fail_every_call(root: str, monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    """Step 1 is published; step 2 is persisted and published under the fault, then again."""
    completed = False
    for fail_at in range(1, 100):
        disk = os.path.join(root, f"disk-{fail_at}")
        os.mkdir(disk)
        first = save(slot_with(root, 1, fill=1), disk)
        DiskTier(disk, NODE).publish(1, 1, manifest_of(first))
        slot = slot_with(root, 2, fill=2)
        faulty = CountingOs(fail_at, killed)
        with monkeypatch.context() as patch:
            for module in (durable, persist, disk_tier):
                patch.setattr(module, "os", faulty)
            try:
                DiskTier(disk, NODE).publish(2, 1, manifest_of(save(slot, disk)))
            except (OSError, KilledHere):
                pass  # the caller reports it; what counts is what lies on disk
        check(disk, {1, 2})
        assert DiskTier(disk, NODE).newest_published() in ((1, 1), (1, 2))
        DiskTier(disk, NODE).publish(2, 1, manifest_of(save(slot, disk)))
        check(disk, {1, 2})
        assert DiskTier(disk, NODE).newest_published() == (1, 2)
        completed = faulty.calls < fail_at
        if completed:
            break
    assert completed and fail_at > 25


@pytest.mark.parametrize("killed", [False, True])
def test_fail_every_call_of_a_replacement(
    root: str, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Other bytes for an unpublished step: never a record that describes the other bytes."""
    for fail_at in range(1, 100):
        disk = os.path.join(root, f"disk-{fail_at}")
        save(slot_with(root, 1, fill=1), disk)
        slot = slot_with(root, 1, fill=2)
        faulty = CountingOs(fail_at, killed)
        with monkeypatch.context() as patch:
            for module in (durable, persist):
                patch.setattr(module, "os", faulty)
            try:
                save(slot, disk)
            except (OSError, KilledHere):
                pass  # as above
        check(disk, {1, 2})
        save(slot, disk)
        check(disk, {2})
        if faulty.calls < fail_at:
            break
    assert fail_at > 15


def test_a_slot_overwritten_meanwhile_leaves_no_record(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = slot_with(root, 1, fill=1)
    real = write_shard

    def overwritten(path: str, view: memoryview, chunk_bytes: int, pace: Any) -> ShardRef:
        slot_with(root, 2, fill=2)
        return real(path, view, chunk_bytes, pace)

    monkeypatch.setattr(persist, "write_shard", overwritten)
    with pytest.raises(CorruptShardError, match="overwritten"):
        save(slot, root)
    assert DiskTier(root, NODE).records() == ([], [])


def test_an_empty_or_torn_slot_is_refused(root: str) -> None:
    slot = slot_with(root, 1, fill=1)
    slot.image[100] ^= 1
    with pytest.raises(CorruptShardError):
        save(slot, root)
    slot.begin(1, 2, 0, 1)
    with pytest.raises(CorruptShardError, match="no complete snapshot"):
        save(slot, root)


def test_a_record_says_which_piece_of_a_tensor_it_has(root: str) -> None:
    layout = ImageLayout.plan([TensorSpec("w", "F32", (3000,), (7000,), (4000,))], {})
    saved = save(slot_with(root, 1, fill=1, layout=layout), root)
    assert (saved.tensors[0]["global_shape"], saved.tensors[0]["offsets"]) == ([7000], [4000])
    assert persist.read_record(root, 1, 1, 0) == saved
