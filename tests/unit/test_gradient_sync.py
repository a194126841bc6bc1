"""Gradient sync: the sums are right whatever the loop does, and a broken step can be done again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ranks import HOST, Ranks, assignment
from torch import Tensor, nn

from relit_platform.errors import CollectiveBrokenError, UsageError
from relit_platform.worker.gradient_sync import CONTROL_VALUES, GradientSync, _PackedControl
from relit_platform.worker.process_group import Group, close_group, form_group, open_rendezvous

ROWS = 8
STEPS = 6


class Net(nn.Module):
    """Two dtypes, a tied weight, a parameter without use, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 6).double()
        self.tied = self.middle.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x))) @ self.tied)
        out: Tensor = self.last(hidden.double()) * self.frozen
        return out


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step))


def share(step: int, rank: int, world: int, micro: int) -> list[Tensor]:
    return list(batch(step)[rank * ROWS // world : (rank + 1) * ROWS // world].chunk(micro))


def one_step(
    model: nn.Module, sync: GradientSync, optimizer: torch.optim.Optimizer, parts: list[Tensor]
) -> float:
    total = 0.0
    for index, part in enumerate(parts):
        loss = model(part).square().mean() * (len(part) / ROWS)
        total += loss.item()
        sync.begin(sync=index == len(parts) - 1)
        torch.autograd.backward(loss)
    sync.control[0] = total
    sync.finish()
    optimizer.step()
    return sync.control[0].item()


def make(bucket_bytes: int) -> tuple[nn.Module, GradientSync, torch.optim.Optimizer]:
    model = Net()
    sync = GradientSync(model.parameters(), bucket_bytes)
    return model, sync, torch.optim.AdamW(model.parameters(), lr=0.01)


def alone() -> Group:
    return form_group(assignment(0, 1, (HOST, 0)), None, 1.0)


def train_alone(bucket_bytes: int, micro: int, clear: str = "zero") -> list[float]:
    model, sync, optimizer = make(bucket_bytes)
    sync.attach(alone())
    losses = []
    for step in range(STEPS):
        losses.append(one_step(model, sync, optimizer, share(step, 0, 1, micro)))
        _clear(clear, sync, optimizer)
    return losses


def _clear(how: str, sync: GradientSync, optimizer: torch.optim.Optimizer) -> None:
    if how == "zero":
        sync.zero()
    else:
        optimizer.zero_grad(set_to_none=how == "none")


def plain() -> list[float]:
    """The same training with nothing of ours."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.unused.grad = torch.zeros(3)
    losses = []
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("clear", ["zero", "none", "fill"])
def test_one_rank_trains_as_if_nothing_were_there(bucket_bytes: int, clear: str) -> None:
    assert train_alone(bucket_bytes, 1, clear) == plain()


def two_ranks(rank: int, world: int, endpoint: tuple[str, int], line: Any) -> None:
    """Every bucket size and way of clearing in turn; losses and final state of each."""
    group = form_group(assignment(rank, world, endpoint), None, 30.0)
    found = {}
    for bucket_bytes in (1, 1000, 1 << 20):
        for clear in ("zero", "none", "fill"):
            for micro in (1, 2):
                model, sync, optimizer = make(bucket_bytes)
                sync.attach(group)
                losses = []
                for step in range(STEPS):
                    parts = share(step, rank, world, micro)
                    losses.append(one_step(model, sync, optimizer, parts))
                    _clear(clear, sync, optimizer)
                last = [p.detach().double().sum().item() for p in model.parameters()]
                found[bucket_bytes, clear, micro] = (losses, last)
    line.send(found)
    line.recv()


def test_two_ranks_agree_bit_for_bit_and_match_one_rank() -> None:
    with Ranks(two_ranks) as ranks:
        first, second = ranks.answers()
    assert first == second
    expected = plain()
    for (_, _, micro), (losses, last) in first.items():
        assert losses == pytest.approx(expected, rel=1e-5)
        same = first[1 << 20, "zero", micro]
        assert (losses, last) == same  # neither buckets nor ways of clearing change a bit


def test_a_small_model_has_one_bucket_and_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    sync = GradientSync(model.parameters())
    sync.attach(alone())
    assert sync.num_buckets == 1
    assert not sync._hooks


def test_buckets_are_of_one_dtype_and_in_backward_order() -> None:
    sync = GradientSync(Net().parameters(), bucket_bytes=600)
    sync.attach(alone())
    kinds = [{p.dtype for p in bucket.params} for bucket in sync._buckets]
    assert all(len(kind) == 1 for kind in kinds)
    assert sum(len(bucket.params) for bucket in sync._buckets) == 7
    assert kinds[0] == {torch.float64}


def test_detach_gives_everything_up_and_attach_begins_anew() -> None:
    model, sync, optimizer = make(1)
    sync.attach(alone())
    old = [bucket.flat.data_ptr() for bucket in sync._buckets]
    keep = sync._buckets
    sync.detach()
    with pytest.raises(UsageError):
        sync.finish()
    sync.attach(alone())
    assert not {b.flat.data_ptr() for b in sync._buckets} & set(old)
    assert one_step(model, sync, optimizer, share(0, 0, 1, 1)) == plain()[0]
    del keep


def test_a_gradient_that_arrives_after_it_was_sent_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sync = GradientSync(model.parameters(), bucket_bytes=1)
    sync.attach(Group(rank=0, world=2, generation=1, transport=_Deaf()))
    sync.begin(sync=True)
    torch.autograd.backward(model(torch.ones(1, 4)).sum())
    with pytest.raises(UsageError, match="arrived twice"):
        torch.autograd.backward(model(torch.ones(1, 4)).sum())


class _Deaf:
    """A transport whose collectives never end."""

    def allreduce(self, tensor: Tensor) -> Any:
        return self

    def is_completed(self) -> bool:
        return False


def test_reset_gives_up_buffers_that_a_collective_may_still_write_to() -> None:
    model = nn.Linear(4, 4)
    sync = GradientSync(model.parameters())
    group = Group(rank=0, world=2, generation=1, transport=_Deaf())
    sync.attach(group)
    kept, control = sync._buckets[0].flat, sync.control
    sync.begin(sync=True)
    sync._start_next(group)
    sync.reset()
    assert sync._buckets[0].flat is not kept
    assert sync.control is not control
    assert model.weight.grad is None


VALUES = [0.1, -3.0e9 - 1 / 1024, 1e-30, float(1 << 40), float("inf"), float("nan"), 0.0, 7.25]


def test_packed_control_values_survive_float32() -> None:
    ranks, room = 3, np.zeros((3, _PackedControl.num_values(3)), dtype=np.float32)
    for rank in range(ranks):
        packed = _PackedControl(torch.from_numpy(room[rank]), rank, ranks)
        packed.write(np.array(VALUES) * (rank + 1))
    total = torch.from_numpy(room.sum(axis=0))
    found = np.zeros(CONTROL_VALUES)
    _PackedControl(total, 0, ranks).read(found)
    expected = sum(np.array(VALUES) * (rank + 1) for rank in range(ranks))
    assert np.array_equal(found, expected, equal_nan=True)


def unpackable(rank: int, world: int, endpoint: tuple[str, int], line: Any) -> None:
    """Gradients in bfloat16 cannot carry float64 values: these travel on their own."""
    group = form_group(assignment(rank, world, endpoint), None, 30.0)
    model = nn.Linear(4, 1).bfloat16()
    sync = GradientSync(model.parameters())
    sync.attach(group)
    sync.begin(sync=True)
    torch.autograd.backward(model(torch.full((1, 4), rank + 1.0).bfloat16()).sum())
    sync.control[:] = 1 / 3
    sync.finish()
    assert model.weight.grad is not None
    line.send((model.weight.grad.float().tolist(), sync.control.tolist()))
    line.recv()


def test_control_values_of_a_bfloat16_model_are_exact() -> None:
    with Ranks(unpackable) as ranks:
        for grad, control in ranks.answers():
            assert grad == [[3.0] * 4]
            assert control == [2 / 3] * CONTROL_VALUES


def redo(rank: int, world: int, endpoint: tuple[str, int], line: Any) -> None:
    """Train with a peer that dies in a step; go on alone from that same step."""
    model, sync, optimizer = make(1000)
    group = form_group(assignment(rank, world, endpoint), None, 30.0)
    sync.attach(group)
    losses: list[float] = []
    while len(losses) < STEPS:
        step = len(losses)
        if rank == 1 and step == 3:
            line.send("now")
            time.sleep(60)
        try:
            parts = share(step, group.rank, group.world, 1)
            losses.append(one_step(model, sync, optimizer, parts))
            sync.zero()
        except CollectiveBrokenError:
            close_group(group)
            sync.reset()
            group = alone()
            sync.attach(group)
            line.send("broken")
    line.send(losses)
    line.recv()


def test_a_step_whose_peer_died_is_done_again_without_a_trace() -> None:
    with Ranks(redo) as ranks:
        assert ranks.ask(1) == "now"
        ranks.kill(1)
        assert ranks.ask(0) == "broken"
        assert ranks.ask(0) == pytest.approx(plain(), rel=1e-5)


def killed_anywhere(rank: int, world: int, endpoint: tuple[str, int], line: Any) -> None:
    """Large gradients in many buckets, without end; the survivor says when it noticed."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)])
    sync = GradientSync(model.parameters(), bucket_bytes=1 << 18)
    group = form_group(assignment(rank, world, endpoint), None, 30.0)
    sync.attach(group)
    line.send("running")
    try:
        while True:
            sync.begin(sync=True)
            torch.autograd.backward(model(torch.ones(64, 256)).square().mean())
            sync.finish()
            sync.zero()
    except CollectiveBrokenError:
        caught_s = time.time()
    closed = close_group(group)
    sync.reset()
    store, fresh = open_rendezvous(HOST)
    del store, fresh
    line.send((caught_s, closed, all(p.grad is None for p in model.parameters())))
    line.recv()


@pytest.mark.parametrize("delay_s", [0.0, 0.083])
def test_a_kill_in_the_middle_of_many_buckets_is_noticed(delay_s: float) -> None:
    with Ranks(killed_anywhere) as ranks:
        assert ranks.answers() == ["running", "running"]
        time.sleep(0.2 + delay_s)
        killed_s = ranks.kill(1)
        caught_s, closed, clean = ranks.ask(0)
        assert caught_s - killed_s < 1.0
        assert closed
        assert clean


def in_time(action: Callable[[], object], seconds: float) -> bool:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_reset_and_detach_never_block() -> None:
    sync = GradientSync(nn.Linear(4, 4).parameters())
    group = Group(rank=0, world=2, generation=1, transport=_Deaf())
    sync.attach(group)
    sync.begin(sync=True)
    sync._start_next(group)
    assert in_time(sync.detach, 5)
