"""Sixteen writers that each believe to be the one: one of them wins, in every round.

All come with their own manifest of the same step, at the same moment; the step gets one, everybody
else is told so, and every reader finds that one. In the commit log, and at a node's disk tier.
Rounds: 20, and 200 with RELIT_RACES=200 (`make fuzz`).
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relit_platform.node.disk_tier import DiskTier
from relit_platform.node.persist import Writing, persist_slot
from relit_platform.node.slots import Slot, create_slot
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.checkpoint.image import ImageLayout, TensorSpec
from relit_storage.checkpoint.log_records import LogRecord
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.errors import CommitConflictError, FencedError
from relit_storage.run.layout import LOG_PREFIX, manifest_key
from relit_storage.stores.local import LocalStore
from relit_storage.stores.memory import MemoryStore
from relit_storage.stores.protocol import ObjectStore

ROUNDS = int(os.environ.get("RELIT_RACES", "20"))
RACERS = 16
NODE = "node"
LAYOUT = ImageLayout.plan([TensorSpec("w", "F32", (64,))], {})


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory: what is tested is the order of calls, not the device."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="relit-test-") as root:
        yield Path(root)


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, folder: Path) -> ObjectStore:
    return MemoryStore() if request.param == "memory" else LocalStore(str(folder))


class Racers:
    """Threads that do the same thing at the same moment, round after round."""

    def __init__(self, act: Callable[[int, int], None]) -> None:
        self._act = act
        self._barrier = threading.Barrier(RACERS)
        self._lock = threading.Lock()
        self.won: dict[int, list[int]] = {number: [] for number in range(1, ROUNDS + 1)}
        self.lost: dict[int, list[int]] = {number: [] for number in range(1, ROUNDS + 1)}
        self.surprises: list[BaseException] = []

    def run(self) -> None:
        threads = [threading.Thread(target=self._race, args=(n,)) for n in range(RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not self.surprises, self.surprises

    def _race(self, racer: int) -> None:
        for number in range(1, ROUNDS + 1):
            self._barrier.wait()
            try:
                self._act(number, racer)
                outcome = self.won
            except (CommitConflictError, FencedError):
                outcome = self.lost
            except BaseException as error:
                self.surprises.append(error)
                self._barrier.abort()
                return
            with self._lock:
                outcome[number].append(racer)


def sha(racer: int) -> str:
    return f"{racer:064x}"


def commit(log: CommitLog, step: int, racer: int, *, epoch: int = 1, generation: int = 1) -> None:
    log.append_commit(
        epoch=epoch,
        generation=generation,
        step=step,
        manifest_key=manifest_key(step, generation),
        manifest_sha256=sha(racer),
        manifest_bytes=10,
        at_s=1.0,
    )


def test_the_commit_log_has_one_manifest_per_step(store: ObjectStore) -> None:
    logs = [CommitLog(store) for _ in range(RACERS)]
    racers = Racers(lambda number, racer: commit(logs[racer], number, racer))
    racers.run()
    assert all(len(won) == 1 for won in racers.won.values()), racers.won
    winners = {number: sha(won[0]) for number, won in racers.won.items()}
    for log in (*logs, CommitLog(store)):
        view = log.replay()
        assert {r.step: r.manifest_sha256 for r in view.commits} == winners
        assert (view.superseded, view.refused, view.next_seq) == ((), (), ROUNDS + 1)


def test_an_epoch_taken_in_the_race_ends_it(store: ObjectStore) -> None:
    """Racer 0 is the next supervisor; the others commit for the epoch before."""
    logs = [CommitLog(store) for _ in range(RACERS)]

    def act(number: int, racer: int) -> None:
        if racer == 0:
            logs[0].append_epoch(number + 1, at_s=1.0)
        else:
            commit(logs[racer], number * RACERS + racer, racer, epoch=number)

    Racers(act).run()
    epoch = 0
    for key in store.list(LOG_PREFIX):
        record = LogRecord.from_bytes(store.get(key), key)
        assert record.kind == "epoch" or record.epoch >= epoch, "a zombie's commit after the epoch"
        epoch = max(epoch, record.epoch)
    assert epoch == ROUNDS + 1


def test_a_disk_has_one_manifest_per_step(folder: Path) -> None:
    root = str(folder)
    create_slot(f"{root}/slot", LAYOUT.total_bytes, 100)
    slot = Slot.open(f"{root}/slot")
    manifests: dict[int, list[bytes]] = {}
    how = Writing(root=root, node_id=NODE, chunk_bytes=4096, clock=lambda: 1.0)
    for step in range(1, ROUNDS + 1):
        slot.begin(1, step, 0, 1)
        slot.image[: LAYOUT.header_bytes] = LAYOUT.header
        slot.set_extras(b"{}")
        slot.commit()
        shard = persist_slot(slot, how)
        manifests[step] = [
            Manifest.from_shards(
                [dataclasses.asdict(shard)],
                run_id="r",
                epoch=1,
                cursor={},
                ids={},
                created_at_s=float(racer),
            ).to_bytes()
            for racer in range(RACERS)
        ]
    tiers = [DiskTier(root, NODE) for _ in range(RACERS)]
    racers = Racers(lambda step, racer: tiers[racer].publish(step, 1, manifests[step][racer]))
    racers.run()
    assert all(len(won) == 1 for won in racers.won.values()), racers.won
    published = {step: raw for step, _, raw in DiskTier(root, NODE).manifests()[0]}
    assert published == {step: manifests[step][won[0]] for step, won in racers.won.items()}
