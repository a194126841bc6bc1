"""What the desk does for the machine: deleting, on whatever node it can."""

from __future__ import annotations

import pytest
from coordinator_harness import Bench, empty_inventory

from relit_platform.control import checkpoint_desk
from relit_platform.machines.checkpoint_state import Discard


@pytest.fixture(autouse=True)
def no_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is about to read what is deleted here."""
    monkeypatch.setattr(checkpoint_desk, "in_use", lambda book, action: False)


def dropped(bench: Bench) -> list[str]:
    return [node for node, *_ in bench.agents.named("drop")]


def test_a_node_that_is_away_keeps_no_others_files() -> None:
    bench = Bench()
    bench.agents.stock = {node: empty_inventory(node) for node in ("n1", "n2", "n3")}
    bench.coordinator.start_epoch(1)
    bench.work()
    bench.agents.away = {"n1"}
    gone = Discard(step=5, generation=1, tier="disk", nodes=("n1", "n2", "n3"), reason="old")
    bench.coordinator._saves._discard(gone)
    assert dropped(bench) == ["n2", "n3"]
    bench.agents.away = set()
    bench.work()
    assert dropped(bench) == ["n2", "n3", "n1"]


def test_one_that_stays_away_is_said_once() -> None:
    bench = Bench()
    bench.coordinator.start_epoch(1)
    bench.work()
    bench.agents.away = {"n1"}
    gone = Discard(step=5, generation=1, tier="disk", nodes=("n1",), reason="old")
    bench.coordinator._saves._discard(gone)
    bench.work()
    told = [f.kind for f in bench.coordinator.drain(0).facts if f.kind == "ckpt.not_deleted"]
    assert len(told) == 1
