"""What a restore may read is not deleted while it is under way; what had to go goes afterwards."""

from __future__ import annotations

from dataclasses import replace

from checkpoint_game import LIMITS, NOWHERE, Game
from coordinator_harness import Bench
from shard_facts import inventory, manifest, shard, shards

from relit_platform.facts import Assignment, NodeInventory
from relit_platform.machines.checkpoint_state import (
    Adopted,
    Checkpoint,
    Discard,
    GenerationFormed,
    NotDeleted,
    Persisting,
    Published,
    PublishFailed,
    ReadPins,
    Restoring,
)

ON_DISK = replace(LIMITS, object=NOWHERE)


def given_up(step: int) -> Game:
    """A step whose manifest one of two nodes did not take."""
    game = Game(ON_DISK).persisted(step)
    return game.feed(PublishFailed(step=step, generation=1, reason="n2 does not answer"))


def found(step: int) -> Checkpoint:
    whole = {one.rank: one for one in shards(step)}
    return Checkpoint(step=step, generation=1, world=2, shards=whole, on_disk=True, published=True)


def gone(game: Game) -> list[tuple[int, int]]:
    return [(action.step, action.generation) for action in game.of(Discard)]


def restored(game: Game, step: int, generation: int = 2) -> Game:
    """A restore of generation 1's step, up to the first step of the new generation."""
    plan = frozenset({(step, 1)})
    game.feed(Restoring(), Restoring(steps=plan))
    return game.feed(
        GenerationFormed(generation=generation, start_step=step, protected=plan),
        Persisting(step=step + 1, generation=generation, rank=0, world=2),
    )


def test_a_step_that_a_restore_has_chosen_is_not_deleted_when_it_is_found_again() -> None:
    game = given_up(10)
    assert gone(game) == [(10, 1)]
    game.feed(Restoring(), Restoring(steps=frozenset({(10, 1)})))
    assert gone(game.feed(Adopted(checkpoint=found(10)))) == []
    restored(game, 10)
    assert gone(game) == [], "its generation may have to begin with it once more"
    game.feed(GenerationFormed(generation=3, start_step=12))
    assert gone(game) == [(10, 1)], "and is deleted in the end, once"
    assert not game.book.withheld


def test_a_step_that_fails_to_be_published_stays_while_a_restore_may_choose_it() -> None:
    game = Game(ON_DISK).persisted(10).feed(Restoring())
    game.feed(PublishFailed(step=10, generation=1, reason="n2 does not answer"))
    assert game.phase(10) == "abandoned" and gone(game) == []
    game.feed(GenerationFormed(generation=2, start_step=12))
    assert gone(game) == [(10, 1)], "a member had the state: nothing is restored"


def test_retention_rests_until_the_new_generation_shows_a_step() -> None:
    """Should 20 and 30 be refused, 10 is all that is left."""
    game = Game(ON_DISK).committed(10).committed(20).persisted(30).feed(Restoring())
    assert gone(game.feed(Published(step=30, generation=1))) == []
    plan = frozenset({(30, 1)})
    game.feed(GenerationFormed(generation=2, start_step=30, protected=plan))
    assert gone(game.feed(Restoring())) == [], "it was refused: another plan"
    restored(game, 30, 3)
    assert ReadPins() in game.last and gone(game) == [(10, 1)]


def test_what_is_off_the_line_may_go_at_once() -> None:
    game = Game(ON_DISK).committed(10).feed(shard(20), Restoring())
    plan = frozenset({(10, 1)})
    game.feed(GenerationFormed(generation=2, start_step=10, protected=plan))
    assert gone(game) == [(20, 1)]


def test_an_old_generation_does_not_end_the_restore_of_a_newer_one() -> None:
    """Not while the plan is made either: the dead have been persisting, and facts come twice."""
    game = Game(ON_DISK).committed(10).persisted(20)
    late = PublishFailed(step=20, generation=1, reason="n2 does not answer")
    game.feed(Restoring(), late, shard(20), Persisting(step=20, generation=1, rank=1, world=2))
    assert game.book.restoring and gone(game) == []
    plan = frozenset({(10, 1)})
    game.feed(GenerationFormed(generation=2, start_step=10, protected=plan), shard(10))
    assert game.book.restoring
    assert not game.feed(shard(11, 2)).book.restoring


def test_a_deletion_that_met_a_restore_comes_back_later() -> None:
    game = given_up(10)
    late = game.of(Discard)[0]
    restored(game, 10).feed(NotDeleted(discard=late))
    assert gone(game) == []
    game.feed(GenerationFormed(generation=3, start_step=12))
    assert game.of(Discard) == [late]


# ---- two nodes, published on one of them ----


def two_nodes(step: int) -> dict[str, NodeInventory]:
    """Rank r's shard is on node r + 1; n1 alone has the manifest."""
    ours = [shard(step, 1, 0, 2, "n1"), shard(step, 1, 1, 2, "n2")]
    there = manifest(step)
    return {
        "n1": replace(inventory("n1", disk=ours[:1], manifests=[there]), endpoint=("n1", 1)),
        "n2": replace(inventory("n2", disk=ours[1:]), endpoint=("n2", 1)),
    }


def published_on_one(step: int) -> Bench:
    """Generation 1 of two ranks; its step was published on n1 and given up because of n2."""
    bench = Bench().start("a", "b")
    bench.agents.stock = two_nodes(step)
    bench.agents.deaf = {"n2"}
    for shards_of in bench.agents.stock.values():
        for one in shards_of.disk:
            bench.coordinator.fact(one)
    return bench


def test_the_coordinator_keeps_what_its_own_plan_has_chosen() -> None:
    bench = published_on_one(10).work()
    assert bench.coordinator.status()["committed"]["disk"] is None
    bench.agents.deaf = set()
    bench.agents.calls.clear()
    bench.gone("a")
    bench.gone("b")
    bench.join("c")
    reply = bench.join("d")
    assert isinstance(reply, Assignment) and reply.source.step == 10
    assert bench.work().agents.named("drop") == []


def test_a_deletion_under_way_waits_while_a_plan_is_made() -> None:
    """Any step of the line may be what the plan falls back to."""
    bench = published_on_one(10)
    for _ in range(8):
        bench.queue.pop(0)()
    deletions, bench.queue = bench.queue, []
    assert deletions
    bench.gone("a")
    bench.gone("b")
    bench.join("c")
    bench.coordinator._saves.feed(Restoring())
    bench.agents.deaf = set()
    for deletion in deletions:
        deletion()
    assert bench.agents.named("drop") == []


def test_a_deletion_under_way_does_not_take_what_a_plan_has_chosen() -> None:
    bench = published_on_one(10)
    for _ in range(8):  # the last try fails: the step is given up, its deletion is queued
        bench.queue.pop(0)()
    bench.agents.deaf = set()
    deletions, bench.queue = bench.queue, []
    assert deletions
    bench.gone("a")
    bench.gone("b")
    bench.join("c")
    reply = bench.join("d")
    assert isinstance(reply, Assignment) and reply.source.step == 10
    bench.queue = deletions
    assert bench.work().agents.named("drop") == []
