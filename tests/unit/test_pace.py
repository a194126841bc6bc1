"""When the disk tier is due: every rank decides alike, whatever clocks say and whoever dies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relit_platform.run_config import CheckpointConfig
from relit_platform.worker.pace import Pace


@dataclass
class Rank:
    """One process: its clock is off by `skew_s`; `saved` is what it asked to be persisted."""

    config: CheckpointConfig
    skew_s: float = 0.0
    now_s: float = 0.0
    step: int = 0
    row: dict[str, Any] = field(default_factory=dict)
    saved: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pace = Pace(self.config, lambda: 1e9 + self.now_s + self.skew_s)

    def complete(self, agreed: list[float], generation: int, logged: dict[str, float]) -> None:
        self.step += 1
        due = self.pace.decide(self.step, agreed)
        self.pace.measure(logged)
        self.row = {"step": self.step, **logged}
        self.saved += [(self.step - 1, generation)] * due.before
        self.saved += [(self.step, generation)] * due.this

    def take(self, other: Rank) -> None:
        self.step, self.row = other.step, other.row
        self.pace.adopt(other.pace.marks(), other.row)


class Group:
    """Ranks in step; a collective adds their votes, and may break for some of them."""

    def __init__(self, world: int = 2, skews: tuple[float, ...] = (), **config: Any) -> None:
        self.config = CheckpointConfig(**{"disk_every_steps": 0, **config})
        self.ranks = [Rank(self.config, skew) for skew in (skews or (0.0,) * world)]
        self.generation = 1
        self.whole: set[tuple[int, int]] = set()  # completed by all, in one generation
        self.now_s = 0.0

    def step(
        self, logged: float | None = None, *, step_s: float = 1.0, broken: tuple[int, ...] = (),
        dead: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """One step; ranks that it breaks for, or that die right after it, enter anew."""
        self.now_s += step_s
        for rank in self.ranks:
            rank.now_s = self.now_s
        votes = [rank.pace.votes(number) for number, rank in enumerate(self.ranks)]
        agreed = [sum(places) for places in zip(*votes, strict=True)]
        for number, rank in enumerate(self.ranks):
            if number not in broken:
                own = {"val": logged} if logged is not None and number == 0 else {}
                rank.complete(agreed, self.generation, own)
        if not broken:
            self.whole.add((self.ranks[0].step, self.generation))
        for number in dead:
            self.ranks[number] = Rank(self.config, 17.0 * number - 5.0, self.now_s)
        if broken or dead:
            self.next_generation()

    def next_generation(self) -> None:
        """As the manager does it: the state comes from whoever holds the newest boundary."""
        self.generation += 1
        holder = max(self.ranks, key=lambda rank: rank.step)
        for rank in self.ranks:
            if rank.step != holder.step:
                rank.take(holder)

    def saved(self, number: int = 0) -> list[int]:
        return [step for step, _ in self.ranks[number].saved]


def test_steps_alone_need_no_votes() -> None:
    group = Group(disk_every_steps=3)
    for _ in range(9):
        group.step()
    assert group.ranks[0].pace.votes(0) == ()
    assert group.saved(0) == group.saved(1) == [3, 6, 9]


@pytest.mark.parametrize("skew_s", [0.0, 3600.0, -3600.0])
def test_time_is_rank_0s_whatever_the_others_clocks_say(skew_s: float) -> None:
    group = Group(skews=(0.0, skew_s), disk_every_s=4.0)
    for _ in range(14):
        group.step()
    assert group.saved(0) == group.saved(1) == [5, 9, 13]


def test_steps_or_seconds_whichever_comes_first() -> None:
    group = Group(disk_every_s=4.0, disk_every_steps=6)
    for step in range(1, 19):
        group.step(step_s=1.0 if step < 9 else 0.1)
    assert group.saved(0) == group.saved(1) == [5, 6, 12, 18]


def test_a_step_that_was_broken_is_decided_anew_by_all() -> None:
    group = Group(disk_every_s=4.0)
    for _ in range(4):
        group.step()
    group.step(broken=(0, 1))
    assert group.saved(0) == group.saved(1) == []
    for _ in range(5):
        group.step()
    assert group.saved(0) == group.saved(1) == [5, 9]


def test_who_missed_a_boundary_learns_of_its_save_with_the_state() -> None:
    group = Group(disk_every_s=4.0)
    for _ in range(4):
        group.step()
    group.step(broken=(0,))
    assert (group.saved(0), group.saved(1)) == ([], [5])
    for _ in range(5):
        group.step()
    assert (group.saved(0), group.saved(1)) == ([9], [5, 9])


def test_a_new_rank_0_goes_on_from_the_last_save_by_its_own_clock() -> None:
    group = Group(disk_every_s=10.0)
    for _ in range(12):
        group.step()
    group.step(dead=(0,))
    assert group.saved(1) == [11]
    for _ in range(22):
        group.step()
    # Its clock is 5 s behind, before that of the last save: the 10 s begin anew with step 14.
    assert group.saved(0) == [24, 34] and group.saved(1) == [11, 24, 34]


def test_the_step_that_measured_best_is_saved_when_all_know_of_it() -> None:
    group = Group(disk_on_metric=True, metric="val", metric_mode="max")
    for value in (None, 0.5, None, 0.4, 0.6, 0.7, None):
        group.step(value)
    assert group.saved(0) == group.saved(1) == [2, 5, 6]


def test_a_measurement_survives_a_step_that_was_broken_and_a_restart() -> None:
    group = Group(disk_on_metric=True, metric="val")
    group.step(0.5)
    group.step(broken=(0, 1))
    group.step()
    assert group.ranks[1].saved == group.ranks[0].saved == [(1, 2)]
    group.step(0.4)
    restored = [Rank(group.config), Rank(group.config)]
    for rank in restored:
        rank.take(group.ranks[0])  # what lies beside rank 0's snapshot, on disk or in memory
    group.ranks, group.generation = restored, 3
    group.step(0.45)
    group.step()
    assert group.ranks[0].saved == group.ranks[1].saved == [(3, 3)], "0.45 is no better than 0.4"


def test_auto_begins_as_configured_and_goes_on_as_advised() -> None:
    group = Group(disk_auto=True, disk_every_steps=3)
    for _ in range(6):
        group.step()
    assert group.saved(0) == group.saved(1) == [3, 6]
    group.ranks[0].pace.advise(5.0)
    for _ in range(11):
        group.step()
    assert group.saved(0) == group.saved(1) == [3, 6, 11, 16]


def test_auto_alone_saves_first_after_its_bound() -> None:
    group = Group(disk_auto=True, auto_max_s=4.0)
    for _ in range(10):
        group.step()
    assert group.saved(0) == group.saved(1) == [5, 9]


def test_an_advised_spacing_is_part_of_the_state() -> None:
    group = Group(disk_auto=True, disk_every_steps=3)
    group.ranks[0].pace.advise(4.0)
    group.step()
    group.step(broken=(0, 1))  # nobody completed it
    group.step(dead=(0,))  # and with rank 0 goes what it was told
    for _ in range(9):
        group.step()
    assert group.ranks[0].pace.marks()["every_s"] == 4.0
    # By the new one's clock, which is 5 s behind: the 4 s begin anew with step 3.
    assert group.saved(0) == group.saved(1) == [7, 11]


def test_a_spare_that_was_rank_0_once_forgets_what_it_was_told() -> None:
    group = Group(disk_auto=True)
    pace = group.ranks[0].pace
    pace.advise(4.0)
    assert pace.votes(0)[3] == 4.0 and pace.votes(1)[3] == 0.0
    assert pace.votes(0)[3] == 0.0


@pytest.mark.parametrize("advice", [float("nan"), float("inf")])
def test_advice_that_is_no_number_is_none(advice: float) -> None:
    pace = Pace(CheckpointConfig(disk_auto=True))
    pace.advise(advice)
    assert pace.votes(0)[3] == 0.0


def test_advice_to_a_run_that_asked_for_none_changes_nothing() -> None:
    group = Group(disk_every_s=4.0)
    group.ranks[0].pace.advise(1.0)
    for _ in range(10):
        group.step()
    assert group.saved(0) == group.saved(1) == [5, 9]


@pytest.mark.parametrize(
    "marks",
    [None, 3, {"at_s": "x", "best": [], "every_s": {}}, {"at_s": float("nan"), "every_s": -2.0}],
)
def test_marks_that_nobody_can_read_begin_anew(marks: Any) -> None:
    pace = Pace(CheckpointConfig(disk_every_s=1.0))
    pace.adopt(marks, {})
    assert pace.marks() == {"at_s": 0.0, "best": None, "every_s": 0.0}


faults = st.lists(
    st.tuples(
        st.none() | st.sampled_from([0.1, 0.2, 0.3]),
        st.sampled_from([0.5, 1.0, 5.0]),
        st.sampled_from([(), (), (), (), (0,), (1,), (2,), (0, 2), (0, 1, 2)]),
        st.sampled_from([(), (), (), (0,), (1,), (0, 2)]),
        st.sampled_from([0.0, 0.0, 3.0, 8.0]),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    events=faults, every_s=st.sampled_from([0.0, 2.0, 6.0]), every=st.sampled_from([0, 4]),
    by_metric=st.booleans(), auto=st.booleans(), skews=st.tuples(*[st.floats(-1e4, 1e4)] * 3),
)  # fmt: skip
def test_what_all_completed_is_saved_by_all_or_by_none(
    events: list[Any], every_s: float, every: int, by_metric: bool, auto: bool,
    skews: tuple[float, ...],
) -> None:  # fmt: skip
    group = Group(
        skews=skews, disk_every_s=every_s, disk_every_steps=every, disk_on_metric=by_metric,
        metric="val", disk_auto=auto,
    )  # fmt: skip
    everyone: list[Rank] = list(group.ranks)
    members: dict[int, list[Rank]] = {1: list(group.ranks)}
    for logged, step_s, broken, dead, advice in events:
        if advice:
            group.ranks[0].pace.advise(advice)
        group.step(logged, step_s=step_s, broken=broken, dead=dead)
        members.setdefault(group.generation, list(group.ranks))
        everyone += [rank for rank in group.ranks if rank not in everyone]
        marks = {str(rank.pace.marks()) for rank in group.ranks}
        assert len(marks) == 1, "ranks in step share what they decide by"
    for generation, ranks in members.items():
        asked = [{s for s, g in rank.saved if g == generation} for rank in ranks]
        for step, _ in [place for place in group.whole if place[1] == generation]:
            # Saved for its measurement: decided with the next step, which must be whole as well.
            decided = (step + 1, generation) in group.whole or not by_metric
            if decided:
                assert len({step in one for one in asked}) == 1, (step, generation, asked)
