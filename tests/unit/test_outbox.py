"""The outbox: in order, at least once, bounded."""

import threading
import time

import pytest

from relit_platform.node import outbox as outbox_module
from relit_platform.node.outbox import Outbox


class Manager:
    """Receives facts; away while `away` is set; loses the answer of `unanswered` facts."""

    def __init__(self) -> None:
        self.away = threading.Event()
        self.unanswered: set[object] = set()
        self.got: list[object] = []

    def deliver(self, fact: object) -> None:
        if self.away.is_set():
            raise ConnectionError
        self.got.append(fact)
        if fact in self.unanswered:
            self.unanswered.remove(fact)
            raise TimeoutError

    def wait_for(self, expected: list[object]) -> None:
        deadline_s = time.monotonic() + 5.0
        while self.got != expected and time.monotonic() < deadline_s:
            time.sleep(0.002)
        assert self.got == expected


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    monkeypatch.setattr(outbox_module, "RETRY_FIRST_S", 0.002)
    return Manager()


def started(manager: Manager) -> Outbox:
    outbox = Outbox(manager.deliver)
    outbox.start()
    return outbox


def test_facts_arrive_in_order(manager: Manager) -> None:
    outbox = started(manager)
    for number in range(100):
        outbox.put(number)
    manager.wait_for(list(range(100)))
    outbox.close(1.0)


def test_facts_wait_for_the_manager(manager: Manager) -> None:
    manager.away.set()
    outbox = started(manager)
    for number in range(3):
        outbox.put(number)
    time.sleep(0.02)
    assert manager.got == []
    manager.away.clear()
    manager.wait_for([0, 1, 2])
    outbox.close(1.0)


def test_a_lost_answer_repeats_the_fact(manager: Manager) -> None:
    manager.unanswered = {1}
    outbox = started(manager)
    for number in range(3):
        outbox.put(number)
    manager.wait_for([0, 1, 1, 2])
    outbox.close(1.0)


def test_the_oldest_goes_when_it_is_full(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "CAPACITY", 3)
    outbox = Outbox(manager.deliver)
    for number in range(5):
        outbox.put(number)
    assert outbox.dropped == 2
    outbox.start()
    manager.wait_for([2, 3, 4])
    outbox.close(1.0)


def test_close_delivers_what_it_can_and_ends(manager: Manager) -> None:
    outbox = started(manager)
    outbox.put(1)
    outbox.close(5.0)
    assert manager.got == [1]
    manager.away.set()
    outbox = started(manager)
    outbox.put(2)
    started_s = time.monotonic()
    outbox.close(5.0)
    assert time.monotonic() - started_s < 2.0
