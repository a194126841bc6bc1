"""What a run's checkpoints cost and risk, and what would cost least: the body of `ckpt plan`.

Pure: costs in, numbers out. A failure is survived by the nearest tier that outlives its kind; where
that tier is off, the next farther one has to serve, and where none is on the run begins again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relit.checkpoint_costs import Costs
from relit_platform.machines.cadence import Cadence
from relit_platform.machines.failure_rates import DAY_S
from relit_platform.machines.optimum import Loss, Spacing, TierCosts, loss, two_tiers
from relit_platform.machines.policies import disk_cadence, disk_keep, object_cadence, object_keep
from relit_platform.run_config import CheckpointConfig
from relit_storage.checkpoint.retention import Keep

NOTHING = Loss(0.0, 0.0, 0.0)
TIERS = ("memory", "disk", "object")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """One tier. every_s None: it is off, or nobody can say when it is due. lost_s: trained time
    that a failure of its kind costs, on average. loss: shares of the time. kept_bytes: held when
    it is full; growth_bytes_per_day: of what is kept for ever; short_bytes: above its cap.
    """

    tier: str
    cadence: str
    every_s: float | None
    durable_s: float
    lost_s: float | None
    loss: Loss
    kept: int
    kept_bytes: float
    growth_bytes_per_day: float
    short_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The tiers as configured, and the spacings of disk and object tier that lose least.

    unprotected: failures a second that no tier survives.
    """

    tiers: tuple[TierPlan, ...]
    loss: Loss
    unprotected: float
    best: tuple[Spacing, Spacing]
    best_loss: Loss


def make_plan(
    config: CheckpointConfig,
    costs: Costs,
    most_s: float,
    in_force: Mapping[str, float] | None = None,
) -> Plan:
    """The plan of a configuration. most_s: how much training may be lost at once. in_force: seconds
    by tier, where the run has set its spacing by itself; else `auto` is planned as what is best.
    """
    value = {name: cost.value for name, cost in costs.items()}
    best, best_loss = _best(config, value, most_s)
    chosen = {"disk": best[0].every_s, "object": best[1].every_s, **(in_force or {})}
    auto = {
        tier: chosen[tier]
        for tier, asked in (("disk", config.disk_auto), ("object", config.object_auto))
        if asked
    }
    spacings = _spacings(config, value["step_s"], auto)
    rates, unprotected = _rates(spacings, value)
    priced = {tier: _priced(tier, value, rates[tier]) for tier in TIERS}
    tiers = tuple(_tier(config, tier, spacings[tier], priced[tier], value) for tier in TIERS)
    whole = NOTHING
    for tier in tiers:
        whole = whole.plus(tier.loss)
    return Plan(tiers=tiers, loss=whole, unprotected=unprotected, best=best, best_loss=best_loss)


def _best(
    config: CheckpointConfig, value: Mapping[str, float], most_s: float
) -> tuple[tuple[Spacing, Spacing], Loss]:
    """The spacings of disk and object tier that lose least, and what they lose."""
    step_s = value["step_s"]
    memory_s = config.memory_every_steps * step_s or None
    wanted, _ = _rates({"memory": memory_s, "disk": 1.0, "object": 1.0}, value)
    near, far = (_priced(tier, value, wanted[tier]) for tier in ("disk", "object"))
    best = two_tiers(near, far, step_s, most_s)
    lost = loss(near, best[0].every_s).plus(loss(far, best[1].every_s))
    memory = _priced("memory", value, wanted["memory"])
    return best, lost.plus(loss(memory, memory_s)) if memory_s else lost


def _spacings(
    config: CheckpointConfig, step_s: float, auto: Mapping[str, float]
) -> dict[str, float | None]:
    """Seconds between saves of each tier, once the spacing no longer grows."""
    memory = config.memory_every_steps * step_s or None
    disk = auto.get("disk") or _spacing(disk_cadence(config), step_s)
    outward = auto.get("object") or _spacing(object_cadence(config), step_s)
    if disk and outward:  # only what is on disk goes on
        outward = math.ceil(outward / disk - 1e-9) * disk
    return {"memory": memory, "disk": disk, "object": outward if disk else None}


def _spacing(cadence: Cadence, step_s: float) -> float | None:
    parts = [part for part in (cadence.every_steps * step_s, cadence.every_s) if part]
    return max(step_s, min(parts)) if parts else None


def _rates(
    spacings: Mapping[str, float | None], value: Mapping[str, float]
) -> tuple[dict[str, float], float]:
    """Failures a second that each tier has to serve, and those that none can."""
    whole = 1 / value["mtbf_s"]
    shares = {"disk": value["disk_share"], "object": value["object_share"]}
    shares["memory"] = max(0.0, 1 - sum(shares.values()))
    rates, waiting = {}, 0.0
    for tier in TIERS:
        waiting += whole * shares[tier]
        rates[tier] = waiting if spacings[tier] else 0.0
        waiting = 0.0 if spacings[tier] else waiting
    return rates, waiting


def _priced(tier: str, value: Mapping[str, float], rate: float) -> TierCosts:
    """The object tier reads and sends as much as the disk tier reads and writes."""
    until = {"memory": 0.0, "disk": value["disk_s"], "object": value["disk_s"] + value["upload_s"]}
    save_s = value["copy_s"] if tier == "memory" else value["save_s"]
    return TierCosts(save_s=save_s, durable_s=until[tier], restore_s=value["restore_s"], rate=rate)


def _tier(
    config: CheckpointConfig,
    tier: str,
    every_s: float | None,
    costs: TierCosts,
    value: Mapping[str, float],
) -> TierPlan:
    keep = {"disk": disk_keep(config), "object": object_keep(config)}.get(tier, Keep())
    kept, kept_bytes, growth = _kept(keep, every_s, value)
    forecast = kept_bytes + value["state_bytes"]
    return TierPlan(
        tier=tier,
        cadence=_cadence_text(config, tier),
        every_s=every_s,
        durable_s=costs.durable_s,
        lost_s=every_s / 2 + costs.durable_s if every_s else None,
        loss=loss(costs, every_s) if every_s else NOTHING,
        kept=kept if every_s else 0,
        kept_bytes=kept_bytes if every_s else 0,
        growth_bytes_per_day=growth,
        short_bytes=max(0.0, forecast - keep.max_bytes) if keep.max_bytes and every_s else 0.0,
    )


def _kept(
    keep: Keep, every_s: float | None, value: Mapping[str, float]
) -> tuple[int, float, float]:
    """Steps and bytes that a full tier holds, and how fast that grows. A cap lets it be less."""
    size = value["state_bytes"]
    wanted = max(1, keep.newest) + keep.best
    fits = int(keep.max_bytes // size) - 1 if keep.max_bytes and size else wanted
    kept = max(1, min(wanted, fits))
    for_ever_s = max(keep.every_steps * value["step_s"], every_s or 0.0)
    grows = keep.every_steps and not keep.max_bytes and for_ever_s
    return kept, kept * size, size * DAY_S / for_ever_s if grows else 0.0


def _cadence_text(config: CheckpointConfig, tier: str) -> str:
    if tier == "memory":
        every = config.memory_every_steps
        return "off" if not every else "every step" if every == 1 else f"every {every} steps"
    auto = config.disk_auto if tier == "disk" else config.object_auto
    cadence = disk_cadence(config) if tier == "disk" else object_cadence(config)
    if auto:
        cadence = Cadence(on_metric=cadence.on_metric)
    parts: Sequence[tuple[Any, str]] = (
        (auto, f"auto, at least every {config.auto_max_s:g} s"),
        (cadence.first_steps, f"growing from {cadence.first_steps} steps"),
        (cadence.every_steps, f"every {cadence.every_steps} steps"),
        (cadence.every_s, f"every {cadence.every_s:g} s"),
        (cadence.on_metric, f"each best {config.metric}"),
    )
    return " or ".join(text for asked, text in parts if asked) or "off"
