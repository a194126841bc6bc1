"""What the manager keeps: pins are read before anything goes, metrics come from the rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from coordinator_harness import NODE, Bench
from shard_facts import manifest, shards, uploaded

from relit_platform.control.history import History
from relit_platform.control.object_tier import MAX_COMMITS_READ
from relit_platform.facts import NodeInventory, RowBatch, RunHistory
from relit_platform.machines.checkpoint_state import GenerationFormed
from relit_storage.checkpoint.pins import remove_pin, write_pin
from relit_storage.errors import StoreUnavailableError


def save(bench: Bench, *steps: int, generation: int = 1) -> Bench:
    """Commit these steps on disk, and in the object tier where they go there."""
    for step in steps:
        for one in shards(step, generation):
            bench.coordinator.fact(one)
        bench.work()
        for rank in range(2):
            bench.coordinator.fact(uploaded(step, generation, rank))
        bench.work()
    return bench


def formed(bench: Bench, generation: int, start_step: int) -> None:
    """A new epoch's first generation, whose members had the state: nothing is restored."""
    event = GenerationFormed(generation=generation, start_step=start_step)
    bench.coordinator._saves.feed(event)
    bench.work()


def on_disk(bench: Bench) -> set[int]:
    gone = {step for call in bench.agents.named("drop") for step, _ in call[2]}
    return {call[2] for call in bench.agents.named("publish")} - gone


def in_store(bench: Bench) -> set[int]:
    return {record.step for record in bench.log.replay().commits}


def test_a_pinned_step_stays_on_both_tiers_until_the_pin_is_gone() -> None:
    bench = save(Bench(checkpoint={"object_every_steps": 10, "keep_object": 2}).start("a", "b"), 10)
    write_pin(bench.store, 10, reason="paper", at_s=0.0)
    save(bench, 20, 30, 40)
    assert on_disk(bench) == in_store(bench) == {10, 30, 40}
    remove_pin(bench.store, 10)
    save(bench, 50)
    assert on_disk(bench) == in_store(bench) == {40, 50}


def test_nothing_goes_while_nobody_knows_the_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(checkpoint={"object_every_steps": 0}).start("a", "b")
    real: Callable[[str], list[str]] = bench.store.list

    def away(prefix: str) -> list[str]:
        raise StoreUnavailableError(url="memory://x", key=prefix, cause="test")

    monkeypatch.setattr(bench.store, "list", away)
    save(bench, 10, 20, 30, 40)
    assert on_disk(bench) == {10, 20, 30, 40}
    monkeypatch.setattr(bench.store, "list", real)
    save(bench, 50)
    assert on_disk(bench) == {40, 50}
    write_pin(bench.store, 50, reason="", at_s=0.0)
    save(bench, 60)
    monkeypatch.setattr(bench.store, "list", away)
    save(bench, 70, 80)
    assert on_disk(bench) == {50, 70, 80}, "what was read last counts, and disks do not fill"


def test_the_best_by_metric_survive_a_new_manager_and_a_new_supervisor() -> None:
    keep = {"object_every_steps": 10, "keep_object": 1, "keep_object_best": 1, "metric": "val"}
    bench = Bench(checkpoint=keep).start("a", "b")
    for step, value in ((10, 0.3), (20, 0.1), (30, 0.2)):
        row = {"step": step, "loss": 0.0, "val": value, "generation": 1}
        bench.coordinator.rows(RowBatch(generation=1, rank=0, rows=(row,)))
        save(bench, step)
    assert in_store(bench) == {20, 30}
    history = RunHistory(generation=1, lineage=((1, 0),), metrics={10: 0.3, 20: 0.1, 30: 0.2})
    bench.again().start_epoch(2, history)
    bench.work()
    assert in_store(bench) == {20, 30}, "a restore may be about to read what is there"
    formed(bench, 2, 30)
    save(bench, 40, generation=2)
    assert in_store(bench) == {20, 40}


def test_a_history_knows_the_metric_of_every_row() -> None:
    bench = Bench()
    rows = ['{"step": 1, "val": 0.5, "loss": 2}', '{"step": 2, "loss": 1}', '{"step": 3, "val": 2}']
    bench.store.put("metrics/00000001-000001.jsonl", "\n".join(rows).encode() + b"\n")
    assert History.read(bench.store, [], "val").for_manager().metrics == {1: 0.5, 3: 2.0}
    assert History.read(bench.store, []).for_manager().metrics == {}


def test_more_commits_than_a_restore_looks_at_are_retired_all_the_same() -> None:
    many = MAX_COMMITS_READ + 4
    bench = Bench(checkpoint={"object_every_steps": 1, "keep_object": many}).start("a", "b")
    save(bench, *range(1, many + 1))
    assert len(in_store(bench)) == many
    bench.config = Bench(checkpoint={"object_every_steps": 1, "keep_object": 2}).config
    bench.again().start_epoch(2, RunHistory(generation=1, lineage=((1, 0),)))
    bench.work()
    formed(bench, 2, many)
    save(bench, many + 1, generation=2)
    assert in_store(bench) == {many, many + 1}


def test_what_was_refused_stays_until_the_new_line_has_committed() -> None:
    bench = save(Bench(checkpoint={"object_every_steps": 10}).start("a", "b"), 10, 20)
    bench.agents.stock[NODE] = NodeInventory(
        node_id=NODE,
        memory=(),
        disk=(*shards(10), *shards(20)),
        manifests=tuple((s, 1, manifest(s).to_bytes()) for s in (10, 20)),
        fence=1,
    )
    history = RunHistory(generation=2, lineage=((1, 0), (2, 10)))
    bench.again().start_epoch(2, history)
    bench.work()
    assert not bench.agents.named("drop") and in_store(bench) == {10, 20}
    formed(bench, 3, 10)
    for one in shards(15, 3):
        bench.coordinator.fact(one)
    bench.work()
    assert [call[2] for call in bench.agents.named("drop")] == [((20, 1),)]
    assert in_store(bench) == {10, 20}, "the object tier has no commit of the new line yet"
