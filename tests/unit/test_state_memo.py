"""The memo of a state says at each step what a fresh walk says, and walks only what changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from relit_platform.errors import NotSavableError
from relit_platform.worker.state_memo import StateMemo
from relit_platform.worker.state_tree import flatten, restore


class Job:
    """A model, its optimizer and schedule, a copy that shares a tensor, and a pair of callables."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.shared = nn.Linear(4, 4)
        self.shared.weight = self.model[0].weight  # type: ignore[assignment]
        self.extra: Any = {"seen": 0, "shape": (1, 2)}
        self.objects: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "shared": self.shared,
            "extra": (lambda: self.extra, lambda state: setattr(self, "extra", state)),
        }

    def train(self) -> None:
        self.model(torch.randn(3, 4)).sum().backward()
        self.optimizer.step()
        self.schedule.step()

    def check(self, memo: StateMemo) -> dict[str, torch.Tensor]:
        """The memo's tensors, once they are known to be those of a fresh walk."""
        tensors, text = memo.flatten(self.objects)
        found, expected = json.loads(text), flatten(self.objects)
        again = Job()
        restore(again.objects, tensors, found)
        assert str(flatten(again.objects)) == str(flatten(self.objects))
        places = [{t.data_ptr() for t in its.values()} for its in (tensors, expected[0])]
        assert places[0] == places[1]
        return tensors


def replace_data(job: Job) -> None:
    weight = job.model[2].weight
    assert isinstance(weight, nn.Parameter)
    weight.data = weight.data.clone()


def transpose(job: Job) -> None:
    weight = job.model[0].weight
    assert isinstance(weight, nn.Parameter)
    weight.data = weight.data.t()


def set_extra(value: Any) -> Callable[[Job], None]:
    return lambda job: setattr(job, "extra", value)


CHANGES: dict[str, Callable[[Job], None]] = {
    "a step": Job.train,
    "other memory": replace_data,
    "other strides": transpose,
    "a number": set_extra({"seen": 1, "shape": (1, 2)}),
    "a type": set_extra({"seen": False, "shape": (1, 2)}),
    "a key": set_extra({"known": 0, "shape": (1, 2)}),
    "not a number": set_extra({"seen": float("nan")}),
    "odd keys": set_extra({(1, 2): 3}),
    "an optimizer's setting": lambda job: job.optimizer.param_groups[0].update(lr=0.7),
    "a setting that is a tensor": lambda job: job.optimizer.param_groups[0].update(
        lr=torch.tensor(0.5)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_change_is_seen(change: Callable[[Job], None]) -> None:
    job, memo = Job(), StateMemo()
    job.check(memo)
    job.train()
    job.check(memo)
    for _ in range(2):
        change(job)
        job.check(memo)


def test_between_steps_the_same_tensors_are_handed_out() -> None:
    job, memo = Job(), StateMemo()
    del job.objects["schedule"]  # it counts steps
    job.train()
    first, _ = memo.flatten(job.objects)
    before = {name: tensor.clone() for name, tensor in first.items()}
    job.train()
    second, text = memo.flatten(job.objects)
    assert second is first
    assert not torch.equal(second["model.0.weight"], before["model.0.weight"])
    assert json.loads(text)["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.001)


def test_what_cannot_be_saved_is_named_at_every_step() -> None:
    job, memo = Job(), StateMemo()
    job.extra = {"file": object()}
    for _ in range(2):
        with pytest.raises(NotSavableError, match=r"extra\.file"):
            memo.flatten(job.objects)


def test_the_sign_of_zero_is_a_change() -> None:
    job, memo = Job(), StateMemo()
    texts = []
    for value in (0.0, -0.0):
        job.extra = {"seen": value}
        texts.append(memo.flatten(job.objects)[1])
    assert b"-0.0" in texts[1] and b"-0.0" not in texts[0]


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def renamed(module: nn.Module, state: dict[str, Any], prefix: str, meta: Any) -> None:
    state[f"{prefix}again"] = state[f"{prefix}weight"].clone()


def add_hook(job: Job) -> None:
    job.model[2]._register_state_dict_hook(renamed)  # type: ignore[no-untyped-call]


def add_group(job: Job) -> None:
    job.optimizer.add_param_group({"params": [job.shared.bias], "lr": 0.3})


def forget(job: Job) -> None:
    job.optimizer.state.popitem()


def other_keys(job: Job) -> None:
    job.optimizer.state["shared"] = {(1, 2): 3}  # type: ignore[index]


# Changes of what there is, seen on the objects themselves as in their state dictionaries.
STRUCTURES: dict[str, Callable[[Job], object]] = {
    "a module": lambda job: job.model.append(nn.Linear(2, 2)),
    "a module of another name": lambda job: job.model.register_module("last", nn.ReLU()),
    "a module less": lambda job: job.model.pop(2),
    "one level more": lambda job: job.model.append(nn.Sequential(nn.Linear(2, 2))),
    "a module that is None": lambda job: job.model.register_module("none", None),
    "a parameter": lambda job: job.model.register_parameter("p", nn.Parameter(torch.ones(1))),
    "a parameter that is None": lambda job: job.model.register_parameter("p", None),
    "a buffer": lambda job: job.model.register_buffer("b", torch.ones(1)),
    "a buffer that is not saved": lambda job: job.model.register_buffer(
        "b", torch.ones(1), persistent=False
    ),
    "another parameter": lambda job: setattr(
        job.model[2], "weight", nn.Parameter(torch.ones(2, 4))
    ),
    "more than tensors": lambda job: job.model.append(Extra(2, 2)),
    "a hook": add_hook,
    "a group of parameters": add_group,
    "an optimizer's state less": forget,
    "odd keys of an optimizer": other_keys,
}


@pytest.mark.parametrize("change", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_every_change_of_structure_is_seen(change: Callable[[Job], object]) -> None:
    job, memo = Job(), StateMemo()
    job.train()
    memo.flatten(job.objects)
    change(job)
    for _ in range(2):
        found, text = memo.flatten(job.objects)
        tensors, skeleton = flatten(job.objects)
        assert json.loads(text) == json.loads(json.dumps(skeleton))
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_twice_in_a_group_has_the_number_that_torch_gives_it() -> None:
    one, two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([one, two, one])
    for param in (one, two):
        param.grad = torch.ones(1)
    optimizer.step()
    text = json.loads(StateMemo().flatten({"o": optimizer})[1])
    assert text == json.loads(json.dumps(flatten({"o": optimizer})[1]))


class Wrapper(torch.optim.Optimizer):
    """As some libraries have it: an optimizer by name, with nothing of one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def state_dict(self) -> Any:
        return {"inner": self.inner.state_dict()}


def test_an_optimizer_that_never_was_initialized_is_asked_for_its_state() -> None:
    objects = {"o": Wrapper(Job().optimizer)}
    text = json.loads(StateMemo().flatten(objects)[1])
    assert text == json.loads(json.dumps(flatten(objects)[1]))


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_a_state_dict_of_an_object_of_its_own_is_called_each_time(what: str) -> None:
    job, memo = Job(), StateMemo()
    holder = job.objects[what]
    stock, seen = holder.state_dict, [0]
    holder.state_dict = lambda *args, **kwargs: {**stock(*args, **kwargs), "seen": seen[0]}
    for count in (1, 2):
        seen[0] = count
        _, text = memo.flatten({what: holder})
        assert json.loads(text)[what]["seen"] == count


def test_a_parameter_in_two_groups_has_its_number_in_both() -> None:
    one, two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([one, two], lr=0.1)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [two, one]})
    text = json.loads(StateMemo().flatten({"o": optimizer})[1])
    assert text == json.loads(json.dumps(flatten({"o": optimizer})[1]))
