"""A real Member without Ray: assignments and facts are the test's, groups and state its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from ranks import HOST, assignment
from torch import nn

from relit_platform.facts import Assignment, JoinRequest, RestorePlan, StateSource
from relit_platform.run_config import RunConfig
from relit_platform.worker.member import Member
from relit_storage.stores.opening import open_store
from relit_storage.stores.prefixed import PrefixedStore


class FactRecorder:
    """What a member needs of a recorder: its store, and somebody who hears its facts."""

    drill = None

    def __init__(self, config: RunConfig) -> None:
        self.store = PrefixedStore(open_store(config.store), config.run_key)
        self.facts: list[Any] = []
        self.adopted: list[int] = []
        self.manager = SimpleNamespace(send=lambda verb, fact: self.facts.append(fact))

    def near(self, plan: RestorePlan, node_id: str) -> RestorePlan:
        return plan

    def phase(self, name: str, step: int) -> None: ...

    def place(self, rank: int, generation: int, last_row_step: int) -> None: ...

    def extras(self, member: Any, cursor: Any, skeleton: Any) -> dict[str, Any]:
        head = {"step": member.step, "cursor": dict(cursor), "ids": {}, "rows": []}
        return {**head, "objects": skeleton}

    def adopt(self, extras: Any) -> None:
        self.adopted.append(int(extras["step"]))

    def kinds(self) -> list[str]:
        return [fact.kind for fact in self.facts]


class Manager:
    """Answers each join with the next of some assignments."""

    def __init__(self, *answers: Callable[[JoinRequest], Assignment]) -> None:
        self._answers = list(answers)

    def join(self, request: JoinRequest, wait_s: float = 5.0) -> Assignment:
        return self._answers.pop(0)(request)

    def lost(self, generation: int) -> bool:
        return False


class NoSync:
    """No gradients here."""

    def attach(self, group: Any) -> None: ...

    def detach(self) -> None: ...


def member_of(config: RunConfig, manager: Manager) -> tuple[Member, FactRecorder]:
    recorder = FactRecorder(config)
    member = Member(
        config=config,
        worker_id="w",
        epoch=1,
        node_id="n",
        pid=1,
        host=HOST,
        manager=manager,  # type: ignore[arg-type]
        recorder=recorder,  # type: ignore[arg-type]
    )
    return member, recorder


def enter(member: Member, objects: dict[str, Any]) -> None:
    assert member.enter(objects, NoSync(), None)  # type: ignore[arg-type]


def sourced(place: Assignment, source: StateSource) -> Assignment:
    return replace(place, source=source)


def alone(
    config: RunConfig, objects: dict[str, Any], *sources: StateSource
) -> tuple[Member, FactRecorder]:
    """A rank of one that enters one generation after the other."""
    answers = [
        lambda request, n=n, s=s: sourced(assignment(0, 1, request.endpoint, n), s)
        for n, s in enumerate(sources, 1)
    ]
    member, recorder = member_of(config, Manager(*answers))
    for _ in sources:
        enter(member, objects)
    return member, recorder


def unlike_ranks(rank: int, world: int, endpoint: tuple[str, int], line: Any) -> None:
    """For `Ranks`: enter once with each of two configurations; each rank's code makes other
    numbers. Told (RunConfig as JSON, source), and rank 0's endpoint; answers what it then holds.
    """
    for _ in range(2):
        raw, source = line.recv()

        def place(request: JoinRequest, source: StateSource = source) -> Assignment:
            line.send(request.endpoint)
            return sourced(assignment(rank, world, line.recv()), source)

        torch.manual_seed(rank)
        model, extra = nn.Linear(8, 3), nn.Linear(2, 2)
        member, recorder = member_of(RunConfig.from_json(raw), Manager(place))
        enter(member, {"model": model, "extra": extra})
        line.send((model.weight.tolist(), extra.weight.tolist(), recorder.kinds()))
        member.leave()
