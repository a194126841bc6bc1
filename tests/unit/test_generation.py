"""The generation machine by table: each rule of its module text has a test here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from relit_platform.facts import Assignment, FaultReport, JoinRequest, RestorePlan, StateSource
from relit_platform.machines.generation import (
    Action,
    Announce,
    Dismiss,
    Emit,
    EpochStarted,
    Event,
    GenerationState,
    Halted,
    Joined,
    MemberFinished,
    Phase,
    Planned,
    PlanRestore,
    Refuse,
    StopRequested,
    Tick,
    WorkerGone,
    advance,
    next_deadline,
)

FRESH = StateSource(kind="fresh", step=0)


class Game:
    """Feeds events and keeps what came out of the last one."""

    def __init__(self, world: int = 2, spares: int = 0) -> None:
        self.state = GenerationState(world=world, spares=spares)
        self.now = 100.0
        self.last: list[Action] = []
        self.feed(EpochStarted(epoch=1))

    def feed(self, event: Event) -> Game:
        self.state, self.last = advance(self.state, event, self.now)
        return self

    def join(
        self, worker: str, rank: int | None = None, gen: int = 0, step: int | None = None, **k: Any
    ) -> Game:
        request = JoinRequest(
            worker_id=worker,
            epoch=k.pop("epoch", 1),
            node_id=k.pop("node", "n1"),
            pid=1,
            rank=rank,
            generation=gen,
            step=step,
            endpoint=k.pop("endpoint", (worker, 1)),
            at_s=self.now,
            **k,
        )
        return self.feed(Joined(request=request, hold_s=5.0))

    @property
    def phase(self) -> str:
        return str(self.state.phase)

    def planned(self, source: StateSource = FRESH) -> Game:
        return self.feed(Planned(plan_id=self.state.plan_id, source=source))

    def of(self, kind: type) -> list[Any]:
        return [action for action in self.last if isinstance(action, kind)]

    def places(self) -> dict[str, int]:
        """Worker -> rank of the last announcement."""
        [announce] = self.of(Announce)
        return {worker: a.rank for worker, a in announce.assignments.items()}

    def one(self) -> Assignment:
        [announce] = self.of(Announce)
        assignment: Assignment = next(iter(announce.assignments.values()))
        return assignment


def running(world: int = 2, spares: int = 0) -> Game:
    """Generation 1 runs with workers a, b, ... in ranks 0, 1, ..."""
    game = Game(world, spares)
    for worker in "abcdefg"[:world]:
        game.join(worker)
    return game.planned()


def test_first_generation_is_planned_then_announced() -> None:
    game = Game().join("a")
    assert game.phase == "idle" and not game.last
    game.join("b", node="n2")
    [plan] = game.of(PlanRestore)
    assert plan.nodes == ("n1", "n2") and game.phase == "planning"
    game.planned()
    assert game.places() == {"a": 0, "b": 1}
    assignment = game.one()
    assert (assignment.generation, assignment.world) == (1, 2)
    assert assignment.endpoint == ("a", 1) and assignment.source == FRESH


def test_planned_for_an_older_plan_is_ignored() -> None:
    game = Game().join("a").join("b")
    game.feed(Planned(plan_id=game.state.plan_id - 1, source=FRESH))
    assert game.state.phase is Phase.PLANNING and not game.last


def test_newcomer_waits_as_spare_while_the_generation_runs() -> None:
    game = running(spares=1).join("s")
    assert not game.last and game.state.phase is Phase.RUNNING


def test_spare_takes_the_place_of_the_dead_at_the_last_survivors_join() -> None:
    game = running(3, 1).join("s").feed(WorkerGone(worker_id="b"))
    game.join("a", 0, 1, 7)
    assert game.state.phase is Phase.FORMING and not game.of(Announce)
    game.join("c", 2, 1, 7)
    assert game.places() == {"a": 0, "s": 1, "c": 2}
    assert game.one().source == StateSource(kind="member", step=7, rank=0)
    assert game.one().generation == 2


def test_exit_after_the_join_fills_the_place_too() -> None:
    game = running(2, 1).join("s").join("a", 0, 1, 7)
    assert not game.of(Announce)
    game.feed(WorkerGone(worker_id="b"))
    assert game.places() == {"a": 0, "s": 1}


def test_longest_waiting_spare_goes_first() -> None:
    game = running(2, 2)
    game.now = 101.0
    game.join("old")
    game.now = 102.0
    game.join("young").join("old").feed(WorkerGone(worker_id="b")).join("a", 0, 1, 3)
    assert game.places() == {"a": 0, "old": 1}


def test_without_a_spare_the_generation_waits_for_the_respawned_worker() -> None:
    game = running().feed(WorkerGone(worker_id="b")).join("a", 0, 1, 5)
    game.now += 1000.0
    game.feed(Tick()).join("a", 0, 1, 5)
    assert not game.of(Announce)
    assert game.join("b2").places() == {"a": 0, "b2": 1}


def test_highest_held_step_is_the_source_lowest_rank_on_a_tie() -> None:
    game = running(3, 1).join("s").feed(WorkerGone(worker_id="a"))
    game.join("b", 1, 1, 8).join("c", 2, 1, 8)
    assert game.one().source == StateSource(kind="member", step=8, rank=1)
    game = running(2).join("a", 0, 1, 8).join("b", 1, 1, 9)
    assert game.one().source == StateSource(kind="member", step=9, rank=1)


def test_nobody_holds_state_so_a_checkpoint_is_planned() -> None:
    game = running().feed(WorkerGone(worker_id="a")).feed(WorkerGone(worker_id="b"))
    game.join("x").join("y")
    [lost] = [e for e in game.of(Emit) if e.kind == "generation.lost"]
    assert lost.data["rank"] is None and game.of(PlanRestore)
    plan = RestorePlan(step=4, generation=1, world=2, tier="disk", shards=())
    game.planned(StateSource(kind="checkpoint", step=4, plan=plan))
    assert game.one().generation == 2 and game.state.lineage.newest_start == 4


def test_chosen_member_dies_while_planning() -> None:
    game = Game(2, 1).join("a").join("b").feed(WorkerGone(worker_id="a"))
    assert game.state.phase is Phase.FORMING
    stale = game.state.plan_id
    game.join("c")
    assert game.of(PlanRestore)[0].plan_id == stale + 1
    assert game.planned().places() == {"b": 0, "c": 1}


def test_lost_answer_is_given_again_and_is_no_fault() -> None:
    game = running()
    game.join("b", None, 0)
    assert game.places() == {"b": 1} and game.state.phase is Phase.RUNNING
    assert game.one().generation == 1


def test_a_member_that_could_not_form_starts_the_generation_over() -> None:
    game = running().join("b", None, 0, endpoint=("b", 2)).feed(WorkerGone(worker_id="a"))
    assert game.state.phase is Phase.FORMING
    assert game.join("a2").planned().places() == {"b": 1, "a2": 0}


def test_rank_0_with_another_store_starts_the_generation_over() -> None:
    game = running().join("a", None, 0, endpoint=("a", 2))
    assert game.state.phase is Phase.FORMING
    game.join("b", 1, 1)
    assert game.planned().one().endpoint == ("a", 2)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"worker": "b", "rank": 1, "gen": 1, "step": 9}, "given away"),
        ({"worker": "x", "rank": 0, "gen": 1, "step": 9}, "given away"),
        ({"worker": "a", "rank": 0, "gen": 2, "step": 9, "epoch": 0}, "epoch"),
    ],
)
def test_refused(event: dict[str, Any], reason: str) -> None:
    game = running(2, 1).join("s").join("a", 0, 1, 7)
    game.now += 0.3
    game.feed(Tick())
    assert game.places() == {"a": 0, "s": 1}
    game.join(**event)
    [refusal] = game.of(Refuse)
    assert reason in refusal.reason


def test_a_worker_known_to_be_gone_is_refused() -> None:
    game = running().feed(WorkerGone(worker_id="b")).join("b", 1, 1, 7)
    [refusal] = game.of(Refuse)
    assert refusal.worker_id == "b"


def test_silent_member_keeps_its_place_for_the_grace_only() -> None:
    game = running(2, 1).join("s").join("a", 0, 1, 7)
    deadline = next_deadline(game.state)
    assert deadline == game.now + game.state.silent_s
    game.now = deadline - 0.01
    assert not game.feed(Tick()).of(Announce)
    game.now = deadline
    assert game.feed(Tick()).places() == {"a": 0, "s": 1}


def test_a_known_death_explains_the_fault_so_others_get_more_time() -> None:
    game = running(3, 2).join("s").join("t").feed(WorkerGone(worker_id="b")).join("a", 0, 1, 7)
    game.now += game.state.straggler_s - 1
    assert not game.feed(Tick()).join("a", 0, 1, 7).join("s").join("t").of(Announce)
    assert game.join("c", 2, 1, 7).places() == {"a": 0, "s": 1, "c": 2}


def test_who_still_reads_keeps_its_place_though_another_has_refused_a_file() -> None:
    fault = FaultReport(kind="restore_refused", message="m", at_s=1.0, refused={"file": "f"})
    game = running(2, 1).join("s").join("a", 0, 1, None, fault=fault)
    game.now += game.state.straggler_s - 1
    assert not game.feed(Tick()).join("a", 0, 1, None, fault=fault).join("s").last
    game.now += 2
    asked = [game.join("s").last, game.join("a", 0, 1, None, fault=fault).last]
    planned = [action for actions in asked for action in actions if type(action) is PlanRestore]
    assert planned, "it may have died after all"


def test_as_many_waiting_as_processes_means_the_others_are_dead() -> None:
    game = running(2, 1).join("s")
    game.now += 1.0
    game.join("x").join("y")
    assert not game.of(PlanRestore), "s may have died, and x or y be in its place"
    game.now += 1.0
    assert game.join("s").of(PlanRestore)


def test_a_member_that_waited_and_fell_silent_counts_as_dead() -> None:
    game = running(2, 1).join("a", 0, 1, 7)
    game.now += 60.0
    game.join("x").join("y")
    assert set(game.of(PlanRestore)[0].nodes) == {"n1"}
    assert "a" not in game.state.chosen.values()


def test_what_a_worker_without_rank_holds_is_not_believed() -> None:
    game = Game().join("a", step=50).join("b")
    assert game.of(PlanRestore)


def test_refused_file_is_excluded_from_the_next_plan() -> None:
    bad = {"tier": "disk", "step": 4, "generation": 1, "file": "f", "reason": "checksum"}
    fault = FaultReport(kind="restore_refused", message="m", at_s=1.0, refused=bad)
    game = running().join("a", 0, 1, None, fault=fault).join("b", 1, 1, None)
    [plan] = game.of(PlanRestore)
    assert plan.excluded == (bad,)


def test_two_errors_at_once_make_one_generation() -> None:
    game = running().join("a", 0, 1, 7).join("b", 1, 1, 7)
    assert game.one().generation == 2
    lost = [a for a in game.last if isinstance(a, Emit) and a.kind == "generation.lost"]
    assert not lost, "the second join belongs to the first fault"


def test_epilogue_of_the_unfinished() -> None:
    game = running(3, 0).feed(MemberFinished(worker_id="a", rank=0))
    game.feed(WorkerGone(worker_id="b")).join("b2")
    game.now += 0.3
    game.feed(Tick())
    game.planned()
    assert game.one().epilogue and game.one().world == 1 and game.places() == {"b2": 0}
    game.feed(MemberFinished(worker_id="b2", rank=0)).feed(MemberFinished(worker_id="c", rank=2))
    assert game.state.phase is Phase.DONE


def test_finish_dismisses_whoever_waits_and_whoever_comes() -> None:
    game = running(2, 1).join("s")
    game.feed(MemberFinished(worker_id="a", rank=0)).feed(MemberFinished(worker_id="b", rank=1))
    assert game.of(Dismiss)[0].reason == "finished" and "s" in game.of(Dismiss)[0].worker_ids
    assert game.join("late").of(Dismiss)[0].worker_ids == ("late",)


def test_finish_by_a_stranger_changes_nothing() -> None:
    game = running().feed(MemberFinished(worker_id="zombie", rank=0))
    assert not game.state.finished
    assert [e.kind for e in game.of(Emit)] == ["rank.stale_finish"]


def test_stop_without_any_state_dismisses_newcomers() -> None:
    game = Game().join("a").feed(StopRequested(reason="asked"))
    assert game.of(Dismiss)[0] == Dismiss(worker_ids=("a",), reason="asked")


def test_stop_while_forming_still_forms_so_that_the_state_is_saved() -> None:
    game = running().feed(StopRequested(reason="asked")).join("a", 0, 1, 7)
    assert not game.of(Dismiss)
    assert game.join("b", 1, 1, 7).places() == {"a": 0, "b": 1}


def test_halt_dismisses_members_too() -> None:
    game = running(2, 1).join("s").feed(Halted(reason="poison"))
    assert set(game.of(Dismiss)[0].worker_ids) == {"s", "a", "b"}


def test_a_new_epoch_forgets_members_but_never_a_number() -> None:
    game = running().feed(EpochStarted(epoch=2, seen_generation=7))
    assert game.state.newest == 7 and not game.state.holders
    game.join("a", 0, 1, 9, epoch=1)
    assert game.of(Refuse)
    game.join("x", epoch=2).join("y", epoch=2).planned()
    assert game.one().generation == 8


def test_a_join_of_a_later_epoch_waits() -> None:
    game = Game().join("a", epoch=2)
    assert not game.last and not game.state.waiting


def test_recreated_manager_knows_the_members_that_run() -> None:
    game = Game(2, 2)
    game.feed(EpochStarted(epoch=2, seen_generation=4, holders={0: "a", 1: "b"}))
    for spare in ("s", "t"):
        game.join(spare, epoch=2)
    assert not game.last, "spares must not replace members that run"
    game.join("a", 0, 4, 50, epoch=2).join("b", 1, 4, 50, epoch=2)
    assert game.places() == {"a": 0, "b": 1} and game.one().generation == 5


def test_recreated_manager_learns_a_higher_number_from_a_member() -> None:
    game = Game().join("a", 0, 6, 50).join("b", 1, 6, 51)
    assert game.one().generation == 7 and game.one().source.rank == 1


def test_claim_of_a_vacant_rank_with_rolled_back_state_is_refused() -> None:
    game = Game()
    game.feed(EpochStarted(epoch=1, seen_generation=3, lineage=((3, 20),)))
    assert game.join("old", 1, 2, 25).of(Refuse)
    assert not game.join("fine", 1, 2, 20).of(Refuse)


def test_lineage_comes_back_with_the_members() -> None:
    game = Game().join("a", 0, 3, 30, lineage=((2, 5), (3, 20)))
    assert game.state.lineage.entries == ((2, 5), (3, 20))


def test_state_is_never_changed_in_place() -> None:
    before = running(2, 1).state
    kept = replace(before)
    advance(before, WorkerGone(worker_id="a"), 1.0)
    assert before == kept
