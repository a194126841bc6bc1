from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from relit.errors import BadInputError, EntryError, SpecError
from relit.spec import files
from relit.spec.entry import find_entry
from relit.spec.model import Checkpoint, JobSpec, Recovery, Scaling
from relit_platform import run_config
from relit_storage.run.redaction import is_secret_name

BASE = {"name": "digits", "entry": "train.py:train"}

WRONG = [
    ({**BASE, "scalling": {}}, ["'scalling'", "did you mean 'scaling'"]),
    ({**BASE, "scaling": {"worker": 2}}, ["scaling", "did you mean 'workers'"]),
    ({**BASE, "scaling": {"workers": "two"}}, ["scaling.workers", "'two'", "integer"]),
    ({**BASE, "scaling": {"workers": 0}}, ["scaling.workers", "got 0"]),
    ({**BASE, "checkpoint": {"keep_disk": 0}}, ["checkpoint.keep_disk", "got 0"]),
    ({**BASE, "checkpoint": {"disk_every_s": -1}}, ["checkpoint.disk_every_s", "got -1"]),
    ({**BASE, "checkpoint": {"object_every_s": float("inf")}}, ["checkpoint.object_every_s"]),
    ({**BASE, "checkpoint": {"growth": 1}}, ["checkpoint.growth", "got 1"]),
    ({**BASE, "checkpoint": {"metric_mode": "low"}}, ["checkpoint.metric_mode", "'low'", "'min'"]),
    ({**BASE, "checkpoint": {"keep_disk_best": 2}}, ["keep_disk_best", "metric is ''", "run.log"]),
    (
        {**BASE, "checkpoint": {"disk_on_metric": True, "metric": "v", "memory_every_steps": 2}},
        ["memory_every_steps is 2", "set memory_every_steps to 1"],
    ),
    (
        {**BASE, "checkpoint": {"peer_bytes_per_s": 1000}},
        ["peer_bytes_per_s is 1000", "below 65536", "set peer to 'off'"],
    ),
    (
        {**BASE, "checkpoint": {"disk_first_steps": 60}},
        ["disk_first_steps is 60", "disk_every_steps, 50", "raise the other"],
    ),
    (
        {**BASE, "checkpoint": {"object_auto": True, "object_first_steps": 5}},
        ["object_auto and object_first_steps", "leave out the one"],
    ),
    ({**BASE, "checkpoint": {"auto_max_s": 0}}, ["checkpoint.auto_max_s", "got 0"]),
    ({**BASE, "checkpoint": {"save_nice": 20}}, ["checkpoint.save_nice", "got 20"]),
    ({**BASE, "checkpoint": {"disk_bytes_per_s": -1}}, ["checkpoint.disk_bytes_per_s"]),
    ({**BASE, "recovery": {"on_rank_loss": "shrnk"}}, ["recovery.on_rank_loss", "'shrnk'"]),
    ({**BASE, "recovery": {"on_rank_loss": "spare"}}, ["scaling.spares is 0"]),
    ({**BASE, "entry": "train.py"}, ["entry", "'train.py'", "package.module:function"]),
    ({**BASE, "schema_version": 9}, ["schema_version", "9"]),
    ({**BASE, "name": "a b"}, ["name", "'a b'"]),
    ({**BASE, "experiment": "index"}, ["experiment", "reserved"]),
    ({**BASE, "config": {"lr": float("nan")}}, ["config", "NaN"]),
    ({**BASE, "config": {"lr": {1: 2}}}, ["config.lr"]),
    ({"entry": "a:b"}, ["name", "is required"]),
    ([], ["expected a mapping"]),
]


@pytest.mark.parametrize(("data", "words"), WRONG)
def test_each_mistake_names_field_value_and_way_out(data: Any, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse(data)
    for word in words:
        assert word in str(caught.value)


def test_constructor_gives_the_same_hint_and_is_frozen() -> None:
    with pytest.raises(ValidationError, match="did you mean 'scaling'"):
        JobSpec(name="digits", entry="train.py:train", scalin={})  # type: ignore[call-arg]
    spec = JobSpec(name="digits", entry="train.py:train")
    with pytest.raises(ValidationError, match="frozen"):
        spec.name = "other"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Scaling, run_config.ScalingConfig),
        (Checkpoint, run_config.CheckpointConfig),
        (Recovery, run_config.RecoveryConfig),
    ],
)
def test_sub_models_mirror_the_platform_with_the_same_defaults(
    ours: type[BaseModel], theirs: Any
) -> None:
    assert ours().model_dump() == dataclasses.asdict(theirs())


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(["1e-3", "1_0", "yes", "~", "null", "0x10", "2026-11-29", ".5e2", "=", "on"])
)
# Hypothesis also tries the words that our own sources hold, such as names of secrets.
tag_names = st.text().filter(lambda name: not is_secret_name(name))
configs = st.dictionaries(
    st.text(min_size=1, max_size=6)
    .map(lambda key: f"k{key}")
    .filter(lambda key: not is_secret_name(key)),
    st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=6),
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(config=configs, workers=st.integers(1, 99), tags=st.dictionaries(tag_names, st.text()))
def test_yaml_round_trip_loses_nothing(
    config: dict[str, Any], workers: int, tags: dict[str, str]
) -> None:
    spec = JobSpec.model_validate({**BASE, "config": config, "scaling": {"workers": workers}})
    spec = spec.model_copy(update={"tags": tags})
    text = files.to_yaml(spec)
    assert files.from_yaml(text) == spec


def test_scientific_numbers_are_numbers_in_files_and_overrides() -> None:
    spec = files.from_yaml("name: a\nentry: b:c\nconfig: {lr: 1e-3, s: '1e-3'}", ["config.wd=5e-2"])
    assert spec.config == {"lr": 0.001, "s": "1e-3", "wd": 0.05}


def test_overrides_set_leaves_and_are_validated() -> None:
    text = files.to_yaml(JobSpec.parse(BASE))
    spec = files.from_yaml(text, ["scaling.workers=4", "config.model.depth=3", "config.name=x=y"])
    assert spec.scaling.workers == 4
    assert spec.config == {"model": {"depth": 3}, "name": "x=y"}
    assert files.override(spec, ["seed=7"]).seed == 7


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("workers", "not of the form a.b=value"),
        ("scaling.workrs=2", "did you mean 'workers'"),
        ("name.first=2", "name holds 'digits'"),
        ("seed=-1", "seed"),
    ],
)
def test_a_wrong_override_says_so(override: str, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        files.override(JobSpec.parse(BASE), [override])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: [", "not YAML"),
        ("- a", "expected a mapping"),
        ("name: a\nname: b\nentry: c:d", "'name' is given twice"),
    ],
)
def test_a_broken_file_says_where(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        files.from_yaml(text)


def test_diff_lists_changed_leaves() -> None:
    one = JobSpec.parse({**BASE, "config": {"lr": 1, "depth": 2}})
    two = JobSpec.parse({**BASE, "config": {"lr": 3}, "scaling": {"workers": 2}})
    assert one.diff(one) == {}
    assert one.diff(two) == {
        "config.depth": (2, None),
        "config.lr": (1, 3),
        "scaling.workers": (1, 2),
    }


def test_missing_and_huge_files_are_input_errors(tmp_path: Any) -> None:
    with pytest.raises(BadInputError, match="cannot read specification"):
        files.load(str(tmp_path / "none.yaml"))
    (tmp_path / "big.yaml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(BadInputError, match="larger than"):
        files.load(str(tmp_path / "big.yaml"))


@pytest.mark.parametrize("value", ["{[1, 2]: 3}", "1" + "0" * 5000, "[" * 3000 + "]" * 3000])
def test_yaml_that_breaks_the_parser_is_a_spec_error(value: str) -> None:
    with pytest.raises(SpecError, match="not YAML"):
        files.from_yaml(f"name: a\nentry: a:b\nconfig: {{a: {value}}}\n")


@pytest.mark.parametrize("entry", ["x" * 5000 + ".py:f", "x" * 5000 + ":f", "a\0b.py:f", ".a:f"])
def test_an_entry_that_is_no_file_name_is_an_entry_error(entry: str) -> None:
    with pytest.raises(EntryError):
        find_entry(JobSpec(name="a", entry=entry))
