"""A watch over a module or an optimizer sees every change of what there is, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relit_platform.worker.boundary import BoundaryState
from relit_platform.worker.watching import MAX_MISSES, Places, Watches


class Job:
    """A model with a buffer that is not saved, another module, and an optimizer with state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.model.register_buffer("mask", torch.ones(1), persistent=False)
        self.other = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.train()

    def train(self) -> None:
        self.model(torch.randn(3, 4)).sum().backward()
        self.optimizer.step()

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def tokens(self, watches: Watches) -> list[Any]:
        watches.begin()
        return [watches.token(self.model), watches.token(self.optimizer)]


def swap_keys(held: dict[str, Any]) -> None:
    first = next(iter(held))
    held[first] = held.pop(first)


def rename(names: set[str]) -> None:
    names.clear()
    names.add("none")


MODEL: dict[str, Callable[[Job], object]] = {
    "a module more": lambda job: job.model.append(nn.ReLU()),
    "a module less": lambda job: job.model.pop(2),
    "another module": lambda job: job.model.__setitem__(2, nn.Linear(4, 2)),
    "another parameter": lambda job: setattr(job.model[0], "bias", nn.Parameter(torch.ones(4))),
    "a parameter past register": lambda job: job.model[0]._parameters.update(
        bias=nn.Parameter(torch.ones(4))
    ),
    "a parameter that is None": lambda job: setattr(job.model[0], "bias", None),
    "the order of parameters": lambda job: swap_keys(job.model[0]._parameters),
    "another dict of parameters": lambda job: vars(job.model[0]).update(
        _parameters=dict(job.model[0]._parameters)
    ),
    "another buffer": lambda job: setattr(job.model[1], "running_mean", torch.ones(4)),
    "a buffer that is saved now": lambda job: job.model._non_persistent_buffers_set.clear(),
    "another name is not saved": lambda job: rename(job.model._non_persistent_buffers_set),
    "a hook": lambda job: job.model[0].register_state_dict_post_hook(lambda *its: None),
    "a hook ahead": lambda job: job.model[0].register_state_dict_pre_hook(lambda *its: None),
    "a state_dict of its own": lambda job: setattr(job.model[2], "state_dict", dict),
    "another class": lambda job: setattr(job.model[2], "__class__", nn.Bilinear),
    "a container deleted": lambda job: vars(job.model[0]).pop("_state_dict_hooks"),
}
OPTIMIZER: dict[str, Callable[[Job], object]] = {
    "a group": lambda job: job.optimizer.add_param_group({"params": [job.other.bias]}),
    "a parameter": lambda job: job.optimizer.param_groups[0]["params"].append(job.other.bias),
    "other parameters": lambda job: job.optimizer.param_groups[0].update(params=[job.other.bias]),
    "their order": lambda job: job.optimizer.param_groups[0]["params"].reverse(),
    "another group": lambda job: job.optimizer.param_groups.__setitem__(
        0, dict(job.optimizer.param_groups[0])
    ),
    "state less": lambda job: job.state.popitem(),
    "other state": lambda job: next(iter(job.state.values())).update(step=torch.ones(())),
    "state of another name": lambda job: next(iter(job.state.values())).update(x=torch.ones(1)),
    "state loaded": lambda job: job.optimizer.load_state_dict(job.optimizer.state_dict()),
    "a state_dict of its own": lambda job: setattr(job.optimizer, "state_dict", dict),
    "a hook": lambda job: job.optimizer.register_state_dict_post_hook(lambda *its: None),
    "another class": lambda job: setattr(job.optimizer, "__class__", torch.optim.Adam),
}
VALUES: dict[str, Callable[[Job], object]] = {
    "a step": Job.train,
    "evaluation": lambda job: job.model.eval(),
    "a learning rate": lambda job: job.optimizer.param_groups[0].update(lr=0.7),
    "gradients": lambda job: job.optimizer.zero_grad(),
    "an attribute": lambda job: setattr(job.model[0], "calls", 3),
}


@pytest.mark.parametrize(
    ("place", "change"),
    [*((0, its) for its in MODEL.values()), *((1, its) for its in OPTIMIZER.values())],
    ids=[*(f"model: {name}" for name in MODEL), *(f"optimizer: {name}" for name in OPTIMIZER)],
)
def test_every_change_of_what_there_is_is_seen(place: int, change: Callable[[Job], object]) -> None:
    job, watches = Job(), Watches()
    before = job.tokens(watches)
    assert job.tokens(watches) == before
    change(job)
    after = job.tokens(watches)
    assert after[place] is not before[place]


@pytest.mark.parametrize("change", VALUES.values(), ids=VALUES.keys())
def test_values_are_no_change(change: Callable[[Job], object]) -> None:
    job, watches = Job(), Watches()
    before = job.tokens(watches)
    change(job)
    assert job.tokens(watches) == before and None not in before


def test_what_changes_all_the_time_is_watched_no_more() -> None:
    job, watches = Job(), Watches()
    for _ in range(MAX_MISSES):
        assert job.tokens(watches)[0] is not None
        job.model.append(nn.ReLU())
    assert job.tokens(watches)[0] is None
    assert job.tokens(watches)[0] is None


def test_in_one_moment_it_is_looked_at_once() -> None:
    job, watches = Job(), Watches()
    before = job.tokens(watches)
    job.model.append(nn.ReLU())
    assert watches.token(job.model) is before[0]
    watches.begin()
    assert watches.token(job.model) is not before[0]


def moved(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


def viewed(tensor: Tensor) -> None:
    tensor.data = tensor.data.view(torch.int32)


def transposed(tensor: Tensor) -> None:
    tensor.data = tensor.data.t()


def sparse(tensor: Tensor) -> None:
    swap: Any = torch.utils.swap_tensors
    swap(tensor, torch.eye(3).to_sparse())


MOVES: dict[str, Callable[[Tensor], object]] = {
    "other memory": moved,
    "the same memory as another type": viewed,
    "the same memory in another order": transposed,
    "another shape": lambda tensor: tensor.resize_(2, 2),
    "a view of it": lambda tensor: tensor.set_(tensor[1:].clone()),  # type: ignore[call-overload]
    "transposed in place": lambda tensor: tensor.t_(),
    "one without an address": sparse,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_a_tensor_that_is_laid_out_anew_is_seen(move: Callable[[Tensor], object]) -> None:
    tensor = torch.randn(3, 3)
    kept, places = tensor.detach(), Places([torch.ones(()), tensor])
    tensor.add_(1)
    assert places.same()
    move(tensor)
    assert not places.same()
    assert kept.shape == (3, 3)


# What a capture has to find anew, and how to spoil it afterwards.
CAPTURED: dict[str, tuple[Callable[[Job], object], Callable[[Job], Tensor]]] = {
    "nothing": (lambda job: None, lambda job: job.model[1].running_mean),
    "another buffer": (
        lambda job: setattr(job.model[1], "running_mean", torch.full((4,), 5.0)),
        lambda job: job.model[1].running_mean,
    ),
    "a buffer of another shape": (
        lambda job: job.model.register_buffer("more", torch.ones(2, 3)),
        lambda job: job.model.more,
    ),
    "a parameter without an optimizer": (
        lambda job: job.model.append(nn.Linear(2, 2)),
        lambda job: job.model[3].weight,
    ),
    "the same parameter in other memory": (
        lambda job: moved(job.other.weight),
        lambda job: job.other.weight,
    ),
}


@pytest.mark.parametrize(("change", "victim"), CAPTURED.values(), ids=CAPTURED.keys())
def test_a_capture_keeps_what_is_there_now(
    change: Callable[[Job], object], victim: Callable[[Job], Tensor]
) -> None:
    job = Job()
    kept = BoundaryState({"model": job.model, "other": job.other, "optimizer": job.optimizer})
    for _ in range(3):
        job.train()
        kept.capture()
    change(job)
    job.train()
    kept.capture()
    expected = victim(job).detach().clone()
    with torch.no_grad():
        victim(job).fill_(-7.0)
    kept.rollback()
    assert torch.equal(victim(job), expected)


def test_a_parameter_that_gets_an_optimizer_is_kept_no_more() -> None:
    job = Job()
    kept = BoundaryState({"other": job.other, "optimizer": job.optimizer})
    kept.capture()
    kept.capture()
    job.optimizer.add_param_group({"params": [job.other.weight]})
    kept.capture()
    with torch.no_grad():
        job.other.weight.fill_(3.0)
    kept.rollback()
    assert bool((job.other.weight == 3.0).all())


def test_a_getter_may_compute_with_parameters() -> None:
    job = Job()
    weight = job.other.weight
    loaded: list[Tensor] = []
    pair = (lambda: {"w": weight * 1.0}, lambda its: loaded.append(its["w"]))
    kept = BoundaryState({"slow": pair})
    for _ in range(2):
        kept.capture()
    expected = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
    kept.rollback()
    assert torch.equal(loaded[0], expected) and torch.is_grad_enabled()
