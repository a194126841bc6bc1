"""Who keeps whose snapshots, and how agents hear of it."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_harness import Bench, empty_inventory

from relit_platform.control.peer_desk import ARRANGE_EVERY_S, GRACE_S
from relit_platform.facts import Fact
from relit_platform.machines.peer_ring import peers_of


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([], {}),
        (["n1"], {}),
        (["n1", "n1"], {}),
        (["n2", "n1"], {"n1": "n2", "n2": "n1"}),
        (["n3", "n1", "n2"], {"n1": "n2", "n2": "n3", "n3": "n1"}),
    ],
)
def test_the_next_in_the_ring(nodes: list[str], expected: dict[str, str]) -> None:
    assert peers_of(nodes) == expected


@pytest.mark.parametrize("count", range(2, 9))
def test_always_another_node_and_each_keeps_for_one(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    ring = peers_of(nodes)
    assert sorted(ring) == sorted(ring.values()) == nodes
    assert all(node != peer for node, peer in ring.items())
    lost = peers_of([node for node in nodes if node != "n1"])
    assert sum(lost.get(node) != ring[node] for node in lost) == 1 or count == 2


def bench_of(*nodes: str, **checkpoint: Any) -> Bench:
    bench = Bench(checkpoint=checkpoint)
    bench.agents.stock = {node: empty_inventory(node) for node in nodes}
    bench.coordinator.start_epoch(1)
    return bench.work()


def told(bench: Bench) -> dict[str, tuple[str, Any]]:
    """What each node was told last: its peer, and where that listens."""
    return {node: (peer, endpoint) for node, _, peer, endpoint, _ in bench.agents.named("set_peer")}


def started(bench: Bench, node: str) -> Bench:
    bench.agents.stock[node] = empty_inventory(node)
    bench.coordinator.fact(
        Fact(kind="agent.started", at_s=bench.now, src="a", data={"node_id": node, "pid": 1})
    )
    return bench.work()


def pass_time(bench: Bench, seconds: float = ARRANGE_EVERY_S) -> Bench:
    bench.now += seconds
    bench.drain()
    return bench.work()


def test_with_one_node_nobody_is_asked_to_listen() -> None:
    bench = pass_time(bench_of("n1"))
    assert bench.agents.named("listen") == []
    assert bench.agents.named("set_peer") == [("n1", "set_peer", "", None, 1)], "once"


def test_peer_off_is_off() -> None:
    bench = pass_time(bench_of("n1", "n2", peer="off"))
    assert bench.agents.named("listen") == [] and bench.agents.named("set_peer") == []


def test_two_nodes_are_each_others_peer_when_the_second_one_comes() -> None:
    bench = started(bench_of("n1"), "n2")
    assert told(bench) == {"n1": ("n2", ("n2", 1)), "n2": ("n1", ("n1", 1))}
    assert {call[-1] for call in bench.agents.named("set_peer")} == {1}, "the epoch"
    [fact] = bench.facts("peer.ring")
    assert fact.data == {"ring": {"n1": "n2", "n2": "n1"}}


def test_the_secret_is_in_no_fact_and_no_status() -> None:
    bench = started(bench_of("n1"), "n2")
    secret = bench.coordinator._peers._secret
    drained = bench.drain()
    assert len(secret) == 32
    for text in (str(drained), str(bench.coordinator.status()), str(bench.config.to_json())):
        assert secret.hex() not in text and str(secret) not in text


def test_a_node_that_falls_silent_is_left_out_after_a_while() -> None:
    bench = started(started(bench_of("n1"), "n2"), "n3")
    assert {node: peer for node, (peer, _) in told(bench).items()} == {
        "n1": "n2", "n2": "n3", "n3": "n1",
    }  # fmt: skip
    bench.agents.away = {"n2"}
    pass_time(bench)
    assert told(bench)["n1"] == ("n2", ("n2", 1)), "it may just be restarted"
    pass_time(bench, GRACE_S)
    assert told(bench)["n1"] == ("n3", ("n3", 1)) and told(bench)["n3"] == ("n1", ("n1", 1))
    bench.agents.away = {"n2", "n3"}
    pass_time(bench, GRACE_S + ARRANGE_EVERY_S)
    assert told(bench)["n1"] == ("", None), "nobody is left"


def test_a_new_manager_and_a_new_epoch_tell_everybody_again() -> None:
    bench = started(bench_of("n1"), "n2")
    first = bench.coordinator._peers._secret
    bench.agents.calls.clear()
    bench.again().start_epoch(2)
    bench.work()
    assert set(told(bench)) == {"n1", "n2"} and bench.coordinator._peers._secret != first
    assert {call[-1] for call in bench.agents.named("set_peer")} == {2}


def test_a_new_manager_takes_back_the_ring_of_the_one_before() -> None:
    bench = started(bench_of("n1"), "n2")
    del bench.agents.stock["n2"]
    bench.agents.calls.clear()
    bench.again().start_epoch(2)
    bench.agents.away = {"n1"}
    bench.work()
    assert told(bench) == {}
    bench.agents.away = set()
    pass_time(pass_time(bench))
    assert bench.agents.named("set_peer") == [("n1", "set_peer", "", None, 2)], "heard, once"


def test_a_clock_that_is_set_back_stops_nothing() -> None:
    bench = started(bench_of("n1"), "n2")
    bench.drain()
    bench.agents.away = {"n2"}
    bench.set_clock(-500.0)
    pass_time(bench)
    assert "n1" not in told(bench) or told(bench)["n1"] == ("n2", ("n2", 1)), "silent just now"
    pass_time(bench, GRACE_S)
    assert told(bench)["n1"] == ("", None)


def test_a_plan_has_every_agent_listen_before_it_is_asked() -> None:
    bench = bench_of("n1", "n2")
    bench.agents.calls.clear()
    bench.join("a")
    bench.join("b")
    for node in ("n1", "n2"):
        verbs = [call[1] for call in bench.agents.calls if call[0] == node]
        assert verbs.index("seal") < verbs.index("listen") < verbs.index("inventory")
