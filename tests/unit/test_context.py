"""The loop's contract, in one process: what an abandoned step leaves behind is nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from looping import STEPS, BreakingMember, Numbers, train
from torch import nn

from relit_platform.errors import NotSavableError, UsageError
from relit_platform.worker.context import RankContext, call_train
from relit_platform.worker.drill import Drill
from relit_platform.worker.local import LocalRecorder, local_run


def run_breaking(
    visits: tuple[int, ...], lonely_ends: int = 0
) -> tuple[Any, LocalRecorder, BreakingMember]:
    member = BreakingMember(visits=visits, lonely_ends=lonely_ends)
    recorder = LocalRecorder()
    run = RankContext(
        member=member, recorder=recorder, drill=Drill((), ""), seed=3,  # type: ignore[arg-type]
        device=torch.device("cpu"),
    )  # fmt: skip
    return call_train(train, run, {}), recorder, member


@pytest.mark.parametrize(
    "visits", [(1,), (5,), (12,), (2, 3), (4, 5, 6, 9), tuple(range(1, 20, 2))]
)
def test_abandoned_steps_leave_no_trace(visits: tuple[int, ...]) -> None:
    calm = local_run(train, {}, seed=3)
    value, recorder, member = run_breaking(visits)
    assert member.entries == 1 + len(visits)
    assert [row["loss"] for row in recorder.rows] == [row["loss"] for row in calm.rows]
    assert [row["step"] for row in recorder.rows] == list(range(1, STEPS + 1))
    assert value == calm.value
    assert value["count"] == STEPS


def test_nobody_leaves_the_loop_before_every_rank_has_the_last_step() -> None:
    calm = local_run(train, {}, seed=3)
    value, recorder, member = run_breaking((), lonely_ends=2)
    assert member.entries == 3
    assert recorder.rows == calm.rows and value == calm.value


@dataclass(slots=True)
class VotingRecorder(LocalRecorder):
    """Votes with the number of the step it is in, and keeps what came back."""

    heard: list[tuple[int, list[float]]] = field(default_factory=list)

    def votes(self) -> tuple[float, ...]:
        step = len(self.rows) + 1.0
        return (1.7e9 + step / 3, 1.0, -step, 30.0, 1.0)

    def completed(
        self, *, member: Any, ledger: Any, loss: float, logged: Any, **fields: Any
    ) -> None:
        self.heard.append((member.step, fields["agreed"]))
        LocalRecorder.completed(self, member=member, ledger=ledger, loss=loss, logged=logged)


def test_what_decides_a_save_travels_with_the_gradients_of_its_own_step() -> None:
    recorder = VotingRecorder()
    run = RankContext(
        member=BreakingMember(visits=(3, 7)), recorder=recorder, drill=Drill((), ""), seed=3,  # type: ignore[arg-type]
        device=torch.device("cpu"),
    )  # fmt: skip
    call_train(train, run, {"micro": 3})
    steps = range(1, STEPS + 1)
    votes = {step: [1.7e9 + step / 3, 1.0, -step, 30.0, 1.0] for step in steps}
    assert recorder.heard == list(votes.items())


def test_micro_batches_update_once_a_step() -> None:
    rows = local_run(train, {"micro": 3}, seed=3).rows
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [(row["lo"], row["hi"]) for row in rows][:2] == [(0, 8), (8, 16)]


def test_two_local_runs_are_bit_identical() -> None:
    first, second = local_run(train, {}, seed=3), local_run(train, {}, seed=3)
    assert first.rows == second.rows
    assert first.rows != local_run(train, {}, seed=4).rows


def test_exception_in_user_code_passes_through() -> None:
    def broken(run: RankContext) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        local_run(broken)


def misuse(act: Callable[[RankContext, nn.Module, torch.optim.Optimizer], None]) -> None:
    def loop(run: RankContext) -> None:
        net = nn.Linear(8, 1)
        act(run, net, torch.optim.SGD(net.parameters(), lr=0.1))

    local_run(loop)


def no_step(run: RankContext, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run.register(net=net, optimizer=optimizer)
    for batch in run.batches(Numbers(), global_batch=8, steps=2):
        run.backward(net(batch["x"]).mean())


def backward_early(run: RankContext, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run.register(net=net, optimizer=optimizer)
    assert run.rank == 0
    run.backward(net(torch.ones(1, 8)).mean())


def backward_late(run: RankContext, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run.register(net=net, optimizer=optimizer)
    for batch in run.batches(Numbers(), global_batch=8, steps=2):
        run.backward(net(batch["x"]).mean())
        run.step(optimizer)
    run.backward(net(torch.ones(1, 8)).mean())


def registered_twice(run: RankContext, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run.register(net=net)
    run.register(net=net)


def registered_late(run: RankContext, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in run.batches(Numbers(), global_batch=8, steps=1):
        run.register(net=net)


def no_state(run: RankContext, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run.register(net=object())


def step_twice(run: RankContext, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run.register(net=net, optimizer=optimizer)
    for batch in run.batches(Numbers(), global_batch=8, steps=2):
        run.backward(net(batch["x"]).mean())
        run.step(optimizer)
        run.step(optimizer)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (no_step, "did not call run.step"),
        (backward_early, "must be called inside run.batches"),
        (backward_late, "must be called inside run.batches"),
        (registered_twice, "registered already"),
        (registered_late, "must come before"),
        (no_state, "neither state_dict"),
        (step_twice, "called twice"),
    ],
)
def test_misuse_is_named(act: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        misuse(act)


class Unsavable:
    """Its state holds a function."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"hook": print}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_what_a_cluster_would_refuse_a_local_run_refuses_too() -> None:
    def loop(run: RankContext) -> None:
        net = nn.Linear(8, 1)
        run.register(net=net, optimizer=torch.optim.SGD(net.parameters()), thing=Unsavable())
        for _ in run.batches(Numbers(), global_batch=8, steps=1):
            break

    with pytest.raises(NotSavableError, match=r"thing\.inner\.hook.*state_dict"):
        local_run(loop)
    for name in ("../x", "a/../../x", "/x", ""):
        given = {"name": name}
        with pytest.raises(ValueError, match="relative path"):
            local_run(lambda run, cfg: run.table(cfg["name"], []), given)
        with pytest.raises(ValueError, match="relative path"):
            local_run(lambda run, cfg: run.save_artifact(cfg["name"], b""), given)


def test_a_loop_that_ended_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    local_run(train, {}, seed=3)
    assert not any(t.name.startswith("relit-data") for t in set(threading.enumerate()) - before)
