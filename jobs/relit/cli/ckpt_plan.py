"""`relit ckpt plan`: what checkpoints cost and risk, and what would cost least."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relit.cli.ckpt_progress import size_text
from relit.cli.options import Output, find_run, json_option, store_option

if TYPE_CHECKING:
    from relit.checkpoint_costs import Cost
    from relit.checkpoint_plan import Plan, TierPlan
    from relit.reading import RunReader
    from relit_platform.run_config import CheckpointConfig
    from relit_storage.checkpoint.retention import Keep, Retention

_GIVEN = {
    "step_s": "Seconds of one step.",
    "state_bytes": "Bytes of one checkpoint, all ranks together.",
    "copy_s": "Seconds that a snapshot into shared memory costs the loop.",
    "save_s": "Seconds that a save to disk costs the loop.",
    "disk_s": "Seconds until a step is committed on disk.",
    "upload_s": "Seconds of its upload after that.",
    "restore_s": "Seconds from a fault until training goes on.",
    "mtbf_s": "Seconds between two failures.",
    "disk_share": "Share of the failures that only the disk survives.",
    "object_share": "Share of the failures that only the object tier survives.",
}
_LIKELY_BYTES = 1e9


def _given_options(command: Any) -> Any:
    for name, text in reversed(_GIVEN.items()):
        kind = click.FloatRange(0, 1) if name.endswith("share") else click.FloatRange(min=1e-9)
        flag = "--" + name.replace("_", "-")
        command = click.option(flag, name, type=kind, metavar="X", help=text)(command)
    return command


@click.command(short_help="Say what checkpoints cost, and what would cost least.")
@click.argument("what", metavar="SPEC_OR_RUN")
@click.argument("overrides", nargs=-1, metavar="[a.b=VALUE]...")
@_given_options
@click.option(
    "--rpo-s",
    type=click.FloatRange(min=1e-9),
    default=None,
    metavar="X",
    help="Seconds of training that may be lost at once, at the most; default: auto_max_s.",
)
@store_option
@json_option
def plan(
    what: str,
    overrides: tuple[str, ...],
    rpo_s: float | None,
    store: str | None,
    out: Output,
    **given: float | None,
) -> None:
    """Price the cadence and retention of SPEC (a YAML file) or RUN, in seconds, bytes and expected
    loss, and name the spacing that loses least.

    Costs are given by options, else measured from the run's directory, else assumed; each is shown
    with its origin. For a run the steps that would be kept now are listed with the reason, and a
    spacing that it has set by itself is the one that is in force.

    COUNTS: seconds until a save is committed. AT RISK: training that a failure of the tier's kind
    costs, on average. SAVING: share of the time that the loop spends on it.
    """
    from relit.checkpoint_plan import make_plan

    if Path(what).suffix in (".yaml", ".yml"):
        from relit.spec import files

        spec = files.load(what, overrides)
        config, reader, ranks = _plain(spec.checkpoint.model_dump()), None, spec.scaling.workers
        in_force: dict[str, float] = {}
    else:
        reader = find_run(what, store).reader
        config, ranks = _of_run(reader, overrides)
        in_force = _in_force(reader)
    given_s = {n: v for n, v in given.items() if v is not None}
    costs = _costs(reader, ranks, config, given_s)
    found = make_plan(config, costs, rpo_s or config.auto_max_s, in_force)
    kept = _kept_now(reader, config) if reader else {}
    out.data(_as_json(found, costs, kept))
    if not out.as_json:
        _say(found, costs, kept, out)


def _plain(data: dict[str, Any]) -> CheckpointConfig:
    from relit_platform.run_config import CheckpointConfig

    return CheckpointConfig(**data)


def _of_run(reader: RunReader, overrides: tuple[str, ...]) -> tuple[CheckpointConfig, int]:
    """Its newest configuration, with overrides: what a resume with them would do."""
    from relit.errors import BadInputError
    from relit.spec import files
    from relit.spec.model import JobSpec

    config = reader.config()
    if config is None:
        raise BadInputError(message=f"run {reader.run_id} has no configuration that reads")
    given = {"name": "plan", "entry": "m:f", "checkpoint": dataclasses.asdict(config.checkpoint)}
    spec = files.override(JobSpec.parse(given, source=f"run {reader.run_id}"), overrides)
    return _plain(spec.checkpoint.model_dump()), config.scaling.workers


def _in_force(reader: RunReader) -> dict[str, float]:
    """Seconds by tier that the run has set by itself."""
    spacing = reader.status().get("spacing") or {}
    found = {tier: _number(spacing.get(f"{tier}_every_s")) for tier in ("disk", "object")}
    return {tier: seconds for tier, seconds in found.items() if seconds}


def _costs(
    reader: RunReader | None, ranks: int, config: CheckpointConfig, given: dict[str, float]
) -> dict[str, Cost]:
    from relit.checkpoint_costs import Cost, assumed, measured

    expected_s = config.expected_mtbf_s
    seen: dict[str, float] = {}
    if reader is not None:
        seen = measured(reader.rows(), reader.events(), reader.incidents(), expected_s)
    size = given.get("state_bytes") or seen.get("state_bytes") or _LIKELY_BYTES
    return {
        **assumed(size, ranks, expected_s),
        **{name: Cost(value, "measured") for name, value in seen.items()},
        **{name: Cost(value, "given") for name, value in given.items()},
    }


def _kept_now(reader: RunReader, config: CheckpointConfig) -> dict[str, Retention]:
    """What retention says of the steps that are there, as if the next commit came now."""
    from relit.checkpoints import Checkpoints
    from relit_platform.machines.policies import disk_keep, object_keep
    from relit_storage.checkpoint.retention import StepOnTier, plan_retention

    checkpoints = Checkpoints(reader)
    values = {row["step"]: row.get(config.metric) for row in reader.rows()} if config.metric else {}
    copies, pins = checkpoints.inventory().copies, checkpoints.pins()
    policies: dict[str, Keep] = {"disk": disk_keep(config), "object": object_keep(config)}
    found: dict[str, Retention] = {}
    for tier, keep in policies.items():
        here = [copy for copy in copies if copy.tier == tier]
        steps = [
            StepOnTier(c.step, c.generation, True, c.num_bytes, _number(values.get(c.step)))
            for c in here
        ]
        if steps:
            largest = max(step.num_bytes for step in steps)
            keep = dataclasses.replace(keep, next_bytes=largest)
            found[tier] = plan_retention(steps, keep, pinned=pins)
    return found


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _as_json(found: Plan, costs: dict[str, Cost], kept: dict[str, Retention]) -> dict[str, Any]:
    return {
        "costs": {name: dataclasses.asdict(cost) for name, cost in costs.items()},
        "tiers": [dataclasses.asdict(tier) for tier in found.tiers],
        "loss": {**dataclasses.asdict(found.loss), "total": found.loss.total},
        "unprotected_per_day": found.unprotected * 86400,
        "best": {
            tier: dataclasses.asdict(spacing)
            for tier, spacing in zip(("disk", "object"), found.best, strict=True)
        },
        "best_loss": {**dataclasses.asdict(found.best_loss), "total": found.best_loss.total},
        "steps": {tier: dataclasses.asdict(retention) for tier, retention in kept.items()},
    }


def _say(found: Plan, costs: dict[str, Cost], kept: dict[str, Retention], out: Output) -> None:
    from rich.table import Table

    for origin in ("given", "measured", "assumed"):
        parts = [_cost_text(n, c.value) for n, c in costs.items() if c.origin == origin]
        if parts:
            out.say(f"{origin:<9} {', '.join(parts)}")
    columns = ("TIER", "SPACING", "COUNTS", "AT RISK", "SAVING", "KEPT", "CADENCE")
    table = Table(*columns, box=None, pad_edge=False)
    for tier in found.tiers:
        table.add_row(*_cells(tier))
    out.console().print(table)
    _say_loss(found, out)
    for tier in found.tiers:
        if tier.growth_bytes_per_day:
            growth = size_text(int(tier.growth_bytes_per_day))
            out.say(f"{tier.tier} grows by {growth} a day: what is kept for ever")
        if tier.short_bytes:
            out.say(f"{tier.tier}: the cap is {size_text(int(tier.short_bytes))} too small")
    for name, retention in kept.items():
        forecast = size_text(retention.forecast_bytes)
        out.say(f"on {name} now, {forecast} with the next step")
        for verb, steps in (("keep", retention.kept), ("drop", retention.dropped)):
            for step, reason in steps:
                out.say(f"  {verb} {step.step:>8}  {size_text(step.num_bytes):>9}  {reason}")


def _say_loss(found: Plan, out: Output) -> None:
    parts = found.loss
    out.say(
        f"expected loss {parts.total:.3%} of the time: saving {parts.saving:.3%}, work done again "
        f"{parts.redone:.3%}, restarts {parts.restarts:.3%}"
    )
    if found.unprotected:
        times = found.unprotected * 86400
        out.say(f"no tier survives {times:.3g} failures a day: the run would begin again")
    disk, outward = found.best
    out.say(
        f"least loss {found.best_loss.total:.3%}: disk_every_s={_round(disk.every_s)} "
        f"({disk.every_steps} steps), object_every_s={_round(outward.every_s)} "
        f"({outward.every_steps} steps)"
    )
    out.say(f"  disk      {disk.reason}")
    out.say(f"  object    {outward.reason}")


def _cells(tier: TierPlan) -> list[str]:
    spacing = "-" if tier.every_s is None else f"{_round(tier.every_s)} s"
    lost = "-" if tier.lost_s is None else f"{_round(tier.lost_s)} s"
    kept = "" if tier.tier == "memory" else f"{tier.kept}, {size_text(int(tier.kept_bytes))}"
    counts = f"+{_round(tier.durable_s)} s"
    return [tier.tier, spacing, counts, lost, f"{tier.loss.saving:.3%}", kept, tier.cadence]


def _cost_text(name: str, value: float) -> str:
    return f"state {size_text(int(value))}" if name == "state_bytes" else f"{name} {_round(value)}"


def _round(value: float) -> str:
    """Three digits that mean something, and no powers of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
