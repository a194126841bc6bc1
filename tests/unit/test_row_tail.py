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
        ([("formed", 1, 40), ("wrote", 1, 41)], 41),  # begun at another run's step
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


def test_the_history_tells_the_manager_both() -> None:
    history = History()
    formed = {"generation": 1, "start_step": 0}
    history.add({"kind": "generation.formed", "gen": 1, "data": formed})
    for step in (1, 2, 5):
        history.wrote({"step": step, "generation": 1, "loss": 0.5})
    told = history.for_manager()
    assert (told.last_row_step, told.rows_whole_to) == (5, 2)
