"""Whoever belongs to an older generation or epoch changes nothing, at any of the doors.

One life of a run is over (its supervisor was cut off, say), the next one has formed its generation
on the same node and store. Everything that the first could still try is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import stopped_run
from coordinator_harness import request
from stopped_run import NODE, Life

from relit_platform.control.object_tier import ObjectTier
from relit_platform.facts import Assignment, Refused, RowBatch, ShardFailed
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.errors import FencedError, LeaseHeldError
from relit_storage.run.lease import Lease

OLD, NEW = 1, 2
FORMED = 3  # a manager created anew leaves out one number: its predecessor may have used it


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    """Epoch 2, its first generation, restored from step 20 of generation 1."""
    stopped_run.save(tmp_path, (10, 20))
    life = Life(tmp_path, epoch=NEW)
    replies = life.join(*(request(name, epoch=NEW) for name in ("a", "b")))
    assert all(isinstance(r, Assignment) and r.generation == FORMED for r in replies)
    life.keeper.seal(NEW, FORMED)
    yield life
    life.close()


def manifest(life: Life, step: int) -> bytes:
    """What generation 1 would publish as a later step."""
    [_, raw] = [raw for _, _, raw in life.keeper.inventory().manifests]
    return replace(Manifest.from_bytes(raw), step=step).to_bytes()


DOORS: dict[str, Callable[[Life], object]] = {
    "hello": lambda life: life.keeper.hello("w9", 1, OLD),
    "publish": lambda life: life.keeper.publish(30, OLD, manifest(life, 30)),
    "seal": lambda life: life.keeper.seal(OLD, OLD),
    "commit": lambda life: tier(life).commit(OLD, 30, OLD, manifest(life, 30)),
    "retire": lambda life: tier(life).retire(OLD, 20, OLD),
    "epoch": lambda life: tier(life).open_epoch(OLD),
}


def tier(life: Life) -> ObjectTier:
    """The object tier as the old manager has it: its own view of the same log."""
    return ObjectTier(life.store, CommitLog(life.store), time.time)


@pytest.mark.parametrize("door", DOORS)
def test_what_is_fenced(life: Life, door: str) -> None:
    before = life.keeper.inventory(), tier(life).commits()
    with pytest.raises(FencedError):
        DOORS[door](life)
    assert (life.keeper.inventory(), tier(life).commits()) == before


@pytest.mark.parametrize("epoch", [OLD, NEW])
def test_a_member_of_the_old_generation_gets_no_place(life: Life, epoch: int) -> None:
    zombie = request("w0", rank=0, gen=OLD, step=25, epoch=epoch)
    [reply] = life.join(zombie)
    assert isinstance(reply, Refused) and reply.newest_generation == FORMED
    assert life.coordinator.status()["generation"] == FORMED


def test_rows_of_the_old_generation_are_counted_and_dropped(life: Life) -> None:
    row = {"step": 21, "loss": 9.0}
    life.coordinator.rows(RowBatch(generation=OLD, rank=0, rows=(row,)))
    assert life.coordinator.drain(0).rows == ()
    assert life.coordinator.status()["ignored"]["rows"] == 1


def test_a_late_save_of_the_old_generation_never_commits(life: Life) -> None:
    life.coordinator.persisting(30, OLD, 0, 2)
    failed = ShardFailed(
        step=30, generation=OLD, rank=0, node_id=NODE, tier="disk", reason="fenced", at_s=0.0
    )
    life.coordinator.fact(failed)
    life.settle()
    assert life.committed("disk") == 20
    assert life.coordinator.status()["saving"] is False


def test_the_lease_has_one_holder_at_a_time(life: Life) -> None:
    now = time.time()
    first = Lease.take(life.store, "r", "one", now, 10.0)
    with pytest.raises(LeaseHeldError, match="one"):
        Lease.take(life.store, "r", "two", now + 5.0, 10.0)
    second = Lease.take(life.store, "r", "two", now + 30.0, 10.0)
    assert second.epoch == first.epoch + 1
    with pytest.raises(FencedError):
        first.renew(now + 31.0)
