"""Asking for advice costs a rank nothing, and an answer that does not come changes nothing."""

from __future__ import annotations

from typing import Any

from relit_platform.worker.advice import ASK_EVERY_S, Adviser


class Manager:
    """answer: (over, what it says); away: calls cannot be sent."""

    def __init__(self) -> None:
        self.answer: tuple[bool, Any] = (True, 7.5)
        self.away = False
        self.asked: list[str] = []

    def send(self, method: str, *args: Any) -> Any | None:
        self.asked.append(method)
        return None if self.away else object()

    def answered(self, ref: Any) -> tuple[bool, Any]:
        return self.answer


def test_one_question_every_few_seconds() -> None:
    manager, told = Manager(), list[float]()
    adviser = Adviser(manager, told.append)
    for tenth in range(int(20 * ASK_EVERY_S)):
        adviser.ask(1e9 + tenth / 10)
    assert manager.asked == ["spacing"] * 2 and told == [7.5, 7.5]


def test_a_late_answer_is_waited_for_without_asking_again() -> None:
    manager, told = Manager(), list[float]()
    adviser = Adviser(manager, told.append)
    manager.answer = (False, None)
    for second in range(100):
        adviser.ask(float(second))
    assert len(manager.asked) == 1 and told == []
    manager.answer = (True, 3)
    adviser.ask(101.0)
    assert told == [3.0] and len(manager.asked) == 2


def test_no_advice_is_no_advice() -> None:
    manager, told = Manager(), list[float]()
    adviser = Adviser(manager, told.append)
    for now_s, answer in ((0.0, (True, 0.0)), (10.0, (True, None)), (20.0, (True, 0.0))):
        manager.answer = answer
        adviser.ask(now_s)
    manager.away = True
    adviser.ask(30.0)
    adviser.ask(31.0)
    assert told == [] and len(manager.asked) == 4


def test_a_clock_that_goes_back_asks_again() -> None:
    manager = Manager()
    adviser = Adviser(manager, lambda every_s: None)
    for now_s in (1e9, 1e9 - 3600.0):
        adviser.ask(now_s)
    assert len(manager.asked) == 2
