"""The keeper steps back for training, and not when the run ends with what it saves."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_harness import LAYOUT, Node, abandon, persisted, snapshot, worker

from relit_platform.facts import ShardPersisted
from relit_platform.node import persisting
from relit_platform.node.persist import persist_slot
from relit_platform.node.yielding import LOWEST, DiskPace


@pytest.fixture
def slow(tmpfs: Path) -> Iterator[Node]:
    """A node that may write one byte a second: its second chunk takes hours."""
    made = Node(tmpfs, disk_bytes_per_s=1)
    yield made
    made.clear()


def test_each_byte_of_an_image_is_asked_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(DiskPace, "take", lambda self, num_bytes: taken.append(num_bytes))
    keeper = node.boot()
    persisted(node, keeper, worker(keeper)[0], step=7)
    assert sum(taken) == LAYOUT.total_bytes and max(taken) == node.config.chunk_bytes


def test_the_threads_that_save_step_back(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def looking(*args: Any, **kwargs: Any) -> ShardPersisted:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return persist_slot(*args, **kwargs)

    monkeypatch.setattr(persisting, "persist_slot", looking)
    ours = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    keeper = node.boot()
    persisted(node, keeper, worker(keeper)[0], step=7)
    assert found == [min(LOWEST, ours + node.config.save_nice)]


def test_the_last_save_is_not_held_back_nor_what_is_before_it(slow: Node) -> None:
    keeper = slow.boot()
    paths = worker(keeper)
    for step, path in enumerate(paths, 7):
        snapshot(keeper, path, step)
        keeper.persist("w0", path, step, 1, last=step == 8)
    assert [fact.step for fact in slow.wait_for(ShardPersisted, 2)] == [7, 8]


def test_a_stop_that_is_asked_for_is_not_held_back_also_by_a_new_keeper(slow: Node) -> None:
    keeper = slow.boot()
    paths = worker(keeper)
    snapshot(keeper, paths[0], 7)
    keeper.persist("w0", paths[0], 7, 1)
    keeper.set_stop(1)
    assert slow.wait_for(ShardPersisted)[0].step == 7
    abandon(keeper)
    again = slow.boot()
    persisted(slow, again, paths[1], step=8)


def test_a_keeper_that_closes_does_not_wait_for_its_cap(slow: Node) -> None:
    keeper = slow.boot()
    path = worker(keeper)[0]
    snapshot(keeper, path, 7)
    keeper.persist("w0", path, 7, 1)
    keeper.close(remove_disk=False)
    assert not keeper._persister.busy()
