"""The checkpoint machine by table: from the first shard to the object tier, and every way out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from checkpoint_game import LIMITS, NOWHERE, Game
from shard_facts import shard, shards, uploaded

from relit_platform.facts import ShardFailed
from relit_platform.machines.cadence import Cadence
from relit_platform.machines.checkpoint_state import (
    Adopted,
    Checkpoint,
    CheckpointEvent,
    Deadline,
    Discard,
    Finishing,
    GenerationFormed,
    LogCommit,
    LogFailed,
    Logged,
    Measured,
    Note,
    Persisting,
    Publish,
    Published,
    PublishFailed,
    Upload,
)
from relit_storage.checkpoint.retention import Keep


def failed(step: int, tier: Any) -> ShardFailed:
    return ShardFailed(
        step=step, generation=1, rank=0, node_id="n1", tier=tier, reason="disk full", at_s=0.0
    )


def test_the_whole_way() -> None:
    game = Game().feed(Persisting(step=20, generation=1, rank=0, world=2))
    assert game.phase(20) == "open"
    assert not game.feed(shard(20, rank=0)).of(Publish)
    assert game.feed(shard(20, rank=1)).of(Publish)[0].checkpoint.nodes == ("n1",)
    game.feed(Published(step=20, generation=1))
    assert game.of(Upload) and game.phase(20) == "uploading" and game.book.newest("disk") == 20
    assert not game.feed(uploaded(20, rank=0)).of(LogCommit)
    assert game.feed(uploaded(20, rank=1)).of(LogCommit)
    game.feed(Logged(step=20, generation=1))
    assert game.phase(20) == "durable" and game.book.newest("object") == 20
    assert not game.book.saving


def test_a_step_whose_other_rank_died_is_given_up_with_the_next_commit() -> None:
    game = Game().feed(shard(20, rank=1))
    game.feed(GenerationFormed(generation=2, start_step=20))
    assert game.phase(20) == "open" and game.book.saving  # the agent may still find the other part
    game.committed(20, generation=2)
    assert game.phase(20, 1) == "abandoned" and game.of(Discard)
    assert game.book.newest("disk") == 20


def test_the_last_step_is_uploaded_even_if_nobody_was_heard_saying_so() -> None:
    game = Game().durable(20).committed(33)
    assert not game.of(Upload)
    assert [u.checkpoint.step for u in game.feed(Finishing()).of(Upload)] == [33]
    late = Game().durable(20).feed(Finishing()).committed(33)
    assert late.of(Upload), "also when it comes last of all"
    lost = Game().durable(20).committed(33).feed(shard(34), Finishing(), failed(34, "disk"))
    assert [u.checkpoint.step for u in lost.of(Upload)] == [33], "then the one before it is"


def test_a_shard_alone_opens_its_step() -> None:
    assert Game().feed(shard(5)).phase(5) == "open"


def test_only_due_steps_go_to_the_object_tier_unless_final() -> None:
    game = Game().committed(10)
    assert not game.of(Upload) and not game.book.saving
    assert game.committed(25).of(Upload), "the first at or after a multiple is due"
    game.feed(uploaded(25, rank=0), uploaded(25, rank=1), Logged(step=25, generation=1))
    assert not game.committed(30).of(Upload)
    game.feed(Persisting(step=30, generation=1, rank=0, world=2, final=True))
    assert game.of(Upload), "also when the word comes after the commit"


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([shard(5), failed(5, "disk")], "disk full"),
        ([*shards(5), PublishFailed(step=5, generation=1, reason="fenced")], "fenced"),
        ([shard(5), shard(6, rank=1)], "rank 1 has not saved it"),
    ],
)
def test_abandoned(events: list[CheckpointEvent], reason: str) -> None:
    game = Game().feed(*events)
    assert game.phase(5) == "abandoned" and reason in game.book.steps[5, 1].reason
    assert [(d.step, d.tier) for d in game.of(Discard)] == [(5, "disk")]


def test_a_disk_that_is_slower_than_the_cadence_commits_some_steps() -> None:
    """Rank 1's shards come three steps late; those of rank 0 at once."""
    game, slow, committed = Game(), list(range(1, 40)), []
    asked: list[int] = []
    for step in slow:
        game.feed(Persisting(step=step, generation=1, rank=0, world=2), shard(step))
        if len(asked) < 3:  # one slot is being filled, two are pinned
            asked.append(step)
        if step % 2 == 0:  # a persist takes two steps
            game.feed(shard(asked.pop(0), rank=1))
            for publish in game.of(Publish):
                game.feed(Published(step=publish.checkpoint.step, generation=1))
                committed.append(publish.checkpoint.step)
    assert len(committed) > 5 and committed[-1] > 30, committed
    assert all(later - step < 10 for step, later in pairwise(committed))


def test_over_the_limit_the_new_step_is_given_up_unless_it_is_the_last() -> None:
    game = Game().feed(shard(5), shard(6), shard(7))
    assert [game.phase(step) for step in (5, 6, 7)] == ["open", "open", "abandoned"]
    assert [(d.step, d.tier) for d in game.of(Discard)] == [(7, "disk")]
    game.feed(Persisting(step=8, generation=1, rank=0, world=2, final=True))
    assert [game.phase(step) for step in (5, 6, 8)] == ["abandoned", "open", "open"]


def test_the_old_generations_steps_give_way_first() -> None:
    game = Game().feed(shard(5), shard(6), GenerationFormed(generation=2, start_step=6))
    game.feed(Persisting(step=7, generation=2, rank=0, world=2))
    assert (game.phase(5, 1), game.phase(7, 2)) == ("abandoned", "open")


def test_steps_that_ranks_skip_by_turns_hold_up_none_of_those_they_all_save() -> None:
    game = Game().feed(shard(5), shard(6), shard(7), shard(7, rank=1))
    assert [game.phase(step) for step in (5, 6, 7)] == ["abandoned"] * 3
    assert game.feed(shard(8), shard(8, rank=1)).of(Publish)


def test_deadline_abandons_what_is_never_whole() -> None:
    game = Game().feed(shard(5))
    game.now += LIMITS.persist_deadline_s + 1
    assert game.feed(Deadline()).phase(5) == "abandoned"


@pytest.mark.parametrize(
    "event", [failed(20, "object"), LogFailed(step=20, generation=1, reason="x")]
)
def test_a_failed_upload_keeps_the_step_on_disk(event: CheckpointEvent) -> None:
    game = Game().committed(20).feed(event)
    assert game.phase(20) == "committed" and game.book.newest("disk") == 20
    assert not game.of(Upload), "not tried for ever"
    assert [n.kind for n in game.of(Note)] == ["ckpt.failed"]


def test_one_upload_at_a_time_and_the_newest_goes_next() -> None:
    game = Game().committed(20).committed(40).committed(60)
    assert [game.phase(s) for s in (20, 40, 60)] == ["uploading", "committed", "committed"]
    game.feed(uploaded(20, rank=0), uploaded(20, rank=1), Logged(step=20, generation=1))
    assert game.of(Upload)[0].checkpoint.step == 60 and game.phase(60) == "uploading"
    assert not game.book.steps[40, 1].wants_object


def test_a_generation_that_goes_back_gives_up_what_is_not_committed() -> None:
    game = Game().durable(20).committed(30).feed(shard(35))
    game.feed(GenerationFormed(generation=2, start_step=25))
    assert [game.phase(s) for s in (20, 30, 35)] == ["durable", "committed", "abandoned"]
    assert [(d.step, d.tier) for d in game.of(Discard)] == [(35, "disk")]
    assert game.book.newest("disk") == 20


def test_what_was_cut_off_goes_with_the_first_commit_of_the_new_line_on_that_tier() -> None:
    game = Game().durable(20).durable(40)
    game.feed(GenerationFormed(generation=2, start_step=20))
    assert not game.of(Discard) and [n.kind for n in game.of(Note)] == ["ckpt.cut_off"]
    assert (game.book.newest("disk"), game.book.newest("object")) == (20, 20)
    assert not game.committed(20, 1).of(Discard), "an older generation says nothing"
    game.committed(26, 2)
    assert [(d.step, d.generation, d.tier) for d in game.of(Discard)] == [(40, 1, "disk")]
    assert game.phase(40) == "durable"
    game.committed(41, 2).feed(uploaded(41, 2, 0), uploaded(41, 2, 1))
    assert game.phase(41, 2) == "uploading", "the step that was cut off takes nobody's turn"
    game.feed(Logged(step=41, generation=2))
    assert [(d.step, d.tier) for d in game.of(Discard) if d.generation == 1][-1] == (40, "object")
    assert game.phase(40) == "expired"


def test_what_was_cut_off_while_it_was_uploaded_never_becomes_durable() -> None:
    game = Game().committed(20).feed(uploaded(20, rank=0), uploaded(20, rank=1))
    game.feed(GenerationFormed(generation=2, start_step=10), Logged(step=20, generation=1))
    assert game.book.newest("object") is None and not game.of(Discard)
    game.durable(30, 2)
    assert (20, 1, "object") in [(d.step, d.generation, d.tier) for d in game.of(Discard)]


def test_an_older_generation_may_complete_what_is_on_the_line() -> None:
    game = Game().feed(shard(30, rank=0), GenerationFormed(generation=2, start_step=30))
    game.feed(shard(30, rank=1), Published(step=30, generation=1))
    assert game.book.newest("disk") == 30


def test_a_zombie_above_the_line_is_ignored_and_its_files_go() -> None:
    game = Game().feed(GenerationFormed(generation=2, start_step=30), shard(31, 1))
    assert (31, 1) not in game.book.steps and game.book.ignored == {
        "off the line": 1,
        "late shard": 1,
    }
    assert game.of(Discard)[0].nodes == ("n1",)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (Published(step=9, generation=1), "late manifest"),
        (Logged(step=9, generation=1), "late commit"),
        (uploaded(9), "late upload"),
        (failed(9, "disk"), "late failure"),
        (shard(20, rank=0), "shard again"),
    ],
)
def test_what_comes_late_is_counted_and_nothing_else(event: CheckpointEvent, why: str) -> None:
    game = Game().committed(20)
    before = game.book.steps
    game.feed(event)
    assert game.book.steps == before and game.book.ignored == {why: 1}


def test_published_after_it_was_given_up_is_deleted_again() -> None:
    game = Game().persisted(5).feed(failed(5, "disk"), Published(step=5, generation=1))
    assert game.of(Discard) and game.book.newest("disk") is None


def test_retention_keeps_the_newest_and_what_is_restored_or_uploading() -> None:
    game = Game(replace(LIMITS, object=NOWHERE)).committed(10).committed(11)
    game.feed(GenerationFormed(generation=2, start_step=11, protected=frozenset({(10, 1)})))
    assert not game.committed(12, 2).of(Discard)
    dropped = game.committed(13, 2).of(Discard)
    assert [(d.step, d.generation) for d in dropped] == [(11, 1)]
    game = Game().committed(20).committed(21).committed(22)
    assert game.phase(20) == "uploading" and game.book.steps[20, 1].on_disk


def test_a_durable_step_may_leave_the_disk_and_expires_with_its_last_tier() -> None:
    game = Game().durable(20).durable(40).durable(60)
    assert not game.book.steps[20, 1].on_disk and game.phase(20) == "expired"
    assert game.book.newest("object") == 60
    assert {(c.step, c.on_object) for c in game.book.steps.values()} >= {(40, True), (60, True)}


def test_adopted_steps_go_on_where_they_were() -> None:
    game = Game()
    whole = {s.rank: s for s in shards(20)}
    game.feed(Adopted(checkpoint=Checkpoint(step=20, generation=1, world=2, shards=whole)))
    assert game.of(Publish) and game.phase(20) == "persisted"
    there = Checkpoint(step=40, generation=1, world=2, shards=whole, on_disk=True)
    assert game.feed(Adopted(checkpoint=there)).of(Upload)
    assert game.feed(Adopted(checkpoint=replace(there, on_object=True))).phase(40) == "durable"


def half(step: int) -> Checkpoint:
    """A published step of which one node's shard is here; the other node is away."""
    there = {0: shard(step)}
    return Checkpoint(step=step, generation=1, world=2, shards=there, published=True)


def test_what_may_be_whole_on_nodes_that_are_away_is_not_given_up() -> None:
    game = Game(replace(LIMITS, object=NOWHERE))
    game.feed(*(Adopted(checkpoint=half(step)) for step in (5, 6, 7)))
    assert not game.book.saving
    game.now += 1e6
    assert not game.feed(Deadline()).of(Discard)
    assert not game.committed(10).of(Discard), "a newer step is no reason"
    assert {game.phase(step) for step in (5, 6, 7)} == {"open"}
    back = replace(half(7), shards={1: shard(7, rank=1, node="n2")})
    assert game.feed(Adopted(checkpoint=back)).of(Publish), "the other node is there again"
    assert game.feed(Published(step=7, generation=1)).phase(7) == "committed"
    assert (game.phase(5), game.phase(6)) == ("expired", "expired"), "two newer ones are kept"


def test_a_half_goes_when_all_that_is_kept_is_newer_unless_it_is_pinned() -> None:
    game = Game(replace(LIMITS, object=NOWHERE))
    game.pins = frozenset({5})
    game.feed(Adopted(checkpoint=half(5)), Adopted(checkpoint=half(6)))
    game.committed(10).committed(11)
    assert [(gone.step, gone.nodes) for gone in game.of(Discard)] == [(6, ("n1",))]
    assert (game.phase(5), game.phase(6)) == ("open", "expired")


def test_adopting_what_is_known_already() -> None:
    whole = {s.rank: s for s in shards(5)}
    there = Checkpoint(step=5, generation=1, world=2, shards=whole, on_disk=True)
    assert Game().feed(shard(5), Adopted(checkpoint=there)).phase(5) == "committed"
    game = Game().feed(*shards(5), Adopted(checkpoint=there))
    assert game.phase(5) == "persisted", "its own publication answers in a moment"
    game = Game().feed(shard(5), failed(5, "disk"), Adopted(checkpoint=there))
    assert game.phase(5) == "abandoned" and game.of(Discard), "a deletion that was lost"


def test_what_is_found_off_the_line_waits_for_a_commit_of_the_line() -> None:
    whole = {s.rank: s for s in shards(31)}
    there = Checkpoint(step=31, generation=1, world=2, shards=whole, on_disk=True, on_object=True)
    game = Game().feed(GenerationFormed(generation=2, start_step=30), Adopted(checkpoint=there))
    assert not game.of(Discard) and game.book.newest("object") is None
    cut = replace(there, on_disk=False, on_object=False)
    other = Game().feed(GenerationFormed(generation=2, start_step=30), Adopted(checkpoint=cut))
    assert [gone.tier for gone in other.of(Discard)] == ["disk"], "without a commit it is nothing"
    assert (31, 1) not in other.book.steps
    line = replace(there, step=33, generation=2, shards={s.rank: s for s in shards(33, 2)})
    game.feed(Adopted(checkpoint=line), Adopted(checkpoint=there))
    assert [(gone.step, gone.tier) for gone in game.of(Discard)] == [(31, "disk"), (31, "object")]


def test_pins_hold_on_every_tier_and_off_the_line_too() -> None:
    game = Game(replace(LIMITS, keep_disk=Keep(), keep_object=Keep()))
    game.pins = frozenset({20, 40})
    game.durable(20).durable(40).feed(GenerationFormed(generation=2, start_step=25))
    game.durable(60, 2)
    assert {c.step for c in game.book.steps.values() if c.on_disk and c.on_object} == {20, 40, 60}
    game.pins = frozenset()
    game.durable(80, 2)
    assert {c.step for c in game.book.steps.values() if c.on_object} == {80}


def test_the_object_tier_by_time_counts_from_the_last_step_that_went() -> None:
    game = Game(replace(LIMITS, object=Cadence(every_s=100.0)))
    assert not game.committed(10).of(Upload)
    game.now += 100
    assert game.committed(20).of(Upload)
    game.feed(failed(20, "object"))
    assert game.committed(21).of(Upload), "a failed upload is no upload"
    game.feed(uploaded(21, rank=0), uploaded(21, rank=1), Logged(step=21, generation=1))
    game.now += 99
    assert not game.committed(30).of(Upload)
    game.now += 1
    assert game.committed(31).of(Upload)


@pytest.mark.parametrize("row_first", [True, False], ids=["row first", "commit first"])
def test_a_step_that_measured_best_goes_to_the_object_tier(row_first: bool) -> None:
    game = Game(replace(LIMITS, object=Cadence(on_metric=True, mode="min")))

    def step(number: int, value: float) -> list[int]:
        game.feed(Measured(step=number, value=value)) if row_first else game.committed(number)
        game.committed(number) if row_first else game.feed(Measured(step=number, value=value))
        found = [u.checkpoint.step for u in game.of(Upload)]
        for done in found:
            game.feed(uploaded(done, rank=0), uploaded(done, rank=1))
            game.feed(Logged(step=done, generation=1))
        return found

    values = [(1, 3.0), (2, 4.0), (3, float("nan")), (4, 2.0), (5, 2.0)]
    assert [step(*pair) for pair in values] == [[1], [], [], [4], []]
    game.feed(GenerationFormed(generation=2, start_step=3))
    assert game.book.metrics.keys() == {1, 2, 3}, "what was rolled back was never measured"


def test_the_best_by_metric_stay_and_a_cap_too_small_is_said() -> None:
    game = Game(replace(LIMITS, object=NOWHERE, keep_disk=Keep(newest=1, best=1)))
    for step, value in ((10, 2.0), (20, 1.0), (30, 3.0), (40, 2.5)):
        game.committed(step).feed(Measured(step=step, value=value))
    game.committed(50)
    assert {c.step for c in game.book.steps.values() if c.on_disk} == {20, 50}
    small = Game(replace(LIMITS, object=NOWHERE, keep_disk=Keep(newest=9, max_bytes=450)))
    small.committed(10).committed(20).committed(30)
    assert {c.step for c in small.book.steps.values() if c.on_disk} == {20, 30}
    tiny = Game(replace(LIMITS, object=NOWHERE, keep_disk=Keep(max_bytes=10))).committed(10)
    assert [n.kind for n in tiny.of(Note)] == ["ckpt.committed", "ckpt.over_cap"]


def test_the_book_stays_bounded() -> None:
    game = Game(replace(LIMITS, object=NOWHERE, max_remembered=10))
    for step in range(1, 60):
        game.committed(step)
    assert len(game.book.steps) <= 11 and game.book.newest("disk") == 59
