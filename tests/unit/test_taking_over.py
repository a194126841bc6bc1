"""Saved names meet registered ones: what fits is loaded bit by bit, what does not is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from saved_run import Tied, Trained
from torch import Tensor, nn

from relit_platform.errors import InitialStateError
from relit_platform.machines.budget import BAD_INPUT
from relit_platform.worker.state_tree import dtype_name, flatten
from relit_platform.worker.taking_over import Report, Rule, Saved, owner_of, take_over


def saved_of(objects: Mapping[str, Any]) -> Saved:
    tensors, skeleton = flatten(objects)
    specs = {name: (dtype_name(t), tuple(t.shape)) for name, t in tensors.items()}
    return Saved(skeleton, specs, lambda name: tensors[name].clone())


def rule(**fields: Any) -> Rule:
    return Rule(run="base", step=7, **fields)


def net(seed: int, width: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width))


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def refused(objects: Mapping[str, Any], saved: Saved, **fields: Any) -> str:
    before = {name: t.clone() for name, t in flatten(objects)[0].items()}
    with pytest.raises(InitialStateError) as caught:
        take_over(objects, saved, rule(**fields))
    after = flatten(objects)[0]
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert "step 7 of run base" in str(caught.value)
    return str(caught.value)


def test_weights_alone_leave_the_optimizer_as_it_was() -> None:
    theirs, ours = Trained(9), Trained(1)
    before = ours.optimizer.state_dict()
    saved = saved_of({"model": theirs.model, "optimizer": theirs.optimizer})
    report = take_over({"model": ours.model, "optimizer": ours.optimizer}, saved, rule())
    assert same(ours.model, theirs.model)
    assert ours.optimizer.state_dict()["state"][0]["step"] == before["state"][0]["step"] == 1
    assert report.objects == ("model",) and report.missing == report.unexpected == ()
    assert report.num_bytes == sum(t.nbytes for t in flatten({"model": theirs.model})[0].values())


def test_with_everything_the_optimizer_comes_along() -> None:
    theirs, ours = Trained(9), Trained(1)
    saved = saved_of({"model": theirs.model, "optimizer": theirs.optimizer})
    objects: dict[str, Any] = {"model": ours.model, "optimizer": ours.optimizer}
    report = take_over(objects, saved, rule(weights_only=False))
    wanted = flatten({"model": theirs.model, "optimizer": theirs.optimizer})[0]
    found = flatten(objects)[0]
    # torch's optimizers give moments the dtype of their parameter.
    assert all(torch.equal(found[name], wanted[name].to(found[name].dtype)) for name in wanted)
    assert report.objects == ("model", "optimizer") and report.whole
    assert report.loaded == len(wanted)


def test_the_objects_keep_no_reference_to_what_was_read() -> None:
    ours, given = net(1), flatten({"net": net(2)})
    tensors, skeleton = given
    specs = {name: (dtype_name(t), tuple(t.shape)) for name, t in tensors.items()}
    take_over({"net": ours}, Saved(skeleton, specs, lambda name: tensors[name]), rule())
    before = ours.state_dict()["0.weight"].clone()
    tensors["net.0.weight"].zero_()
    assert torch.equal(ours.state_dict()["0.weight"], before)


MISFITS: list[tuple[dict[str, nn.Module], dict[str, nn.Module], list[str]]] = [
    ({"net": net(0)}, {"net": net(0), "ema": net(0)}, ["registered, but not saved: ema.0.weight"]),
    ({"net": net(0), "ema": net(0)}, {"net": net(0)}, ["saved, but not registered: ema.0.bias"]),
    ({"model": net(0)}, {"net": net(0)}, ["net.0.weight", "model.0.weight", "init.rename"]),
    ({"net": net(0)[:1]}, {"net": net(0)}, ["net.1.running_mean", "init.strict=false"]),
    ({"net": net(0, 5)}, {"net": net(0)}, ["net.0.weight was saved as (5, 4)", "is (3, 4)"]),
]


@pytest.mark.parametrize(("theirs", "ours", "words"), MISFITS)
def test_a_strict_rule_lists_both_sides_and_changes_nothing(
    theirs: Any, ours: Any, words: list[str]
) -> None:
    said = refused(ours, saved_of(theirs))
    for word in words:
        assert word in said
    assert InitialStateError.__name__ in BAD_INPUT, "trying again would not help"


def test_many_names_are_counted_not_listed() -> None:
    many = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
    said = refused({"net": net(0)}, saved_of({"many": many}))
    assert "and 32 more" in said and len(said) < 900


def test_without_strict_what_fits_is_loaded_and_the_rest_reported() -> None:
    class Grown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.tail = nn.Linear(4, 3), nn.Linear(3, 9)

    old, grown = Old(), Grown()
    head = grown.head.weight.detach().clone()
    report = take_over({"m": grown}, saved_of({"m": old}), rule(strict=False))
    assert torch.equal(grown.body.weight, old.body.weight)
    assert torch.equal(grown.head.weight, head)
    assert report.missing == ("m.head.weight", "m.head.bias")
    assert report.unexpected == ("m.tail.bias", "m.tail.weight")
    assert not report.whole
    told = report.to_json(1)
    assert (told["num_missing"], told["missing"]) == (2, ["m.head.weight"])


def test_a_shape_is_an_error_without_strict_too() -> None:
    said = refused({"net": net(0)}, saved_of({"net": net(0, 5)}), strict=False)
    assert "(5, 4)" in said and "(3, 4)" in said


def test_nothing_in_common_is_an_error_without_strict_too() -> None:
    assert "no name" in refused({"net": net(0)}, saved_of({"other": net(0)}), strict=False)


RENAMES = [
    ({"model": "net"}, "model.0.weight", "net.0.weight"),
    ({"model.0": "net.body", "model": "net"}, "model.0.weight", "net.body.weight"),
    ({"model.0": "net.body", "model": "net"}, "model.1.bias", "net.1.bias"),
    ({"model": "net"}, "models.0", "models.0"),
    ({"model": "net"}, "model", "net"),
    ({}, "a.b", "a.b"),
]


@pytest.mark.parametrize(("rename", "name", "wanted"), RENAMES)
def test_rename_takes_the_longest_beginning(rename: dict[str, str], name: str, wanted: str) -> None:
    assert rule(rename=rename).renamed(name) == wanted


def test_renamed_weights_are_loaded() -> None:
    ours, theirs = net(1), net(2)
    report = take_over({"net": ours}, saved_of({"model": theirs}), rule(rename={"model": "net"}))
    assert same(ours, theirs) and report.objects == ("net",)


def test_a_dtype_of_the_same_kind_is_converted_and_told() -> None:
    ours, theirs = nn.Linear(4, 3).bfloat16(), nn.Linear(4, 3)
    report = take_over({"m": ours}, saved_of({"m": theirs}), rule())
    assert torch.equal(ours.weight, theirs.weight.bfloat16())
    assert report.converted == ("m.weight F32 -> BF16", "m.bias F32 -> BF16")


def test_a_dtype_of_another_kind_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.register_buffer("n", torch.ones(3, dtype=dtype))

    said = refused({"m": Counts(torch.float32)}, saved_of({"m": Counts(torch.int64)}))
    assert "m.n was saved as I64, registered is F32" in said


def test_tied_weights_come_from_any_of_their_names() -> None:
    source = Tied()
    state = {k: v for k, v in source.state_dict().items() if k != "embed.weight"}
    ours = Tied()
    report = take_over({"m": ours}, saved_of({"m": (lambda: state, None)}), rule())
    assert torch.equal(ours.embed.weight, source.head.weight)
    assert report.missing == () and report.whole


def test_tied_weights_that_differ_are_refused() -> None:
    state = {k: v.clone() for k, v in Tied().state_dict().items()}
    assert take_over({"m": Tied()}, saved_of({"m": (lambda: state, None)}), rule()).missing == ()
    state["head.weight"] += 1
    assert "are tied, and differ" in refused({"m": Tied()}, saved_of({"m": (lambda: state, None)}))


def test_untied_names_of_a_tied_source_are_filled_both() -> None:
    class Untied(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = nn.Parameter(torch.zeros(60, 8))

    source, ours = Tied(), Untied()
    take_over({"m": ours}, saved_of({"m": source}), rule())
    assert torch.equal(ours.head.weight, source.embed.weight)
    assert ours.head.weight.data_ptr() != ours.embed.weight.data_ptr()


class Flat:
    """A state that is like a module's, of something that is none."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = dict(tensors)

    def state_dict(self) -> dict[str, Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.tensors = state


def test_a_flat_dictionary_counts_as_weights() -> None:
    ours = Flat(a=torch.zeros(2), b=torch.zeros(1))
    theirs = Flat(a=torch.ones(2))
    report = take_over({"x": ours}, saved_of({"x": theirs}), rule(strict=False))
    assert torch.equal(ours.tensors["a"], torch.ones(2)) and report.missing == ("x.b",)
    assert torch.equal(ours.tensors["b"], torch.zeros(1))


def test_of_an_import_objects_may_lack() -> None:
    ours = Trained(1)
    objects: dict[str, Any] = {"model": ours.model, "optimizer": ours.optimizer}
    theirs = Trained(9).model
    lacking = rule(weights_only=False, objects_may_lack=True)
    report: Report = take_over(objects, saved_of({"model": theirs}), lacking)
    assert same(ours.model, theirs) and not report.whole and report.missing == ()
    few = nn.Linear(2, 2)
    objects = {"model": few, "optimizer": torch.optim.SGD(few.parameters(), lr=0.1)}
    said = refused(objects, saved_of({"model": nn.Linear(2, 2)}), weights_only=False)
    assert "registered, but not saved: optimizer." in said


@pytest.mark.parametrize("node", [{"w": {"$T": ["x"]}}, {"w": {"$T": "gone"}}, {"$d": 4}, 7, []])
def test_a_structure_that_lies_is_an_error_of_ours(node: Any) -> None:
    saved = Saved({"net": node}, {}, lambda name: torch.ones(1))
    refused({"net": nn.Linear(2, 1)}, saved, weights_only=False)
    refused({"net": Flat(w=torch.ones(1))}, saved, strict=False)


def test_the_owner_of_a_name_is_the_longest_that_fits() -> None:
    names = ["a", "a.b", "ab"]
    assert [owner_of(key, names) for key in ("a.b.c", "a.c", "ab", "b")] == ["a.b", "a", "ab", ""]
