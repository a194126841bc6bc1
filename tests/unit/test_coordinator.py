"""The coordinator: answers at once, slow work outside the lock, and nothing lost by a restart."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from coordinator_harness import (
    NODE,
    Bench,
    FakeAgents,
    empty_inventory,
    in_thread,
    make_config,
    request,
)
from shard_facts import inventory, manifest, shard, shards, slot, uploaded

from relit_platform.control.background import Background
from relit_platform.control.coordinator import Coordinator
from relit_platform.control.object_tier import ObjectTier
from relit_platform.facts import (
    Assignment,
    Dismissed,
    Fact,
    Heartbeat,
    Refused,
    RowBatch,
    RunHistory,
    Waiting,
    WorkerExited,
)
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.errors import FencedError
from relit_storage.stores.memory import MemoryStore


def assigned(reply: object) -> Assignment:
    assert isinstance(reply, Assignment), reply
    return reply


def test_joins_before_the_epoch_wait_and_are_heard_when_it_begins() -> None:
    bench = Bench(workers=1)
    assert isinstance(bench.join("a"), Waiting)
    bench.coordinator.start_epoch(1)
    assert assigned(bench.join("a")).generation == 1


def test_first_generation_is_fresh_and_said() -> None:
    bench = Bench().start("a", "b")
    assert assigned(bench.join("a")).source.kind == "fresh"
    [formed] = bench.facts("generation.formed")
    assert formed.generation == 1 and formed.data["start_step"] == 0
    assert bench.coordinator.status()["phase"] == "running"


def test_a_spare_takes_over_without_losing_a_step() -> None:
    bench = Bench(workers=2, spares=1).start("a", "b", "s")
    bench.gone("b", last_step=7)
    reply = assigned(bench.join("a", 0, 1, step=7))
    assert reply.source.kind == "member" and reply.source.step == 7
    assert assigned(bench.join("s")).rank == 1
    assert bench.facts("generation.lost")[0].data["completed_step"] == 7


def test_ranks_that_went_with_their_node_are_noticed_by_nobody_but_ray() -> None:
    """All of them on one node, and the spare on another: no collective breaks, no agent reports."""
    bench = Bench(workers=1, spares=1)
    bench.agents.stock["n2"] = empty_inventory("n2")
    bench.start("a")
    spare = replace(request("s"), node_id="n2")
    bench.coordinator.join(spare, 0.0)
    bench.work()
    assert not bench.coordinator.lost(1)
    bench.agents.lost = bench.agents.away = {NODE}
    for _ in range(3):
        bench.now += 3.0
        bench.drain()
        queued, bench.queue = bench.queue, []
        for work in queued:  # planning begins over and over, for the state is nowhere
            work()
    assert bench.coordinator.lost(1)
    [ended] = bench.facts("worker.exited")
    assert (ended.data["worker_id"], ended.data["node_lost"]) == ("a", True)


def test_who_forms_a_generation_can_ask_whether_it_is_lost() -> None:
    bench = Bench(workers=2, spares=1).start("a", "b", "s")
    assert [bench.coordinator.lost(n) for n in (0, 1, 2)] == [True, False, False]
    bench.gone("s")
    assert not bench.coordinator.lost(1)
    bench.gone("b")
    assert bench.coordinator.lost(1)


def test_zombie_is_refused_with_the_newest_generation() -> None:
    bench = Bench(workers=2, spares=1).start("a", "b", "s")
    bench.gone("b")
    bench.join("a", 0, 1, step=7)
    reply = bench.join("b", 1, 1, step=7)
    assert isinstance(reply, Refused) and reply.newest_generation == 2


def real_coordinator(agents: FakeAgents, **config: Any) -> Coordinator:
    store = MemoryStore()
    return Coordinator(
        config=make_config(**config),
        agents=agents,
        objects=ObjectTier(store, CommitLog(store), time.time),
        background=Background(pytest.fail),
        clock=time.time,
        steady=time.monotonic,
        sleep=time.sleep,
    )


def test_a_blocked_spare_is_answered_within_milliseconds() -> None:
    coordinator = real_coordinator(FakeAgents(), workers=1, spares=1)
    coordinator.start_epoch(1)
    assert isinstance(coordinator.join(request("a"), 5.0), Assignment)
    thread, answers = in_thread(lambda: (coordinator.join(request("s"), 30.0), time.perf_counter()))
    while coordinator.status()["waiting"] == 0:
        time.sleep(0.001)
    bench_start = time.perf_counter()
    gone = WorkerExited(
        worker_id="a", node_id=NODE, pid=1, at_s=0, last_step=0, last_phase="forward"
    )
    coordinator.fact(gone)
    thread.join(5.0)
    reply, answered = answers[0]
    assert assigned(reply).rank == 0 and answered - bench_start < 0.2


def test_slow_agents_do_not_hold_the_lock() -> None:
    release = threading.Event()

    class Slow(FakeAgents):
        def publish(self, node_id: str, step: int, generation: int, manifest: bytes) -> None:
            release.wait(10.0)

    coordinator = real_coordinator(Slow(), workers=1)
    coordinator.start_epoch(1)
    coordinator.join(request("a"), 5.0)
    coordinator.fact(shard(5, 1, 0, 1))
    began = time.perf_counter()
    coordinator.status()
    assert time.perf_counter() - began < 1.0
    release.set()


def test_commit_on_disk_and_in_the_object_tier() -> None:
    bench = Bench().start("a", "b")
    for one in shards(20):
        bench.coordinator.fact(one)
    bench.work()
    [publish] = bench.agents.named("publish")
    assert publish[2:4] == (20, 1) and bench.coordinator.status()["committed"]["disk"] == 20
    assert bench.agents.named("upload") == [(NODE, "upload", 20, 1, (0, 1))]
    assert bench.coordinator.status()["saving"]
    for rank in range(2):
        bench.coordinator.fact(uploaded(20, rank=rank))
    bench.work()
    assert bench.coordinator.status()["committed"]["object"] == 20
    assert [c.step for c in bench.log.replay().commits] == [20]
    assert not bench.coordinator.status()["saving"]


def test_an_agent_that_is_away_is_asked_again() -> None:
    bench = Bench().start("a", "b")
    bench.agents.away.add(NODE)
    for one in shards(20):
        bench.coordinator.fact(one)
    for _ in range(3):
        bench.queue.pop(0)()
    assert bench.coordinator.status()["committed"]["disk"] is None
    bench.agents.away.clear()
    assert bench.work().coordinator.status()["committed"]["disk"] == 20


def test_all_dead_restores_from_memory() -> None:
    bench = Bench().start("a", "b")
    bench.gone("a")
    bench.gone("b")
    bench.agents.stock[NODE] = inventory(memory=[slot(6, 1, r) for r in range(2)])
    bench.join("c")
    reply = assigned(bench.join("d"))
    assert reply.source.plan is not None and reply.source.plan.tier == "memory"
    assert reply.source.step == 6 and reply.lineage == ((1, 0), (2, 6))


def test_broken_checkpoints_end_the_run_with_a_verdict() -> None:
    bench = Bench()
    bench.agents.stock[NODE] = inventory(disk=shards(4)[:1], manifests=[manifest(4)])
    bench.start("a", "b")
    assert isinstance(bench.join("a"), Dismissed)
    assert bench.coordinator.status()["verdict"].startswith("not_restorable")


def test_silence_is_not_taken_for_an_empty_run() -> None:
    bench = Bench()
    bench.coordinator.start_epoch(1)
    bench.agents.away.add(NODE)
    bench.coordinator.join(request("a"), 0.0)
    bench.coordinator.join(request("b"), 0.0)
    for _ in range(5):
        bench.queue.pop(0)()
    assert bench.coordinator.status()["phase"] == "planning"
    bench.agents.away.clear()
    bench.work()
    assert bench.coordinator.status()["generation"] == 1


def test_an_agent_that_appears_later_is_sealed_and_adopted() -> None:
    bench = Bench()
    del bench.agents.stock[NODE]
    bench.coordinator.start_epoch(1)
    late = inventory(disk=shards(4, 5), manifests=[manifest(4, 5)])
    bench.agents.stock[NODE] = replace(late, fence=5)
    bench.join("a")
    assert assigned(bench.join("b")).generation == 6
    assert bench.agents.named("seal") and bench.coordinator.status()["committed"]["disk"] == 4


def test_drain_forgets_only_what_was_acknowledged() -> None:
    bench = Bench().start("a", "b")
    first = bench.drain()
    assert bench.drain().facts == first.facts
    assert bench.drain(first.next).facts == ()
    restarted = bench.again().drain(first.next)
    assert restarted.status["epoch"] == 0
    bench.now += 1.0
    bench.coordinator.start_epoch(1)
    assert [f.kind for f in bench.drain(first.next).facts] == ["epoch.started"]


@pytest.mark.parametrize(
    ("second", "kind", "rows"),
    [
        ((1, (5, 0.5)), "", 1),
        ((1, (5, 0.6)), "row.conflict", 1),
        ((2, (5, 0.5)), "", 2),
        ((2, (5, 0.6)), "row.replaced", 2),
    ],
)
def test_rows(second: tuple[int, tuple[int, float]], kind: str, rows: int) -> None:
    """Step 5 was done by generation 1; generation 2 went back to step 4."""
    bench = Bench().start("a", "b")
    bench.rows(1, (5, 0.5))
    if second[0] == 2:
        bench.join("a", 0, 1, step=4)
        bench.join("b", 1, 1, step=4)
    bench.rows(second[0], second[1])
    drained = bench.drain()
    assert [r["step"] for r in drained.rows] == [5] * rows
    assert [f.kind for f in drained.facts if f.kind.startswith("row.")] == ([kind] if kind else [])


def test_rows_of_a_zombie_are_refused() -> None:
    bench = Bench().start("a", "b")
    bench.join("a", 0, 1, step=4)
    bench.join("b", 1, 1, step=4)
    bench.rows(1, (5, 9.9))
    assert not bench.drain().rows and bench.coordinator.status()["ignored"]["rows"] == 1


def test_first_new_step_of_a_generation_is_said_once() -> None:
    bench = Bench().start("a", "b")
    bench.rows(1, (1, 0.1), (2, 0.2))
    bench.join("a", 0, 1, step=2)
    bench.join("b", 1, 1, step=1)
    bench.rows(2, (2, 0.2), (3, 0.3), (4, 0.4))
    said = [(f.generation, f.step) for f in bench.facts("step.completed")]
    assert said == [(1, 1), (2, 3)]


def test_a_new_supervisor_gets_rows_that_the_old_one_lost() -> None:
    bench = Bench().start("a", "b")
    bench.rows(1, (1, 0.1), (2, 0.2))
    after = bench.drain().next
    bench.drain(after)
    bench.coordinator.start_epoch(2, RunHistory(generation=1, last_row_step=1, rows_whole_to=1))
    bench.rows(1, (1, 0.1), (2, 0.2))
    assert [r["step"] for r in bench.drain(after).rows] == [2]


def test_rows_say_from_where_they_are_needed() -> None:
    bench = Bench().start("a", "b")

    def send(*steps: int) -> int:
        rows = tuple({"step": step, "loss": 0.0} for step in steps)
        return bench.coordinator.rows(RowBatch(generation=1, rank=0, rows=rows))

    def written() -> None:
        bench.drain(bench.drain().next)

    assert send(1, 2) == 0, "not before they are written"
    written()
    assert send(5) == 2
    written()
    assert [send(4), send(3)] == [2, 2]
    written()
    assert send(5) == 5
    assert bench.again().rows(RowBatch(generation=1, rank=0, rows=())) == -1
    bench.coordinator.start_epoch(1, RunHistory(generation=1, last_row_step=3, rows_whole_to=3))
    assert send(5) == 3


def test_finish_gives_rank_0s_value() -> None:
    bench = Bench().start("a", "b")
    bench.coordinator.finished("a", 0, '{"acc": 1}')
    bench.coordinator.finished("a", 0, "null", True)
    bench.coordinator.finished("spare", -1, "null", True)
    assert not bench.coordinator.status()["finished"]
    bench.coordinator.finished("b", 1, "null")
    status = bench.coordinator.status()
    assert status["finished"] and not status["stopped"] and status["value"] == {"acc": 1}
    assert isinstance(bench.join("late"), Dismissed)


def test_stop_reaches_every_node_and_ends_stopped() -> None:
    bench = Bench().start("a", "b")
    bench.coordinator.request_stop("because")
    bench.coordinator.request_stop("because")
    assert bench.work().agents.named("set_stop") == [(NODE, "set_stop", 1)]
    for rank, worker in enumerate("ab"):
        bench.coordinator.finished(worker, rank, "null", True)
    status = bench.coordinator.status()
    assert status["stopped"] and not status["finished"] and status["stop_reason"] == "because"
    assert len(bench.facts("stop.requested")) == 1


def test_the_same_exception_at_the_same_step_again_is_final() -> None:
    bench = Bench().start("a", "b")
    error = ("ValueError", "bad", "trace")
    assert bench.coordinator.user_error("a", 0, 5, *error)[0]
    retry, reason = bench.coordinator.user_error("a", 0, 5, *error)
    assert not retry and "ValueError at step 5" in reason
    assert isinstance(bench.join("b", 1, 1, step=5), Dismissed)
    assert bench.coordinator.status()["verdict"].startswith("poison_step")


def test_recoveries_without_progress_end_the_run() -> None:
    bench = Bench(no_progress=2).start("a", "b")
    for generation in range(1, 4):
        bench.join("a", 0, generation, step=3)
        last = bench.join("b", 1, generation, step=3)
    assert isinstance(last, Dismissed) and "no_progress" in last.reason
    assert not bench.coordinator.status()["finished"]


def test_a_recreated_coordinator_knows_running_members_and_steps() -> None:
    bench = Bench(workers=2, spares=1).start("a", "b")
    bench.agents.stock[NODE] = inventory(disk=shards(20, 1), manifests=[manifest(20, 1)])
    bench.agents.beats[NODE] = [
        Heartbeat(worker_id=w, pid=1, rank=r, generation=1, step=25, phase="forward", at_s=0)
        for r, w in enumerate("ab")
    ]
    bench.again().start_epoch(1, RunHistory(generation=1, lineage=((1, 0),)))
    bench.work()
    assert bench.coordinator.status()["committed"]["disk"] == 20
    assert bench.agents.named("upload"), "what was not durable is driven on"
    assert isinstance(bench.join("s"), Waiting)
    bench.join("a", 0, 1, step=25)
    assert assigned(bench.join("b", 1, 1, step=25)).generation == 3


def test_a_recreated_coordinator_finishes_a_step_that_nobody_published() -> None:
    bench = Bench().start("a", "b")
    bench.agents.stock[NODE] = inventory(disk=shards(10, 1))
    bench.again().start_epoch(1)
    assert bench.work().agents.named("publish")[0][2:4] == (10, 1)


def test_generation_numbers_come_from_fences_log_and_history() -> None:
    for seen in ("fence", "history"):
        bench = Bench(workers=1)
        if seen == "fence":
            bench.agents.stock[NODE] = empty_inventory(NODE, fence=9)
        history = RunHistory(generation=9 if seen == "history" else 0)
        bench.coordinator.start_epoch(1, history)
        assert assigned(bench.join("a")).generation == 11, "10 may have been announced unseen"


def test_an_older_epoch_is_fenced_by_the_log() -> None:
    bench = Bench()
    bench.log.append_epoch(5, at_s=0.0)
    with pytest.raises(FencedError):
        bench.coordinator.start_epoch(4)


def test_a_new_epoch_seals_and_says_what_it_ended() -> None:
    bench = Bench().start("a", "b")
    bench.coordinator.start_epoch(2)
    assert (NODE, "seal", 2, 1) in bench.agents.calls
    assert bench.facts("epoch.started")[-1].data["ended"] == ["a", "b"]
    assert isinstance(bench.join("a", 0, 1, step=3), Refused)
    bench.join("c", epoch=2)
    assert assigned(bench.join("d", epoch=2)).generation == 2


def test_facts_pass_through_and_strangers_are_a_bug() -> None:
    bench = Bench().start()
    bench.coordinator.fact(Fact(kind="loop.begun", at_s=1.0, src="rank:0", data={"total_steps": 9}))
    assert bench.coordinator.status()["total_steps"] == 9
    with pytest.raises(TypeError):
        bench.coordinator.fact(object())


def test_an_exit_told_twice_counts_once() -> None:
    bench = Bench().start("a", "b")
    bench.gone("a")
    bench.gone("a")
    assert len(bench.facts("worker.exited")) == 1
