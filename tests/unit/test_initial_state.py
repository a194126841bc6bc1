"""A run begins with another run's step: which one is settled at submit, and read whole and once."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import Driver, FakeJobs, make_spec, submit
from safetensors.torch import save_file
from saved_run import Saved, Tied, Trained, make_run

from relit.client import Client
from relit.errors import (
    BadInputError,
    CheckpointBrokenError,
    CheckpointNotFoundError,
    DriftError,
    RunExistsError,
    RunNotFoundError,
    SecretInSpecError,
    SpecError,
)
from relit.spec import files
from relit.spec.model import JobSpec
from relit.spec.resolve import config_sha
from relit_platform.errors import InitialStateError
from relit_platform.run_config import InitConfig, RunConfig
from relit_platform.worker.initial_state import load_initial
from relit_storage.checkpoint.pins import write_pin
from relit_storage.errors import StoreUnavailableError
from relit_storage.run.layout import manifest_key, shard_key
from relit_storage.stores.local import LocalStore

STEPS = (10, 20)


@pytest.fixture
def base(tmp_path: Path) -> Saved:
    """A run whose steps others begin with."""
    run = make_run(tmp_path)
    run.commit(STEPS)
    run.over()
    return run


def begin(base: Saved, run_id: str = "r2", **init: Any) -> InitConfig:
    config = started(base, run_id, **init)
    assert config.init is not None
    return config.init


def started(base: Saved, run_id: str = "r2", **init: Any) -> RunConfig:
    spec = {"from": "r1", **init}
    config = submit(base.client, base.root / "code", run_id=run_id, init=spec).reader.config()
    assert config is not None
    return config


def test_newest_means_the_step_that_is_newest_at_submit(base: Saved) -> None:
    init = begin(base)
    assert (init.run_id, init.step, init.generation) == ("r1", 20, 1)
    assert init.source.endswith("/store/default/r1")
    base.commit([30])
    again = submit(base.client, base.root / "code", run_id="r2", init={"from": "r1"})
    assert again.reader.config() == RunConfig.from_json(again.reader.config().to_json())  # type: ignore[union-attr]
    assert begin(base).step == 20, "the same submit is the same run"
    assert begin(base, "r3").step == 30


def test_a_step_is_named_by_number_or_by_its_pin(base: Saved) -> None:
    assert begin(base, "a", step=10).step == 10
    write_pin(base.store, 10, reason="best", at_s=0.0)
    assert begin(base, "b", step="best").step == 10
    write_pin(base.store, 20, reason="best", at_s=0.0)
    with pytest.raises(CheckpointNotFoundError, match="single pin 'best'"):
        begin(base, "c", step="best")
    with pytest.raises(CheckpointNotFoundError, match="10 'best', 20 'best'"):
        begin(base, "d", step="worst")
    with pytest.raises(CheckpointNotFoundError, match=r"step 15.*10, 20"):
        begin(base, "e", step=15)


def test_a_run_is_named_by_its_directory_too(base: Saved, tmp_path: Path) -> None:
    there = submit(Client(store=str(tmp_path / "other"), transport=FakeJobs()), base.root / "code",
                   init={"from": base.job.path})  # fmt: skip
    config = there.reader.config()
    assert config is not None and config.init is not None and config.init.step == 20
    with pytest.raises(RunNotFoundError, match="nobody"):
        begin(base, **{"from": "nobody"})
    assert [run["run_id"] for run in base.client.list()] == ["r1"], "nothing is left behind"


def test_another_tools_checkpoint_is_to_be_imported_first(base: Saved, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(BadInputError, match=r"relit ckpt import \S+hf --run NAME"):
        begin(base, **{"from": str(tmp_path / "hf")})


def test_a_newest_step_that_is_torn_gives_way(base: Saved) -> None:
    base.path(shard_key(20, 1, 0)).write_bytes(b"short")
    assert begin(base).step == 10
    with pytest.raises(CheckpointBrokenError, match="step 20"):
        begin(base, "r3", step=20)


WRONG = [
    ({"from": ""}, ["init.from"]),
    ({}, ["init.from", "required"]),
    ({"from": "r1", "strct": True}, ["did you mean 'strict'"]),
    ({"source": "r1"}, ["init: unknown key 'source'"]),
    ({"from": "r1", "step": -1}, ["init.step", "-1"]),
    ({"from": "r1", "step": 1.5}, ["init.step"]),
    ({"from": "r1", "rename": ["a"]}, ["init.rename"]),
]


@pytest.mark.parametrize(("init", "words"), WRONG)
def test_a_mistake_in_init_names_field_and_way_out(init: Any, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({"name": "a", "entry": "t.py:f", "init": init})
    for word in words:
        assert word in str(caught.value)


def test_a_credential_in_init_is_refused() -> None:
    with pytest.raises(SecretInSpecError, match=r"init\.from"):
        JobSpec.parse({"name": "a", "entry": "t:f", "init": {"from": "s3://me:pw@bucket/x/y"}})


def test_init_survives_yaml_and_is_part_of_what_the_run_is() -> None:
    plain = JobSpec.parse({"name": "a", "entry": "t.py:f"})
    init = {"from": "r1", "step": 3, "rename": {"model": "net"}}
    spec = JobSpec.parse({"name": "a", "entry": "t.py:f", "init": init})
    assert files.from_yaml(files.to_yaml(spec)) == spec
    assert spec.to_plain()["init"] == init
    other = files.override(spec, ["init.strict=false"])
    assert len({config_sha(plain), config_sha(spec), config_sha(other)}) == 3
    assert plain.diff(spec)["init.from"] == (None, "r1")


def test_another_init_is_drift(base: Saved) -> None:
    first = begin(base)
    with pytest.raises(RunExistsError, match=r"init\.step: 'newest' -> 10"):
        begin(base, step=10)
    job = base.client.get("r2")
    Driver(job.reader.store, "r2", time.time()).result(time.time(), state="FAILED")
    base.commit([30])
    with pytest.raises(DriftError, match=r"init\.strict.*--allow-config-change"):
        job.resume(overrides=["init.strict=false"])
    kept = job.resume(overrides=["scaling.workers=2"]).reader.config()
    assert kept is not None and kept.init == first, "the very commit, though there is a newer one"
    Driver(job.reader.store, "r2", time.time() + 60).result(time.time(), state="FAILED")
    changed = job.resume(overrides=["init.strict=false"], allow=["config"]).reader.config()
    assert changed is not None and changed.init == replace(first, step=30, strict=False,
        manifest_sha256=changed.init.manifest_sha256)  # type: ignore[union-attr]  # fmt: skip


def test_a_spec_that_is_resumed_without_init_has_none(base: Saved) -> None:
    begin(base)
    job = base.client.get("r2")
    Driver(job.reader.store, "r2", time.time()).result(time.time(), state="FAILED")
    spec = make_spec(base.root / "code", run_id="r2")
    config = job.resume(spec, allow=["config"]).reader.config()
    assert config is not None and config.init is None


# ---- in the rank ----


def test_the_step_is_loaded_bit_by_bit(base: Saved) -> None:
    ours = Trained(1)
    objects: dict[str, Any] = {"model": ours.model, "optimizer": ours.optimizer}
    report = load_initial(begin(base, weights_only=False, step=10), objects)
    wanted, theirs = Trained(10).flatten()[0], Trained(1)
    theirs.model, theirs.optimizer = ours.model, ours.optimizer
    found = theirs.flatten()[0]
    assert all(torch.equal(found[name], wanted[name].to(found[name].dtype)) for name in wanted)
    assert (report.run, report.step, report.loaded) == ("r1", 10, len(wanted))


def test_a_step_that_two_ranks_saved_is_loaded_by_one(base: Saved) -> None:
    model = Tied()
    report = load_initial(begin(base), {"model": model})
    assert torch.equal(model.embed.weight, Trained(20).model.embed.weight)
    assert report.objects == ("model",)


def damaged(base: Saved, key: str) -> None:
    path = base.path(key)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (shard_key(20, 1, 0), "rank-00000.safetensors.*checksum"),
        (shard_key(20, 1, 1), "rank-00001.safetensors.*checksum"),
        (manifest_key(20, 1), "not what it was when the run was submitted"),
    ],
)
def test_damage_since_the_submit_is_named_and_final(base: Saved, key: str, words: str) -> None:
    init = begin(base, weights_only=False)
    damaged(base, key)
    with pytest.raises(InitialStateError, match=words):
        load_initial(init, {"model": Trained(1).model, "optimizer": Trained(1).optimizer})


def test_a_step_that_was_deleted_since_is_named(base: Saved) -> None:
    init = begin(base)
    base.path(manifest_key(20, 1)).unlink()
    with pytest.raises(InitialStateError, match="deleted"):
        load_initial(init, {"model": Tied()})
    with pytest.raises(InitialStateError, match="step 20 of run r1"):
        load_initial(replace(init, source="s3://me:pw@b/x"), {"model": Tied()})


def test_a_store_that_is_away_says_nothing_about_the_step(
    base: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = begin(base)

    def away(self: LocalStore, key: str, *_: Any) -> bytes:
        raise StoreUnavailableError(url="x", key=key, cause="timed out")

    monkeypatch.setattr(LocalStore, "get_range", away)
    with pytest.raises(StoreUnavailableError):
        load_initial(init, {"model": Tied()})


def test_a_configuration_of_before_init_is_read(base: Saved) -> None:
    config = started(base)
    old = {k: v for k, v in json.loads(json.dumps(config.to_json())).items() if k != "init"}
    assert RunConfig.from_json(old).init is None
