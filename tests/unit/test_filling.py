"""Which registered tensors a restore fills where they are, and that nothing else is touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relit_platform.errors import StateMismatchError
from relit_platform.worker.filling import rooms
from relit_platform.worker.state_tree import flatten, restore


def trained(seed: int) -> dict[str, Any]:
    """A model and its optimizer, whose state is there."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def shapes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def filled(objects: dict[str, Any], saved: dict[str, Any]) -> dict[str, Tensor]:
    """Restore `saved` into objects as a rank does; the tensors that were filled in place."""
    tensors, skeleton = flatten(saved)
    skeleton = json.loads(json.dumps(skeleton))
    found = rooms(objects, shapes(tensors), skeleton)
    for name, room in found.items():
        room.copy_(tensors[name])
    loaded = {name: found.get(name, tensor.clone()) for name, tensor in tensors.items()}
    restore(objects, loaded, skeleton, give=True)
    ours, _ = flatten(objects)
    assert tensors.keys() <= ours.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in tensors.items())
    return found


def test_a_model_and_an_optimizer_of_torch_are_filled_where_they_are() -> None:
    objects, saved = trained(0), trained(1)
    before, _ = flatten(objects)
    assert set(filled(objects, saved)) == set(before)
    after, _ = flatten(objects)
    assert all(after[name].data_ptr() == tensor.data_ptr() for name, tensor in before.items())


def test_an_optimizer_without_state_keeps_what_it_is_given() -> None:
    objects, saved = trained(0), trained(1)
    objects["optimizer"] = torch.optim.AdamW(objects["model"].parameters(), lr=0.01)
    found = filled(objects, saved)
    assert found and all(name.startswith("model.") for name in found)
    for model in (objects["model"], saved["model"]):  # both go on alike
        model.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
    objects["optimizer"].step()
    saved["optimizer"].step()
    ours, theirs = flatten(objects)[0], flatten(saved)[0]
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


class Adds:
    """Loads in a way that needs its own tensors and the saved ones to be two."""

    def __init__(self, value: float) -> None:
        self.total = torch.full((3,), value)

    def state_dict(self) -> dict[str, Tensor]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.total.zero_()
        self.total += state["total"]


class OwnLoad(nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        nn.init.zeros_(self.weight)
        super()._load_from_state_dict(*args)


def hooked(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    model.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
        lambda *_: nn.init.zeros_(model.weight)
    )
    return model


def hooked_optimizer(seed: int) -> dict[str, Any]:
    objects = trained(seed)
    objects["optimizer"].register_load_state_dict_pre_hook(lambda *_: None)
    return {"optimizer": objects["optimizer"]}


class ExtraState(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.total = torch.full((3,), value)

    def get_extra_state(self) -> Any:
        return {"total": self.total}

    def set_extra_state(self, state: Any) -> None:
        self.total.zero_()
        self.total += state["total"]


def patched(seed: int) -> nn.Module:
    """As torch.distributed.checkpoint patches models: on the object, not on its class."""
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    stock = model.load_state_dict

    def load(*args: Any) -> Any:
        nn.init.zeros_(model.weight)
        return stock(*args)

    model.load_state_dict = load  # type: ignore[assignment]
    return model


def behind_a_stranger(seed: int) -> dict[str, Any]:
    """The same parameters in an object that loads in its own way, and then in a plain one."""
    torch.manual_seed(seed)
    own = nn.Sequential(OwnLoad(2, 2))
    return {"own": own, "plain": own[0]}


UNKNOWN: dict[str, Callable[[int], dict[str, Any]]] = {
    "an object": lambda seed: {"o": Adds(float(seed))},
    "a module": lambda seed: {"m": nn.Sequential(OwnLoad(2, 2))},
    "a hook": lambda seed: {"m": hooked(seed)},
    "an optimizer's hook": hooked_optimizer,
    "extra state": lambda seed: {"m": ExtraState(float(seed))},
    "a patched object": lambda seed: {"m": patched(seed)},
    "another one's tensors": behind_a_stranger,
    "what comes after it": lambda seed: {"o": Adds(float(seed)), **trained(seed)},
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_loads_in_a_way_of_its_own_is_given_other_tensors(kind: str) -> None:
    assert filled(UNKNOWN[kind](0), UNKNOWN[kind](1)) == {}


def test_a_schedule_is_no_stranger_and_what_comes_before_one_is_filled() -> None:
    objects, saved = trained(0), trained(1)
    for its, value in ((objects, 0.0), (saved, 1.0)):
        its["schedule"] = torch.optim.lr_scheduler.StepLR(its["optimizer"], 3)
        its["model2"] = nn.Linear(2, 2)
        its["stranger"] = Adds(value)
        its["model3"] = nn.Linear(2, 2)
    found = {name.split(".")[0] for name in filled(objects, saved)}
    assert found == {"model", "optimizer", "model2"}


def test_memory_that_two_names_share_is_left_out() -> None:
    def model(tied: bool) -> nn.Module:
        module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
        if tied:
            module["b"].weight = module["a"].weight
        return module

    tensors, skeleton = flatten({"m": model(tied=False)})
    found = rooms({"m": model(tied=True)}, shapes(tensors), skeleton)
    assert sorted(found) == ["m.a.bias", "m.b.bias", "m.c.bias", "m.c.weight"]
    # The other way round, both places get the one that was saved.
    apart, tied = model(tied=False), model(tied=True)
    filled({"m": apart}, {"m": tied})
    assert all(torch.equal(apart.state_dict()[n], t) for n, t in tied.state_dict().items())


@pytest.mark.parametrize(
    "now",
    [torch.zeros(2, 3).t(), torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 2).to_sparse()],
    ids=["not dense", "another dtype", "sparse"],
)
def test_only_what_has_the_very_bytes_of_what_was_saved(now: Tensor) -> None:
    module = nn.Module()
    module.register_buffer("b", now)
    skeleton = {"m": {"b": {"$T": "m.b"}}}
    assert rooms({"m": module}, {"m.b": torch.empty(3, 2, device="meta")}, skeleton) == {}


def test_a_state_of_another_shape_is_refused_before_anything_is_filled() -> None:
    tensors, skeleton = flatten({"m": nn.Linear(3, 2)})
    with pytest.raises(StateMismatchError, match="was saved as"):
        rooms({"m": nn.Linear(4, 2)}, shapes(tensors), skeleton)
    with pytest.raises(StateMismatchError, match="registered objects"):
        rooms({"n": nn.Linear(3, 2)}, shapes(tensors), skeleton)
