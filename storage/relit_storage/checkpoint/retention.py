"""Which steps of a tier stay, which go, and why. Pure: others delete.

    a committed step stays     while it is one of the newest N
                               for ever, as the first at or after each multiple of k
                               while it is one of the best by a metric
    whatever is said           it stays when it is the newest committed, pinned, or being restored
    a cap in bytes             lets go of the oldest first, of the best by the metric last
    an uncommitted step        goes once a newer one is committed: until then it may be on its way

Steps are ordered by (generation, step), not by step: after a rollback an older generation may
have left a higher step. What is off the surviving line is not for retention to judge: a caller
passes the steps of one line.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Order = tuple[int, int]  # (generation, step)


@dataclass(frozen=True, slots=True)
class StepOnTier:
    """One step as a tier holds it; committed: its manifest is published there.

    num_bytes: what it takes there, 0 if unknown. metric: the value it is judged by, if any.
    """

    step: int
    generation: int
    committed: bool
    num_bytes: int = 0
    metric: float | None = None

    @property
    def order(self) -> Order:
        """Newer steps compare greater."""
        return self.generation, self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What a tier keeps. newest: at least 1 counts. every_steps, best, max_bytes: 0 is off.

    mode says which metric is better. next_bytes: what the next step will take, so that the cap
    holds while it is written too.
    """

    newest: int = 1
    every_steps: int = 0
    best: int = 0
    mode: Literal["min", "max"] = "min"
    max_bytes: int = 0
    next_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Retention:
    """kept and dropped: oldest first, each step with the reason. num_bytes: of what is kept.

    forecast_bytes: that, and the next step. short_bytes: by how much the cap is too small for
    what may not go; 0 where it holds.
    """

    kept: tuple[tuple[StepOnTier, str], ...]
    dropped: tuple[tuple[StepOnTier, str], ...]
    num_bytes: int
    forecast_bytes: int
    short_bytes: int


def plan_retention(
    steps: Iterable[StepOnTier],
    keep: Keep,
    *,
    protected: Collection[tuple[int, int]] = (),
    pinned: Collection[int] = (),
) -> Retention:
    """What stays and what goes. protected: (step, generation) of steps in use; pinned: steps.

    Total and deterministic: the order of `steps` does not matter.
    """
    ordered = sorted(steps, key=lambda s: s.order)
    committed = [s for s in ordered if s.committed]
    fixed = _fixed(ordered, committed, protected, pinned)
    wanted = {**_newest(committed, keep), **_every(committed, keep), **_best(committed, keep)}
    newest = committed[-1] if committed else None
    gone: dict[Order, str] = {}
    for step in ordered:
        if step.order in fixed or step.order in wanted:
            continue
        if step.committed:
            gone[step.order] = _unwanted(keep)
        elif newest is not None and step.order < newest.order:
            gone[step.order] = f"never committed, and step {newest.step} is"
    gone.update(_over_the_cap(ordered, keep, gone, fixed))
    reasons = {**wanted, **fixed}
    kept = [s for s in ordered if s.order not in gone]
    num_bytes = sum(s.num_bytes for s in kept)
    forecast = num_bytes + keep.next_bytes
    return Retention(
        kept=tuple((s, reasons.get(s.order, "may still be on its way")) for s in kept),
        dropped=tuple((s, gone[s.order]) for s in ordered if s.order in gone),
        num_bytes=num_bytes,
        forecast_bytes=forecast,
        short_bytes=max(0, forecast - keep.max_bytes) if keep.max_bytes else 0,
    )


def _fixed(
    ordered: Sequence[StepOnTier],
    committed: Sequence[StepOnTier],
    protected: Collection[tuple[int, int]],
    pinned: Collection[int],
) -> dict[Order, str]:
    """What stays whatever the policy says."""
    fixed: dict[Order, str] = {}
    for step in ordered:
        if (step.step, step.generation) in protected:
            fixed[step.order] = "in use"
        elif step.step in pinned and step.committed:
            fixed[step.order] = "pinned"
    if committed:
        fixed[committed[-1].order] = "the newest committed"
    return fixed


def _newest(committed: Sequence[StepOnTier], keep: Keep) -> dict[Order, str]:
    newest = max(1, keep.newest)
    return {s.order: f"one of the newest {newest}" for s in committed[-newest:]}


def _every(committed: Sequence[StepOnTier], keep: Keep) -> dict[Order, str]:
    """The first step in each stretch of k steps: with k a multiple of the cadence, each k-th."""
    if keep.every_steps <= 0:
        return {}
    first: dict[int, StepOnTier] = {}
    for step in committed:
        stretch = step.step // keep.every_steps
        if stretch > 0 and (stretch not in first or step.step < first[stretch].step):
            first[stretch] = step
    return {s.order: f"the first since step {k * keep.every_steps}" for k, s in first.items()}


def _best(committed: Sequence[StepOnTier], keep: Keep) -> dict[Order, str]:
    """Of equal ones the newer is better; a step without a number is never one of them."""
    ranked = sorted(_measured(committed), key=lambda s: _goodness(s, keep), reverse=True)
    return {s.order: f"one of the best {keep.best}: {s.metric:g}" for s in ranked[: keep.best]}


def _measured(steps: Iterable[StepOnTier]) -> list[StepOnTier]:
    return [s for s in steps if s.metric is not None and not math.isnan(s.metric)]


def _goodness(step: StepOnTier, keep: Keep) -> tuple[float, Order]:
    value = step.metric if step.metric is not None else math.nan
    return (value if keep.mode == "max" else -value, step.order)


def _unwanted(keep: Keep) -> str:
    reason = f"older than the newest {max(1, keep.newest)} committed"
    others = [
        text
        for text, asked in (
            (f"not the first of {keep.every_steps} steps", keep.every_steps > 0),
            (f"not one of the best {keep.best}", keep.best > 0),
        )
        if asked
    ]
    return ", ".join([reason, *others])


def _over_the_cap(
    ordered: Sequence[StepOnTier], keep: Keep, gone: Mapping[Order, str], fixed: Mapping[Order, str]
) -> dict[Order, str]:
    """What goes besides, so that the rest and the next step fit. Unknown sizes count as nothing."""
    if keep.max_bytes <= 0:
        return {}
    left = [s for s in ordered if s.order not in gone]
    over = sum(s.num_bytes for s in left) + keep.next_bytes - keep.max_bytes
    best = _best([s for s in ordered if s.committed], keep)
    free = [s for s in left if s.order not in fixed and s.committed]
    by_age = [s for s in free if s.order not in best]
    worst_first = sorted((s for s in free if s.order in best), key=lambda s: _goodness(s, keep))
    dropped: dict[Order, str] = {}
    for step in [*by_age, *worst_first]:
        if over <= 0:
            break
        dropped[step.order] = f"the tier may hold {keep.max_bytes} bytes"
        over -= step.num_bytes
    return dropped
