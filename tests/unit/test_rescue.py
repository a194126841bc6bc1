"""The emergency save: what a run that ends early has in memory goes to disk and further first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from coordinator_harness import NODE, Bench
from shard_facts import inventory, shards, slot, uploaded
from stopped_run import resume, save, state_of

from relit_platform.control.ports import AgentError
from relit_platform.facts import NodeInventory
from relit_platform.machines.checkpoint_state import Checkpoint, CheckpointBook, CheckpointPhase
from relit_platform.machines.lineage import Lineage
from relit_platform.machines.rescue import choose_rescue


def book(*steps: Checkpoint, line: tuple[tuple[int, int], ...] = ((1, 0),)) -> CheckpointBook:
    return CheckpointBook(lineage=Lineage(line), steps={one.key: one for one in steps})


def committed(step: int, generation: int = 1, tier: str = "disk") -> Checkpoint:
    return Checkpoint(
        step=step, generation=generation, world=2, phase=CheckpointPhase.COMMITTED,
        on_disk=tier == "disk", on_object=tier == "object",
    )  # fmt: skip


def memory(*slots: tuple[int, int, int], node: str = "n1") -> NodeInventory:
    """(step, generation, rank) of a world of two."""
    return inventory(node, memory=[slot(s, g, r, node=node) for s, g, r in slots])


@pytest.mark.parametrize(
    ("nodes", "known", "step", "reason"),
    [
        ([], book(), 0, "no snapshot in memory"),
        ([memory((7, 1, 0), (7, 1, 1))], book(committed(5)), 7, "committed is step 5"),
        ([memory((7, 1, 0), (7, 1, 1))], book(), 7, "committed is step 0"),
        ([memory((7, 1, 0)), memory((7, 1, 1), node="n2")], book(), 7, "whole"),
        ([memory((7, 1, 0), (6, 1, 0), (6, 1, 1))], book(committed(5)), 6, "step 6 is whole"),
        ([memory((7, 1, 0))], book(), 0, r"step 7 .* ranks \[1\]"),
        ([memory((7, 1, 0), (7, 1, 1))], book(committed(7)), 0, "step 7 is committed"),
        ([memory((7, 1, 0), (7, 1, 1))], book(committed(9, tier="object")), 0, "9 is committed"),
        ([memory((7, 1, 0), (7, 2, 1))], book(line=((1, 0), (2, 6))), 0, "lacks"),
        ([memory((7, 1, 0), (7, 1, 1))], book(line=((1, 0), (2, 6))), 0, "no snapshot"),
        (
            [memory((7, 1, 0), (7, 1, 1), (7, 2, 0), (7, 2, 1))],
            book(line=((1, 0), (2, 7))),
            7,
            "whole",
        ),
        (
            [memory((7, 1, 0), (7, 1, 1))],
            book(Checkpoint(step=7, generation=1, world=2, final=True)),
            0,
            "on its way",
        ),
        (
            [memory((7, 1, 0), (7, 1, 1))],
            book(Checkpoint(step=7, generation=1, world=2)),
            7,
            "whole",
        ),
        (  # what comes of a step that was given up is deleted: the one before it can be saved
            [memory((7, 1, 0), (7, 1, 1), (6, 1, 0), (6, 1, 1))],
            book(
                Checkpoint(step=7, generation=1, world=2, phase=CheckpointPhase.ABANDONED),
                committed(5),
            ),
            6,
            "whole",
        ),
    ],
)  # fmt: skip
def test_the_choice(
    nodes: list[NodeInventory], known: CheckpointBook, step: int, reason: str
) -> None:
    choice = choose_rescue(nodes, known)
    assert choice.step == step
    assert [slot.rank for slot in choice.slots] == [0, 1] * bool(step)
    assert re.search(reason, choice.reason), choice.reason


def test_the_newest_generation_wins_at_the_same_step() -> None:
    nodes = [memory((7, 1, 0), (7, 1, 1), (7, 2, 0), (7, 2, 1))]
    choice = choose_rescue(nodes, book(line=((1, 0), (2, 7))))
    assert {slot.generation for slot in choice.slots} == {2}


def test_the_agents_are_asked_and_the_step_goes_to_every_tier() -> None:
    bench = Bench().start("a", "b")
    bench.agents.stock[NODE] = memory((7, 1, 0), (7, 1, 1))
    assert "step 7 is whole" in bench.coordinator.rescue()
    assert bench.agents.named("persist") == [
        (NODE, "persist", f"w{rank}", f"/shm/n1/{rank}-7", 7, 1, 1) for rank in range(2)
    ]
    assert bench.coordinator.status()["saving"]
    assert "on its way" in bench.coordinator.rescue()
    for one in shards(7):
        bench.coordinator.fact(one)
    bench.work()
    for rank in range(2):
        bench.coordinator.fact(uploaded(7, rank=rank))
    bench.work()
    status = bench.coordinator.status()
    assert status["committed"]["disk"] == status["committed"]["object"] == 7  # though 20 is due
    assert not status["saving"]
    assert [fact.step for fact in bench.facts("ckpt.rescue")] == [7]


def test_an_agent_that_cannot_be_asked_holds_nobody_up() -> None:
    bench = Bench().start("a", "b")
    bench.agents.stock = {"n1": memory((7, 1, 0)), "n2": memory((7, 1, 1), node="n2")}
    bench.agents.away.add("n2")
    assert "lacks the snapshots of ranks [1]" in bench.coordinator.rescue()
    bench.agents.away.clear()
    bench.agents.deaf.add("n2")
    assert "whole" in bench.coordinator.rescue()
    bench.work()
    assert not bench.coordinator.status()["saving"]
    [failed] = bench.facts("ckpt.failed")
    assert failed.step == 7 and "does not answer" in failed.data["reason"]


@pytest.mark.parametrize(
    ("rescued", "restores", "step"), [(True, 0, 37), (False, 0, 30), (True, 1, 37), (True, 3, 37)]
)
def test_a_run_that_ended_early_goes_on_where_memory_was(
    tmp_path: Path, rescued: bool, restores: int, step: int
) -> None:
    """Also when later generations have begun with it and saved nothing of their own."""
    save(tmp_path, held=(36, 37), rescue=rescued, restores=restores)
    again = resume(tmp_path)
    assert again.step == step
    assert again.tensors is not None
    for name, tensor in state_of(step).items():
        assert torch.equal(again.tensors[name], tensor)


def test_an_agent_that_falls_silent_costs_the_rescue_one_question() -> None:
    bench = Bench().start("a", "b")
    bench.agents.stock = {
        "n1": memory((7, 1, 0), (7, 1, 1)),
        "n2": memory((7, 1, 0), (7, 1, 1), node="n2"),
    }
    asked: list[str] = []

    def rows_beside(node_id: str, path: str) -> tuple[dict[str, Any], ...]:
        asked.append(node_id)
        assert bench.agents.named("persist"), "what saves the state goes first"
        if node_id == "n1":
            raise AgentError("does not answer")
        return ({"step": 7, "loss": 1.0}, {"loss": 1.0})  # the second one is no row

    bench.agents.rows_beside = rows_beside  # type: ignore[method-assign]
    assert "whole" in bench.coordinator.rescue()
    assert asked == ["n1", "n2", "n2"]


def test_the_rows_that_nobody_could_send_are_taken_from_beside_the_snapshot() -> None:
    bench = Bench().start("a", "b")
    bench.agents.stock[NODE] = memory((6, 1, 0), (7, 1, 0), (7, 1, 1))
    kept = tuple({"step": step, "loss": 1.0, "generation": 1} for step in (6, 7))
    bench.agents.rows["/shm/n1/1-7"] = kept  # beside that of rank 0 nothing can be read
    bench.coordinator.rescue()
    assert [given["step"] for given in bench.coordinator.drain(0).rows] == [6, 7]
