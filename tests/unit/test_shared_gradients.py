"""Autograd may hand over one piece of memory as the gradient of the loss and of parameters.

A parameter that reaches the loss through views alone gets a view of what the backward pass began
with.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from looping import Numbers
from ranks import HOST, assignment
from torch import Tensor, nn

from relit_platform.worker.context import RankContext
from relit_platform.worker.gradient_sync import GradientSync
from relit_platform.worker.local import local_run
from relit_platform.worker.process_group import form_group

STEPS = 3


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_gradients_that_share_memory_are_summed_apart(bucket_bytes: int, micro: int) -> None:
    one, two, unused = params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    sync = GradientSync(params, bucket_bytes)
    sync.attach(form_group(assignment(0, 1, (HOST, 0)), None, 1.0))
    for _ in range(STEPS):
        for index in range(micro):
            sync.begin(sync=index == micro - 1)
            torch.autograd.backward(one.squeeze() + two.squeeze())
        sync.finish()
        assert [one.grad, two.grad, unused.grad] == [micro, micro, 0]
        sync.zero()


class Shifted:
    """A model, and a parameter of its own that is added to the loss.

    hook: somebody doubles its gradient in place as it arrives.
    """

    def __init__(self, hook: bool) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(8, 1)
        self.shift = nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([*self.net.parameters(), self.shift], lr=0.125)
        if hook:
            register: Any = self.shift.register_post_accumulate_grad_hook
            register(_double)

    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x).square().mean() + self.shift.squeeze()
        return loss

    def state(self) -> list[list[float]]:
        return [p.detach().flatten().tolist() for p in (*self.net.parameters(), self.shift)]


def _double(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(2.0)


def plain(steps: list[list[Tensor]], hook: bool) -> list[list[float]]:
    """The same training with nothing of ours."""
    job = Shifted(hook)
    for parts in steps:
        for part in parts:
            torch.autograd.backward(job.loss(part) * (1 / len(parts)))
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job.state()


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("hook", [False, True], ids=["plain", "hook"])
def test_what_a_backward_pass_begins_with_is_spoiled_by_no_other_one(
    micro: int, hook: bool
) -> None:
    steps: list[list[Tensor]] = [[] for _ in range(STEPS)]

    def ours(run: RankContext) -> list[list[float]]:
        job = Shifted(hook)
        shift = nn.ParameterList([job.shift])
        run.register(net=job.net, shift=shift, optimizer=job.optimizer)
        data = Numbers()
        for batch in run.batches(data, global_batch=8, steps=STEPS, micro_batch=8 // micro):
            steps[run.step_no].append(batch["x"])
            run.backward(job.loss(batch["x"]))
            run.step(job.optimizer)
        return job.state()

    found = local_run(ours).value
    assert [len(parts) for parts in steps] == [micro] * STEPS
    assert found == plain(steps, hook)
