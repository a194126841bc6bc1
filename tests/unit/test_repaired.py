"""Checkpoints that were refused and are whole again: the run goes on with the newest of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stopped_run import Life, Resumed, _resume, damage, save, state_of

from relit.present_line import line_of
from relit_platform.control.history import History


def events_of(life: Life) -> list[dict[str, Any]]:
    facts = life.coordinator.drain(0).facts
    return [
        {"kind": fact.kind, "gen": fact.generation, "step": fact.step, "data": fact.data}
        for fact in facts
    ]


def live(root: Path, epoch: int, events: list[dict[str, Any]]) -> Resumed:
    """A supervisor's life after those whose events these are; its own are added."""
    history = History()
    for event in events:
        history.add(event)
    life = Life(root, epoch=epoch, history=history.for_manager())
    try:
        return _resume(life)
    finally:
        events += events_of(life)
        life.close()


def shards_of(root: Path) -> list[Path]:
    return sorted(root.rglob("rank-*.safetensors"))


def test_the_newest_is_restored_once_it_is_whole_again(tmp_path: Path) -> None:
    save(tmp_path)
    events: list[dict[str, Any]] = [start(1, 0)]
    for path in shards_of(tmp_path):
        damage(path, "flipped")
    assert "not_restorable" in live(tmp_path, 2, events).verdict
    formed = [e["data"]["start_step"] for e in events if e["kind"] == "generation.formed"]
    assert formed[:2] == [0, 30], "and it went back further"
    for path in shards_of(tmp_path):
        damage(path, "flipped")
    again = live(tmp_path, 3, events)
    assert (again.step, again.verdict) == (30, "")
    assert again.tensors is not None
    for name, tensor in state_of(30).items():
        assert torch.equal(again.tensors[name], tensor)


def start(generation: int, step: int) -> dict[str, Any]:
    return {"kind": "generation.formed", "gen": generation, "data": {"start_step": step}}


def lost(generation: int, fault: str = "restore_refused") -> dict[str, Any]:
    return {"kind": "generation.lost", "gen": generation, "data": {"fault": fault}}


def rows(history: History, generation: int, *steps: int) -> None:
    for step in steps:
        history.wrote({"step": step, "generation": generation})


@pytest.mark.parametrize(
    ("events", "lineage"),
    [
        ([start(1, 0), start(2, 30)], [(1, 0), (2, 30)]),
        ([start(1, 0), start(2, 30), lost(2)], [(1, 0)]),
        ([start(1, 0), start(2, 30), lost(2, "peer_lost")], [(1, 0), (2, 30)]),
        ([start(1, 0), start(2, 30), lost(2), start(3, 20), lost(3)], [(1, 0)]),
        ([start(1, 0), start(2, 30), lost(2), start(3, 20)], [(1, 0), (3, 20)]),
        ([start(1, 0), start(2, 30), lost(1)], [(1, 0), (2, 30)]),
        ([start(1, 0), start(2, 30), lost(2), lost(2)], [(1, 0)]),
        ([start(1, 0), start(2, 30), start(2, 30)], [(1, 0), (2, 30)]),
        ([start(1, 0), start(2, 30), start(2, 30), lost(2)], [(1, 0)]),
    ],
)
def test_a_generation_that_was_refused_its_state_is_no_line(
    events: list[dict[str, Any]], lineage: list[tuple[int, int]]
) -> None:
    history = History()
    for event in events:
        history.add(event)
    told = history.for_manager()
    assert list(told.lineage) == lineage
    assert told.generation == max(event["gen"] for event in events), "its number is used up"
    assert line_of(events).entries == line_of([start(*one) for one in lineage]).entries


def test_rows_of_steps_that_were_not_cut_off_are_not_asked_for_again() -> None:
    history = History()
    history.add(start(1, 0))
    rows(history, 1, *range(1, 31))
    history.add(start(2, 20))
    assert history.for_manager().rows_whole_to == 20, "it may be about to train"
    history.add(lost(2))
    assert history.for_manager().rows_whole_to == 30
    history.add(start(3, 20))
    rows(history, 3, 21)
    history.add(lost(3))
    assert history.for_manager().rows_whole_to == 21, "it has trained: who says so now is late"
    assert (3, 20) in history.for_manager().lineage
