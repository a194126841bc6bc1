"""A new epoch asks every agent: all at once, and each with patience of its own."""

from __future__ import annotations

import threading

import pytest
from coordinator_harness import FakeAgents, empty_inventory

from relit_platform.control import rebuild
from relit_platform.control.ports import AgentError
from relit_platform.control.rebuild import PATIENCE_S, Found, Patience

NODES = ("n1", "n2", "n3")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def patience_of(clock: Clock) -> Patience:
    return Patience(lambda: clock.now_s, clock.sleep)


def test_agents_are_asked_at_once() -> None:
    everybody = threading.Barrier(len(NODES), timeout=10.0)

    def call(node: str) -> str:
        everybody.wait()  # breaks if one is asked after another has answered
        return node.upper()

    found = Found()
    assert rebuild._each(NODES, call, found, patience_of(Clock())) == {
        "n1": "N1",
        "n2": "N2",
        "n3": "N3",
    }
    assert found.silent == {}


def test_who_is_silent_is_named_and_the_others_count() -> None:
    agents = FakeAgents()
    agents.stock = {node: empty_inventory(node) for node in NODES}
    agents.away = {"n2"}
    found = Found()
    answers = rebuild._each(NODES, agents.inventory, found, patience_of(Clock()))
    assert list(answers) == ["n1", "n3"] and list(found.silent) == ["agent n2"]


def test_patience_is_there_again_for_the_next_epoch() -> None:
    clock = Clock()
    patience = patience_of(clock)

    def silent() -> None:
        raise AgentError("silent")

    for _ in range(2):
        began_s = clock.now_s
        with pytest.raises(AgentError):
            patience.ask("agent n1", silent)
        assert clock.now_s - began_s >= PATIENCE_S
