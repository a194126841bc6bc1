"""`relit ckpt plan`: what is measured from a run, what a configuration costs, what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from run_files import Driver, FakeJobs, submit, write_code

from relit.checkpoint_costs import Cost, assumed, measured
from relit.checkpoint_plan import make_plan
from relit.cli.main import cli
from relit.client import Client
from relit_platform.run_config import CheckpointConfig
from relit_storage.checkpoint.pins import write_pin
from relit_storage.stores.opening import open_store
from relit_storage.stores.prefixed import PrefixedStore

COSTS = {
    **assumed(1e9, 1),
    "step_s": Cost(1.0, "given"),
    "copy_s": Cost(0.001, "given"),
    "mtbf_s": Cost(10_000.0, "given"),
}


def rows(steps: int, saved: set[int], delay_s: float) -> list[dict[str, Any]]:
    """Half a second a step, and longer after those that were saved."""
    found, at_s = [], 100.0
    for step in range(1, steps + 1):
        at_s += 0.5 + (delay_s if step - 1 in saved else 0.0)
        found.append({"step": step, "at_s": at_s, "generation": 1, "world": 2, "loss": 0.0})
    return found


def commit(step: int, tier: str, seconds: float, num_bytes: int) -> dict[str, Any]:
    data = {"tier": tier, "seconds": seconds, "bytes": num_bytes}
    return {"kind": "ckpt.committed", "step": step, "data": data}


def test_a_run_tells_its_costs() -> None:
    events = [commit(s, "disk", 0.8, 2000) for s in (10, 20, 30)]
    events += [commit(20, "object", 6.0, 2000), {"kind": "run.state", "data": None}]
    incidents: list[dict[str, Any]] = [
        {"downtime_s": 4.0, "restore": {"tier": "disk"}},
        {"downtime_s": 6.0},
    ]
    found = measured(rows(40, {10, 20, 30}, 0.25), events, incidents)
    assert {name: round(found[name], 6) for name in ("step_s", "save_s", "disk_s", "upload_s")} == {
        "step_s": 0.5, "save_s": 0.25, "disk_s": 0.8, "upload_s": 6.0,
    }  # fmt: skip
    assert (found["state_bytes"], found["restore_s"]) == (2000, 5.0)
    assert found["disk_share"] == pytest.approx((1 + 0.2) / 3)
    assert found["mtbf_s"] < assumed(0, 2)["mtbf_s"].value
    assert measured([], [], []) == {} == measured(rows(3, set(), 0), [], [])


def test_the_plan_adds_up() -> None:
    plan = make_plan(CheckpointConfig(), COSTS, 3600.0)
    memory, disk, outward = plan.tiers
    assert (memory.every_s, disk.every_s, outward.every_s) == (1.0, 50.0, 200.0)
    assert disk.lost_s == pytest.approx(25 + 0.53) and disk.loss.saving == pytest.approx(0.21 / 50)
    assert (disk.kept, disk.kept_bytes, outward.kept) == (2, 2e9, 3)
    assert plan.loss.total == pytest.approx(sum(t.loss.total for t in plan.tiers))
    assert plan.unprotected == 0 and plan.best_loss.total < plan.loss.total
    # Young's first order: sqrt(2 * 0.21 s * 10,000 s / 0.2)
    assert plan.best[0].every_s == pytest.approx(145, rel=0.02)


@pytest.mark.parametrize(
    ("fields", "spacings", "unprotected"),
    [
        ({"object_every_steps": 0}, (1, 50, None), 0.1),
        ({"object_every_steps": 0, "disk_every_steps": 0}, (1, None, None), 0.3),
        ({"disk_every_steps": 0}, (1, None, None), 0.3),
        ({"memory_every_steps": 0}, (None, 50, 200), 0.0),
        ({"disk_every_s": 7.0, "object_every_s": 20.0}, (1, 7, 21), 0.0),
        ({"disk_every_s": 0.1}, (1, 1, 200), 0.0),
        ({"disk_every_steps": 0, "disk_first_steps": 3}, (1, None, None), 0.3),
    ],
)
def test_a_tier_that_is_off_leaves_its_failures_to_the_next(
    fields: dict[str, Any], spacings: tuple[float | None, ...], unprotected: float
) -> None:
    plan = make_plan(CheckpointConfig(**fields), COSTS, 3600.0)
    assert tuple(t.every_s for t in plan.tiers) == spacings
    assert plan.unprotected == pytest.approx(unprotected / 10_000)
    served = sum(t.loss.restarts for t in plan.tiers) / COSTS["restore_s"].value
    assert served + plan.unprotected == pytest.approx(1 / 10_000)


@pytest.mark.parametrize(
    ("fields", "in_force", "spacings"),
    [
        ({"disk_auto": True}, {}, ("best", 200)),
        ({"disk_auto": True, "object_auto": True}, {}, ("best", "best")),
        ({"disk_auto": True, "object_auto": True}, {"disk": 7.0, "object": 20.0}, (7, 21)),
        ({}, {"disk": 7.0}, (50, 200)),  # set in an earlier life, before a resume with other fields
    ],
)
def test_auto_is_planned_as_what_is_in_force_or_as_what_is_best(
    fields: dict[str, Any], in_force: dict[str, float], spacings: tuple[Any, Any]
) -> None:
    plan = make_plan(CheckpointConfig(**fields), COSTS, 3600.0, in_force)
    for tier, best, wanted in zip(plan.tiers[1:], plan.best, spacings, strict=True):
        every_s = best.every_s if wanted == "best" else wanted
        assert tier.every_s is not None and plan.tiers[1].every_s is not None
        assert every_s * 0.999 <= tier.every_s <= every_s + plan.tiers[1].every_s
        assert ("auto" in tier.cadence) == bool(fields.get(f"{tier.tier}_auto"))


def test_failures_that_the_specification_expects_are_the_prior() -> None:
    expected = assumed(1e9, 4, 1000.0)
    assert expected["mtbf_s"] == Cost(1000.0, "assumed")
    incidents: list[dict[str, Any]] = [{"downtime_s": 1.0}]
    found = measured(rows(40, set(), 0.0), [], incidents, 1000.0)
    assert found["mtbf_s"] == pytest.approx((1000.0 + 39 * 0.5) / 2)


def test_what_is_kept_for_ever_grows_and_a_cap_may_be_too_small() -> None:
    config = CheckpointConfig(keep_object_every_steps=1000, keep_disk=5, keep_disk_bytes=int(3e9))
    _, disk, outward = make_plan(config, COSTS, 3600.0).tiers
    assert outward.growth_bytes_per_day == pytest.approx(86.4e9)
    assert (disk.kept, disk.short_bytes) == (2, 0.0)
    tiny = CheckpointConfig(keep_disk_bytes=int(1.5e9))
    assert make_plan(tiny, COSTS, 3600.0).tiers[1].short_bytes == 0.5e9


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["ckpt", "plan", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.output


def test_a_specification_is_priced(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nentry: m:f\ncheckpoint: {disk_every_s: 30}\n")
    code, text = run(str(path), "checkpoint.keep_disk=4", "--step-s", "2", "--mtbf-s", "5000")
    assert code == 0 and "given     step_s 2, mtbf_s 5000" in text
    assert "4, 4.0 GB" in text
    assert "least loss" in text and "disk_every_s=" in text
    code, text = run(str(path), "--json", "--state-bytes", "5e9", "--rpo-s", "60")
    told = json.loads(text)
    assert told["costs"]["state_bytes"] == {"value": 5e9, "origin": "given"}
    assert told["tiers"][1]["cadence"] == "every 50 steps or every 30 s"
    assert told["best"]["disk"]["every_s"] <= 60 and told["steps"] == {}


def test_a_run_is_measured_and_what_it_keeps_is_named(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    client = Client(store=root, transport=FakeJobs())
    job = submit(client, write_code(tmp_path / "code"), store=root)
    store = PrefixedStore(open_store(root), f"default/{job.id}")
    driver = Driver(store, job.id, 1000.0)
    for row in rows(40, {10, 20, 30}, 0.25):
        driver.rows.append(row)
    driver.rows.flush(1000.0)
    for step in (10, 20, 30):
        event = commit(step, "disk", 0.8, 2_000_000)
        driver.event("ckpt.committed", 1000.0, step=step, data=event["data"])
    write_pin(store, 10, reason="", at_s=0.0)
    code, text = run(job.id, "--store", root)
    assert code == 0 and "measured  step_s 0.5" in text and "state 2.0 MB" in text
    code, text = run(job.id, "--store", root, "--json", "checkpoint.disk_every_steps=10")
    assert json.loads(text)["tiers"][1]["every_s"] == pytest.approx(5.0)
