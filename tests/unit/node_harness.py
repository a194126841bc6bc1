"""A node without Ray for tests: a keeper, its folders in memory, a store, child processes."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relit_platform.facts import ShardPersisted
from relit_platform.node.keeper import NodeKeeper
from relit_platform.node.slots import Slot
from relit_platform.run_config import CheckpointConfig
from relit_storage.checkpoint.image import ImageLayout, TensorSpec
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.errors import StoreError

NODE = "0123456789abcdef"


class DictStore:
    """The smallest object store; fails the next `failures` uploads."""

    url = "memory://test"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.failures = 0

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self.objects.setdefault(key, data) == data

    def put_file(self, key: str, path: str) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise StoreError(url=self.url, key=key, cause="injected")
        self.objects[key] = Path(path).read_bytes()

    def get(self, key: str) -> bytes:
        return self.objects[key]

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes:
        return self.objects[key][start : start + num_bytes]

    def size(self, key: str) -> int | None:
        return len(self.objects[key]) if key in self.objects else None

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)


class Node:
    """A keeper's surroundings; `boot` starts a new keeper on the same folders."""

    def __init__(self, root: Path, **config: Any) -> None:
        self.shm, self.disk = root / "shm", root / "disk"
        self.shm.mkdir()
        self.config = CheckpointConfig(
            shm_dir=str(self.shm), disk_dir=str(self.disk), chunk_bytes=8192, **config
        )
        self.store = DictStore()
        self.facts: list[Any] = []
        self.keepers: list[NodeKeeper] = []
        self.children: list[subprocess.Popen[bytes]] = []

    def boot(self) -> NodeKeeper:
        keeper = NodeKeeper(
            NODE, "run-1", self.config, self.store, self.facts.append, clock=time.time
        )
        keeper.start()
        self.keepers.append(keeper)
        return keeper

    def child(self) -> int:
        self.children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1))
        return self.children[-1].pid

    def wait_for(self, kind: type, count: int = 1) -> list[Any]:
        def found() -> list[Any]:
            return [fact for fact in self.facts if isinstance(fact, kind)]

        wait_until(lambda: len(found()) >= count, f"{count} {kind.__name__}: {self.facts}")
        return found()

    def clear(self) -> None:
        for keeper in self.keepers:
            keeper.close(remove_disk=True)
        for child in self.children:
            child.kill()
            child.communicate()

    @property
    def root(self) -> Path:
        return self.disk / "run-1" / NODE[:8]


def wait_until(done: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


LAYOUT = ImageLayout.plan([TensorSpec("w", "U8", (20_000,))], {})


def snapshot(
    keeper: NodeKeeper, path: str, step: int, *, generation: int = 1, rank: int = 0, world: int = 1
) -> None:
    slot = Slot.open(path)
    slot.begin(generation, step, rank, world)
    slot.image[: LAYOUT.header_bytes] = LAYOUT.header
    slot.image[LAYOUT.header_bytes :] = bytes([step % 256]) * 20_000
    slot.set_extras(json.dumps({"step": step}).encode())
    slot.commit()
    slot.pin()


def worker(keeper: NodeKeeper, name: str = "w0", pid: int | None = None) -> tuple[str, ...]:
    keeper.hello(name, os.getpid() if pid is None else pid, epoch=1)
    return keeper.open_slots(name, 2, LAYOUT.total_bytes, 1000)


def persisted(node: Node, keeper: NodeKeeper, path: str, step: int, **place: int) -> ShardPersisted:
    before = len([f for f in node.facts if isinstance(f, ShardPersisted)])
    snapshot(keeper, path, step, **place)
    keeper.persist("w0", path, step, place.get("generation", 1))
    found: ShardPersisted = node.wait_for(ShardPersisted, before + 1)[-1]
    wait_until(lambda: not Slot.open(path).pinned, "unpinned")
    return found


def manifest_of(*shards: ShardPersisted, **changes: Any) -> bytes:
    fields = {"run_id": "run-1", "epoch": 1, "cursor": 0, "ids": {}, "created_at_s": 1.0}
    return Manifest.from_shards(
        [dataclasses.asdict(shard) for shard in shards], **{**fields, **changes}
    ).to_bytes()


def abandon(keeper: NodeKeeper) -> None:
    """Stop its threads as SIGKILL would, and leave every file as it is."""
    keeper._closing.set()
    for thread in keeper._threads:
        thread.join()
    keeper._persister.close(5)
    keeper._uploads.close(5)
    keeper.close = lambda remove_disk: None  # type: ignore[method-assign]


def fail_rename(
    patch: pytest.MonkeyPatch, fail_at: int, kind: type[BaseException] = OSError
) -> list[int]:
    """The `fail_at`-th os.rename raises; how many there were so far."""
    calls, real = [0], os.rename

    def rename(source: str, target: str) -> None:
        calls[0] += 1
        if calls[0] == fail_at:
            raise kind("injected")
        real(source, target)

    patch.setattr(os, "rename", rename)
    return calls
