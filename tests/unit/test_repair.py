"""Replacing dead workers, against a stand-in for Ray's worker group with Ray's own weakness."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from relit_platform.ray_train import repair


class Group:
    """One worker. Its call answers, raises because the process is dead, or hangs."""

    def __init__(self, answer: str = "") -> None:
        self.answer = answer
        self.active = True
        actor = SimpleNamespace(clear_result_queue=SimpleNamespace(remote=lambda: self))
        self.workers = [SimpleNamespace(actor=actor)]

    def is_active(self) -> bool:
        return self.active

    def get_workers(self) -> list[Any]:
        return self.workers

    def shutdown(self) -> None:
        self.active = False


class Groups:
    """A worker group; replacing asks every other active group, as Ray's does."""

    def __init__(self, *answers: str) -> None:
        self._replica_groups = [Group(answer) for answer in answers]
        self._latest_poll_status = object()
        self.replaced: list[int] = []
        self.fail_at: int | None = None

    def replace_replica_group(self, index: int) -> None:
        self._replica_groups[index].shutdown()
        get([g for g in self._replica_groups if g.active])
        if index == self.fail_at:
            self.fail_at = None
            raise RuntimeError("it died while it started")
        self._replica_groups[index] = Group()
        self.replaced.append(index)


def get(asked: list[Group], timeout: float = 0.0) -> None:
    for group in asked:
        if group.answer == "dead":
            raise RayActorError
        if group.answer == "hangs":
            raise GetTimeoutError


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.get", get)


def repaired(*answers: str) -> Groups:
    groups = Groups(*answers)
    repair.RepairCallback().after_worker_group_start(groups)
    return groups


def replace_all(groups: Groups, *indices: int) -> None:
    for index in indices:
        groups.replace_replica_group(index)


def test_two_dead_workers_of_one_poll_are_both_replaced() -> None:
    with pytest.raises(RayActorError):
        Groups("dead", "dead", "").replace_replica_group(0)
    groups = repaired("dead", "dead", "")
    replace_all(groups, 0, 1)
    assert groups.replaced == [0, 1]
    assert all(group.active and not group.answer for group in groups._replica_groups)


def test_one_that_died_after_the_poll_is_closed_for_the_next_poll() -> None:
    groups = repaired("dead", "dead", "")
    replace_all(groups, 0)
    assert groups.replaced == [0]
    assert not groups._replica_groups[1].active


def test_a_round_that_failed_does_not_replace_the_good_ones_again() -> None:
    groups = repaired("dead", "dead", "")
    groups.fail_at = 1
    with pytest.raises(RuntimeError):
        replace_all(groups, 0, 1)
    replace_all(groups, 0, 1)
    assert groups.replaced == [0, 1]
    groups._latest_poll_status = object()  # a new poll says that 0 is gone again
    replace_all(groups, 0)
    assert groups.replaced == [0, 1, 0]


def test_a_worker_that_does_not_answer_is_left_to_its_health_check() -> None:
    groups = repaired("dead", "hangs")
    with pytest.raises(GetTimeoutError):
        replace_all(groups, 0)
    assert groups._replica_groups[1].active
