"""A stop reaches whoever can hear it."""

from __future__ import annotations

import threading

from coordinator_harness import FakeAgents, empty_inventory

from relit_platform.control.ports import AgentError
from relit_platform.control.stop_bell import StopBell


def agents_of(*nodes: str) -> FakeAgents:
    agents = FakeAgents()
    agents.stock = {node: empty_inventory(node) for node in nodes}
    return agents


def told(agents: FakeAgents) -> list[str]:
    return [call[0] for call in agents.calls if call[1] == "set_stop"]


def test_a_node_that_does_not_answer_keeps_it_from_no_other() -> None:
    agents = agents_of("n1", "n2", "n3")
    agents.away = {"n1"}
    StopBell(agents).ring()
    assert {"n2", "n3"} <= set(told(agents))


def test_two_do_not_ring_at_once() -> None:
    agents, began, goes_on = agents_of("n1"), threading.Event(), threading.Event()
    real = agents.set_stop

    def set_stop(node_id: str, number: int) -> None:
        began.set()
        assert goes_on.wait(10.0)
        real(node_id, number)

    agents.set_stop = set_stop  # type: ignore[method-assign]
    bell = StopBell(agents)
    first = threading.Thread(target=bell.ring)
    first.start()
    assert began.wait(10.0)
    bell.ring()  # returns at once
    goes_on.set()
    first.join()
    assert told(agents) == ["n1"]


def test_a_cluster_that_lists_nobody_is_asked_again_later() -> None:
    agents = agents_of("n1")

    def nobody() -> tuple[str, ...]:
        raise AgentError("the head is away")

    agents.nodes = nobody  # type: ignore[method-assign]
    StopBell(agents).ring()
    assert told(agents) == []
