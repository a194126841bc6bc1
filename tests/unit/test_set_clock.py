"""A clock that somebody sets, as NTP does: it is not time that has passed, in either direction."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_harness import NODE, Bench
from node_harness import Node, persisted, worker
from shard_facts import shard, shards

from relit_platform.facts import ShardUploaded, Waiting
from relit_platform.machines.checkpoint_state import Limits

SET_BY_S = [400.0, -400.0, 1e6]


def test_what_is_waited_for_long_enough_is_given_up() -> None:
    bench = Bench().start("a", "b")
    bench.coordinator.fact(shard(10))
    bench.now += Limits().persist_deadline_s + 1
    assert bench.facts("ckpt.failed")


@pytest.mark.parametrize("by_s", SET_BY_S)
def test_a_save_under_way_is_not_given_up(by_s: float) -> None:
    bench = Bench().start("a", "b")
    bench.coordinator.fact(shard(10))
    bench.set_clock(by_s)
    bench.drain()
    bench.coordinator.fact(shard(10, rank=1))
    assert bench.work().coordinator.status()["committed"]["disk"] == 10
    assert not bench.facts("ckpt.failed")


@pytest.mark.parametrize("by_s", SET_BY_S)
def test_deadlines_still_come(by_s: float) -> None:
    bench = Bench().start("a", "b")
    bench.coordinator.fact(shard(10))
    bench.set_clock(by_s)
    bench.now += Limits().persist_deadline_s + 1
    assert bench.facts("ckpt.failed")


@pytest.mark.parametrize("by_s", SET_BY_S)
def test_a_silent_member_keeps_its_place(by_s: float) -> None:
    bench = Bench(spares=1).start("a", "b")
    bench.join("spare")
    bench.join("a", 0, 1, step=5)
    bench.set_clock(by_s)
    assert isinstance(bench.join("a", 0, 1, step=5), Waiting), "b may still come"
    bench.join("spare")
    assert bench.coordinator.status()["generation"] == 1


@pytest.mark.parametrize("by_s", SET_BY_S)
def test_the_object_tier_keeps_its_spacing(by_s: float) -> None:
    bench = Bench(checkpoint={"object_every_steps": 0, "object_every_s": 100.0}).start("a", "b")

    def saved(step: int) -> Any:
        for one in shards(step):
            bench.coordinator.fact(one)
        bench.work()
        return [call[2] for call in bench.agents.named("upload")]

    bench.set_clock(by_s)
    assert saved(10) == []
    bench.now += 101
    assert saved(20) == [20]


@pytest.mark.parametrize("by_s", SET_BY_S)
def test_what_is_written_down_is_the_time_of_the_clock(by_s: float) -> None:
    """It is compared with what other processes of the host write down."""
    bench = Bench()
    bench.coordinator.start_epoch(1)
    bench.join("a")
    bench.set_clock(by_s)
    bench.now += 3
    bench.join("b")
    formed = bench.facts("generation.formed")[0]
    waiting = {m["worker_id"]: m["waiting_since_s"] for m in formed.data["members"]}
    assert formed.at_s == formed.data["noticed_at_s"] == formed.data["filled_at_s"] == bench.now
    assert waiting == {"a": bench.now - 3, "b": bench.now}
    assert NODE in {m["node_id"] for m in formed.data["members"]}


def test_an_agents_seconds_are_those_that_passed(node: Node) -> None:
    """They say what saves cost, from which `auto` finds its spacing."""
    keeper = node.boot()
    times = iter(range(0, 10**9, 1000))  # at each look somebody has set the clock
    keeper._clock = lambda: float(next(times))
    shard = persisted(node, keeper, worker(keeper)[0], step=7)
    keeper.upload(7, 1, [0])
    assert 0 <= shard.seconds < 100
    assert 0 <= node.wait_for(ShardUploaded)[0].seconds < 100
