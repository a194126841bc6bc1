"""State trees: what goes in comes out, bit for bit, and what cannot is named."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from relit_platform.errors import NotSavableError, StateMismatchError
from relit_platform.worker.state_tree import DTYPES, flatten, restore


class Box:
    """A registered object with any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(x))
        return out


def round_trip(state: Any) -> Any:
    tensors, skeleton = flatten({"box": Box(state)})
    target = Box(None)
    restore({"box": target}, tensors, json.loads(json.dumps(skeleton)))
    return target.state


@pytest.mark.parametrize(
    "state",
    [
        {"a": 1, "b": None, "c": True, "d": "x\n\ud800", "e": 10**30},
        {"tuple": (1, (2, 3)), "list": [1, [2]], "empty": {}, "none": []},
        {1: "int", None: "none", (1, 2): "pair", "$T": "marker", False: 5.5},
        {"$f": 1.0},
        Counter({3: 2, 7: 1}),
        -0.0,
        5e-324,
    ],
)
def test_plain_values_come_back_equal_and_of_the_same_type(state: Any) -> None:
    found = round_trip(state)
    assert found == state
    assert type(found) is type(state)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_floats_that_json_lacks_come_back(value: float) -> None:
    assert np.array_equal(round_trip([value]), [value], equal_nan=True)


def test_numpy_values_come_back_bit_for_bit() -> None:
    state: dict[str, Any] = {
        "a": np.arange(6, dtype=">i4").reshape(2, 3),
        "s": np.float32(0.1),
        "e": np.empty(0),
    }
    found = round_trip(state)
    assert found["a"].dtype == state["a"].dtype
    assert np.array_equal(found["a"], state["a"])
    assert type(found["s"]) is np.float32
    assert found["s"] == state["s"]
    assert found["e"].shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)], ids=str)
def test_every_dtype_and_odd_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    found = round_trip({"t": tensor})["t"]
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert torch.equal(found.to(torch.float64), tensor.to(torch.float64))


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": [object()]}, "box.a.0"),
        ({"a": b"bytes"}, "box.a"),
        ({"a": {"b": torch.ones(2).to_sparse()}}, "box.a.b"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "box.a"),
        ({"a": np.array([object()])}, "box.a"),
        ({"a": lambda: 0}, "box.a"),
        ({frozenset(): 1}, "box.frozenset() (a key)"),
    ],
)
def test_what_needs_pickle_is_refused_by_path(state: Any, path: str) -> None:
    with pytest.raises(NotSavableError) as caught:
        flatten({"box": Box(state)})
    assert caught.value.path == path


def test_a_structure_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotSavableError, match="contains itself"):
        flatten({"box": Box(loop)})


def test_flatten_copies_nothing_and_names_by_path() -> None:
    model = nn.Linear(2, 3)
    tensors, _ = flatten({"model": model})
    assert set(tensors) == {"model.weight", "model.bias"}
    assert tensors["model.weight"].data_ptr() == model.weight.data_ptr()
    assert not tensors["model.weight"].requires_grad


def test_tied_weights_are_saved_once_and_stay_tied() -> None:
    source, target = Tied(), Tied()
    tensors, skeleton = flatten({"m": source})
    assert list(tensors) == ["m.embed.weight"]
    restore({"m": target}, tensors, skeleton)
    assert target.head.weight is target.embed.weight
    assert torch.equal(target.head.weight, source.head.weight)


def test_equal_dotted_names_stay_apart() -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    found = round_trip(state)
    assert found["a.b"].item() == 1
    assert found["a"]["b"].item() == 0


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)


def train(parts: tuple[nn.Module, torch.optim.Optimizer, Any], steps: range) -> list[float]:
    model, optimizer, scheduler = parts
    losses = []
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def objects(parts: tuple[nn.Module, torch.optim.Optimizer, Any]) -> dict[str, Any]:
    return dict(zip(("model", "optimizer", "scheduler"), parts, strict=True))


@pytest.mark.parametrize("warm_steps", [0, 3])
def test_training_goes_on_bit_for_bit(warm_steps: int) -> None:
    source, target = make(0), make(1)
    train(source, range(5))
    train(target, range(warm_steps))
    tensors, skeleton = flatten(objects(source))
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    restore(objects(target), saved, json.loads(json.dumps(skeleton)))
    for tensor in saved.values():
        tensor.zero_()  # the objects must not hold on to these
    assert train(target, range(5, 12)) == train(source, range(5, 12))


def test_a_get_and_set_pair_is_an_object() -> None:
    generator = torch.Generator().manual_seed(5)
    pair = (generator.get_state, generator.set_state)
    tensors, skeleton = flatten({"rng": pair})
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    first = torch.rand(4, generator=generator)
    restore({"rng": pair}, saved, skeleton)
    assert torch.equal(torch.rand(4, generator=generator), first)


def test_registered_names_must_match() -> None:
    tensors, skeleton = flatten({"a": Box(1), "b": Box(2)})
    with pytest.raises(StateMismatchError) as caught:
        restore({"b": Box(0), "c": Box(0)}, tensors, skeleton)
    assert (caught.value.missing, caught.value.unexpected) == (["a"], ["c"])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Linear(2, 3, bias=False), "bias"),
        (nn.Linear(3, 3), "weight was saved as (3, 2)"),
    ],
)
def test_a_module_of_another_shape_is_refused_untouched(other: nn.Linear, words: str) -> None:
    tensors, skeleton = flatten({"m": nn.Linear(2, 3)})
    before = other.weight.clone()
    with pytest.raises(StateMismatchError) as caught:
        restore({"m": other}, tensors, skeleton)
    assert words in str(caught.value)
    assert torch.equal(other.weight, before)


def test_an_optimizer_of_another_structure_is_refused() -> None:
    tensors, skeleton = flatten({"o": torch.optim.AdamW(nn.Linear(2, 2).parameters())})
    one = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    with pytest.raises(StateMismatchError, match="o: "):
        restore({"o": one}, tensors, skeleton)
