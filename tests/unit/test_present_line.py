"""Where nobody names a step, the tools take the one that a restore would: of the present line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from run_files import Driver, submit
from saved_run import Saved, make_run

from relit.checkpoints import Checkpoints
from relit.errors import CheckpointBrokenError, EventRefusedError
from relit.present_line import line_of
from relit_storage.errors import RetentionError
from relit_storage.run.layout import shard_key


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """10, 20 and 30 of generation 1; generation 2 went back to 20, say because 30 was refused."""
    run = make_run(tmp_path)
    run.commit([10, 20, 30])
    went_back(run, (1, 0), (2, 20))
    return run


def went_back(run: Saved, *starts: tuple[int, int]) -> None:
    now = time.time()
    driver = Driver(run.store, "r1", now)
    for generation, step in starts:
        data = {"generation": generation, "start_step": step}
        driver.event("generation.formed", now, generation=generation, data=data)
    driver.lease.release(now)
    run.over()


def taken(run: Saved, step: int | None = None) -> tuple[int, int]:
    copy = Checkpoints(run.job.reader).first_whole(step, lambda reader: None).reader.copy
    return copy.step, copy.generation


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "generation.formed", "seq": 4, "data": {"generation": 1, "start_step": "x"}},
        {"kind": "generation.formed", "seq": 4, "gen": "one", "data": {"start_step": 3}},
        {"kind": "generation.lost", "seq": 4, "data": "gone"},
    ],
)
def test_an_event_of_the_line_that_relit_never_wrote_is_named(event: dict[str, Any]) -> None:
    with pytest.raises(EventRefusedError, match="event 4"):
        line_of([event])


def test_events_that_are_not_of_the_line_may_be_of_any_version() -> None:
    events: list[dict[str, Any]] = [
        {"kind": "rank.finished", "data": {"value_json": "1", "of_later": True}},
        {"kind": "rows.lost", "data": {}},
        {"kind": "generation.formed", "gen": 1, "data": {"generation": 1, "start_step": 0}},
    ]
    assert line_of(events) == line_of(events[2:])


def test_what_was_cut_off_is_passed_over(saved: Saved) -> None:
    used = Checkpoints(saved.job.reader).first_whole(None, lambda reader: None)
    assert used.reader.copy.step == 20
    assert [r.reason for r in used.refusals] == ["off the line: generation 2 went back to step 20"]


def test_who_names_it_gets_it(saved: Saved) -> None:
    assert taken(saved, 30) == (30, 1)


def test_the_new_line_is_taken_once_it_has_a_commit(saved: Saved) -> None:
    saved.commit([25], generation=2)
    assert taken(saved) == (25, 2)
    saved.path(shard_key(25, 2, 0)).unlink()
    assert taken(saved) == (20, 1)


def test_without_a_step_of_the_line_nothing_is_taken(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.commit([10, 20])
    went_back(run, (1, 0), (2, 5))
    with pytest.raises(CheckpointBrokenError, match="off the line"):
        taken(run)


def test_a_run_begins_with_a_step_of_the_line(saved: Saved) -> None:
    job = submit(saved.client, saved.root / "code", run_id="r2", init={"from": "r1"})
    config = job.reader.config()
    assert config is not None and config.init is not None
    assert (config.init.step, config.init.generation) == (20, 1)


def test_what_a_restore_would_take_is_not_removed(saved: Saved) -> None:
    checkpoints = Checkpoints(saved.job.reader)
    for step in (20, 30):
        with pytest.raises(RetentionError):
            checkpoints.remove(step)
    checkpoints.remove(10)


@pytest.mark.parametrize("data", [{}, {"start_step": None}])
def test_an_event_that_says_no_start_cuts_nothing(data: dict[str, Any]) -> None:
    events = [{"kind": "generation.formed", "gen": 2, "data": data}, {"kind": "x", "data": None}]
    assert line_of(json.loads(json.dumps(events))).entries == ()
