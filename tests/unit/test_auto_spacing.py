"""`auto`: nothing before enough is known, then what loses least, within its bounds, and calmly."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from relit_platform.machines import auto_spacing
from relit_platform.machines.auto_spacing import (
    DEAD_BAND,
    ENDS_KEPT,
    ENOUGH_SAVES,
    REVISE_S,
    SAVES_KEPT,
    Asked,
    Save,
    Seen,
    revise,
)
from relit_platform.machines.optimum import daly
from relit_platform.machines.save_costs import Ended, Span

HOUR_S = 3600.0
ASKED = Asked(disk=True, object=True, memory=True, max_s=1800.0, mtbf_s=10 * HOUR_S)


class Run:
    """A loop of one second a step, with saves that delay the step after them by `copy_s`."""

    def __init__(self, seen: Seen | None = None, copy_s: float = 0.5) -> None:
        self.seen = seen or Seen()
        self.copy_s = copy_s
        self.step, self.now_s, self.generation = 0, 1000.0, 1

    def train(self, steps: int, saves: int = 0, takes_s: float = 0.8) -> Run:
        """So many steps for each save, or in all."""
        for number in range(max(1, saves)):
            for since in range(steps):
                self.step += 1
                self.now_s += 1.0 + (self.copy_s if saves and since == 0 and number else 0.0)
                end = Ended(self.step, self.generation, self.now_s)
                self.seen = auto_spacing.ended(self.seen, [end])
            if saves:
                save = Save(self.step, self.generation, takes_s)
                self.seen = auto_spacing.saved(self.seen, save)
        if saves:  # what the last of them costs shows in the step after it
            self.step += 1
            self.now_s += 1.0 + self.copy_s
            end = Ended(self.step, self.generation, self.now_s)
            self.seen = auto_spacing.ended(self.seen, [end])
        return self

    def upload(self, seconds: float) -> Run:
        self.seen = auto_spacing.uploaded(self.seen, Span(self.now_s - seconds, self.now_s))
        return self

    def revise(self, asked: Asked = ASKED) -> dict[str, Any] | None:
        self.seen, told = revise(asked, self.seen, self.now_s)
        return told


def test_nothing_is_set_before_enough_saves_were_seen() -> None:
    run = Run().train(20, saves=ENOUGH_SAVES - 1)
    assert run.revise() is None and run.seen.disk_s == 0.0
    assert run.train(20, saves=1).revise() is not None
    assert run.seen.disk_s > 0


def test_the_spacing_is_the_optimum_of_what_was_measured() -> None:
    run = Run().train(20, saves=6).upload(4.0)
    trained_s = run.now_s - 1001.0
    told = run.revise()
    assert told is not None
    assert told["step_s"] == 1.0 and told["save_s"] == pytest.approx(0.5)
    assert told["disk_s"] == pytest.approx(0.8) and told["upload_s"] == pytest.approx(4.0)
    assert told["trained_s"] == pytest.approx(trained_s, rel=0.01)
    mtbf_s = (ASKED.mtbf_s + trained_s) / 0.2
    assert told["disk_every_s"] == pytest.approx(daly(0.5, mtbf_s), rel=0.01)
    assert told["object_every_s"] / told["disk_every_s"] == pytest.approx(
        round(told["object_every_s"] / told["disk_every_s"])
    )
    assert "disk every" in told["reason"] and "a save costs 0.5 s" in told["reason"]
    assert json.loads(json.dumps(told)) == told
    assert run.seen.reason == told["reason"]


def test_each_tier_alone() -> None:
    run = Run().train(20, saves=6)
    disk = replace(ASKED, object=False)
    told = Run(run.seen).revise(disk)
    assert told is not None and "object_every_s" not in told and told["disk_every_s"] > 0
    outward = replace(ASKED, disk=False)
    assert Run(run.seen).revise(outward) is None, "no upload was seen yet"
    sent = Run(run.upload(4.0).seen)
    told = sent.revise(outward)
    assert told is not None and "disk_every_s" not in told and sent.seen.disk_s == 0.0


@pytest.mark.parametrize(
    ("copy_s", "takes_s", "failures", "asked", "every_s", "words"),
    [
        (0.5, 0.8, 0, {"max_s": 60.0}, 60.0, "may be lost at once"),
        (0.5, 90.0, 0, {"max_s": 60.0}, 90.0, "until it counts"),  # more often is not possible
        (5.0, 0.8, 0, {"mtbf_s": 60.0}, 500.0, "1% of the time"),
        (0.0, 2.0, 10_000, {}, 4.0, "1% of the time"),  # half of the time, whatever it costs
        (0.5, 0.8, 0, {"mtbf_s": 1e15}, 1800.0, "may be lost at once"),
    ],
)
def test_bounds(
    copy_s: float, takes_s: float, failures: int, asked: Any, every_s: float, words: str
) -> None:
    run = Run(copy_s=copy_s).train(150, saves=4, takes_s=takes_s)
    run.seen = replace(run.seen, failures={"disk": failures})
    told = run.revise(replace(ASKED, object=False, **asked))
    assert told is not None and words in told["reason"]
    assert told["disk_every_s"] == pytest.approx(every_s, rel=0.01)


def test_the_disk_has_to_keep_up_with_its_slowest_save() -> None:
    run = Run(copy_s=0.0).train(20, saves=3).train(200, saves=1, takes_s=100.0).train(200)
    told = run.revise(replace(ASKED, object=False, max_s=50.0))
    assert told is not None and told["disk_s"] == told["disk_every_s"] == 100.0


def test_without_the_memory_tier_its_failures_are_the_disks() -> None:
    run = Run().train(20, saves=6)
    with_it, without = Run(run.seen), Run(run.seen)
    assert with_it.revise() is not None
    told = without.revise(replace(ASKED, memory=False))
    assert told is not None and without.seen.disk_s < with_it.seen.disk_s / 1.5


def test_failures_bring_saves_closer_together_and_calm_moves_them_apart() -> None:
    run = Run().train(20, saves=4)
    run.revise()
    before_s = run.seen.disk_s
    for _ in range(20):
        run.seen = auto_spacing.failed(run.seen, "disk")
    told = run.train(60).revise()
    assert told is not None and run.seen.disk_s < before_s / 4
    assert "s before" in told["reason"] and told["failures"] == {"disk": 20}
    closest_s = run.seen.disk_s
    run.seen = replace(run.seen, trained_s=1e7)
    assert run.train(60).revise() is not None and run.seen.disk_s > 2 * closest_s


def test_a_failure_of_another_kind_does_not_move_the_disk() -> None:
    run = Run().train(20, saves=4)
    run.revise()
    run.seen = auto_spacing.failed(run.seen, "memory")
    assert run.train(60).revise() is None


def test_it_changes_not_often_and_not_by_little() -> None:
    run = Run().train(20, saves=4)
    run.revise()
    first_s = run.seen.disk_s
    run.seen = auto_spacing.failed(run.seen, "disk")
    soon = Run(run.seen)
    soon.now_s = run.now_s + REVISE_S - 1
    assert soon.revise() is None, "too soon"
    soon.now_s += 2
    told = soon.revise()
    assert told is not None and abs(soon.seen.disk_s / first_s - 1) > DEAD_BAND
    calm = Run(run.seen)
    calm.seen = replace(calm.seen, failures={}, trained_s=calm.seen.trained_s * 1.1)
    calm.now_s = run.now_s + 10 * REVISE_S
    assert calm.revise() is None, "hardly another number"


def test_a_commit_may_be_told_before_the_rows_of_its_steps() -> None:
    late = Run().train(20, saves=4)
    early = Run()
    ends = list(late.seen.ends)
    for step in (20, 40, 60, 80):
        early.seen = auto_spacing.saved(early.seen, Save(step, 1, 0.8))
    assert len(early.seen.unsampled) == 4 and not early.seen.saves
    early.seen = auto_spacing.ended(early.seen, ends)
    early.now_s = late.now_s
    assert early.seen.saves == late.seen.saves
    assert early.revise() == late.revise()


def test_what_is_kept_is_bounded() -> None:
    run = Run().train(3, saves=2 * SAVES_KEPT).upload(1.0)
    for step in range(3 * SAVES_KEPT):
        run.seen = auto_spacing.saved(run.seen, Save(10**6 + step, 1, 1.0))
        run.upload(1.0)
    more = [Ended(run.step + number, 1, run.now_s + number) for number in range(1, ENDS_KEPT + 5)]
    seen = auto_spacing.ended(run.seen, more)
    assert len(seen.ends) == ENDS_KEPT and len(seen.uploads) == SAVES_KEPT
    assert len(seen.saves) == len(seen.unsampled) == SAVES_KEPT


def test_time_between_two_generations_is_not_trained() -> None:
    run = Run().train(10)
    run.generation, run.now_s = 2, run.now_s + 500.0
    run.train(10)
    assert run.seen.trained_s == pytest.approx(18.0)


def test_a_new_manager_goes_on_with_the_spacing_that_was_in_force() -> None:
    seen = auto_spacing.remember(
        Seen(),
        failures={"disk": 2, "odd": 1},
        trained_s=50.0,
        disk_s=7.0,
        object_s=21.0,
        reason="r",
    )
    assert (seen.disk_s, seen.object_s, seen.reason, seen.trained_s) == (7.0, 21.0, "r", 50.0)
    assert seen.failures == {"memory": 0, "disk": 2, "object": 0}
    again = auto_spacing.remember(seen, failures={"disk": 1}, trained_s=40.0, disk_s=9.0)
    assert (again.disk_s, again.trained_s, again.failures["disk"]) == (7.0, 50.0, 2)
