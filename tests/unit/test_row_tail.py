"""Up to which step every row is written: what a new supervisor may tell ranks to forget."""

from __future__ import annotations

import pytest

from relit_platform.control.history import History
from relit_platform.control.row_tail import RowTail

Event = tuple[str, int, int]  # formed or wrote, generation, step


@pytest.mark.parametrize(
    ("events", "whole_to"),
    [
        ([], 0),
        ([("wrote", 1, 1), ("wrote", 1, 2)], 2),
        ([("wrote", 1, 2), ("wrote", 1, 1)], 2),
        ([("wrote", 1, 1), ("wrote", 1, 3), ("wrote", 1, 4)], 1),  # 2 died with a manager
        ([("wrote", 1, 1), ("wrote", 1, 3), ("wrote", 1, 4), ("wrote", 1, 2)], 4),
        ([("wrote", 1, 1), ("wrote", 1, 2), ("formed", 2, 1)], 1),  # 2 is done again
        ([("wrote", 1, 1), ("formed", 2, 1), ("wrote", 1, 2)], 1),  # of the line that was left
        ([("wrote", 1, 1), ("formed", 2, 1), ("wrote", 2, 2)], 2),
        ([("wrote", 1, 1), ("wrote", 1, 3), ("formed", 2, 1), ("wrote", 2, 2)], 2),
        # Generations formed above a hole do not close it.
        ([("wrote", 1, 1), ("wrote", 1, 3), ("formed", 2, 3), ("wrote", 2, 4)], 1),
    ],
)
def test_only_what_has_no_hole_before_it_counts(events: list[Event], whole_to: int) -> None:
    tail = RowTail()
    tail.formed(1, 0)
    for kind, generation, step in events:
        (tail.formed if kind == "formed" else tail.wrote)(generation, step)
    assert tail.whole_to == whole_to


@pytest.mark.parametrize("generation", [1, 3])
def test_a_run_can_begin_at_another_ones_step(generation: int) -> None:
    tail = RowTail()
    tail.formed(generation, 40)
    tail.wrote(generation, 41)
    tail.wrote(generation, 43)
    assert (tail.whole_to, tail.next_whole) == (41, 43)


def test_what_nobody_has_any_more_is_remembered_as_lost() -> None:
    history = History()
    history.add({"kind": "generation.formed", "gen": 1, "data": {"start_step": 0}})
    for step in (1, 2, 5, 6, 9):
        history.wrote({"step": step, "generation": 1})
    told = history.for_manager()
    assert (told.rows_whole_to, told.rows_again_at) == (2, 5)
    history.add({"kind": "rows.lost", "data": {"step": 3, "before": 5}})
    told = history.for_manager()
    assert (told.rows_whole_to, told.rows_again_at) == (6, 9)


def test_the_history_tells_the_manager_both() -> None:
    history = History()
    formed = {"generation": 1, "start_step": 0}
    history.add({"kind": "generation.formed", "gen": 1, "data": formed})
    for step in (1, 2, 5):
        history.wrote({"step": step, "generation": 1, "loss": 0.5})
    told = history.for_manager()
    assert (told.last_row_step, told.rows_whole_to) == (5, 2)
