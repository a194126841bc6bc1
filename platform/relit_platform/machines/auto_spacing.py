"""`auto`: how far apart saves to disk and object tier lie best, from what the run has shown. Pure.

    ended      rows of completed steps                  step time, time trained
    saved      a step is committed on disk              what a save costs, and how long it takes
    uploaded   a step is in the object tier             the same
    failed     the run went on after a failure          how often failures of each kind come
    remember   what the run directory knows
    revise     asked after a commit or a failure        a new spacing, or none, and why

The spacing is that of optimum.py (two tiers; its sources are named there), fed with costs as
save_costs.py measures them, rates as failure_rates.py estimates them, and the longest of the newest
saves, for saving has to keep up when the disk is slow. It is bounded above by `max_s` and below by
what saving can keep up with. It is set anew when that of a tier would change by more than
DEAD_BAND, and not before REVISE_S have passed: numbers that waver do not make it waver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from relit_platform.machines.failure_rates import DAY_S, KINDS, Kind, rates
from relit_platform.machines.optimum import Spacing, TierCosts, optimum, two_tiers
from relit_platform.machines.save_costs import (
    Ended,
    Sample,
    Span,
    apart,
    cost_s,
    plain_step_s,
    sample,
    steps_of,
)

ENOUGH_SAVES = 3
ENDS_KEPT = 4096
SAVES_KEPT = 16
NEWEST = 5  # of which the longest counts as the time that a save takes
DEAD_BAND = 0.2
REVISE_S = 30.0
# What cannot be told from noise costs something all the same: with optimum.MOST_OF_TIME this
# keeps a tier from saving more than half of the time.
HIDDEN = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the configuration asks for. disk, object: whose spacing is automatic. memory: that tier
    is on; else its failures are the disk's. max_s: seconds between two saves at the most.
    """

    disk: bool
    object: bool
    memory: bool
    max_s: float
    mtbf_s: float


class Save(NamedTuple):
    """A step that was committed on disk, so many seconds after its boundary."""

    step: int
    generation: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the run has shown, the newest of it.

    unsampled: saves whose steps have not all been told. saves: the others, by rank 0's clock, with
    what they did to the steps. disk_s, object_s: the spacing in force, 0 while there is none.
    changed_s: since when, by the manager's clock. reason: why it is this one.
    """

    ends: tuple[Ended, ...] = ()
    unsampled: tuple[Save, ...] = ()
    saves: tuple[tuple[Span, Sample], ...] = ()
    uploads: tuple[Span, ...] = ()
    failures: Mapping[Kind, int] = field(default_factory=dict)
    trained_s: float = 0.0
    disk_s: float = 0.0
    object_s: float = 0.0
    changed_s: float = -math.inf
    reason: str = ""


class _Measured(NamedTuple):
    """step_s: a plain step. save_s: what a save costs the loop. near, far: of disk and object
    tier; far is None before the first upload.
    """

    step_s: float
    save_s: float
    near: TierCosts
    far: TierCosts | None


def ended(seen: Seen, ends: Sequence[Ended]) -> Seen:
    """Steps that are complete and that were not told before, by rising step."""
    trained_s = sum(step.seconds for step in steps_of([*seen.ends[-1:], *ends]))
    kept = (*seen.ends, *ends)[-ENDS_KEPT:]
    return _sampled(replace(seen, ends=kept, trained_s=seen.trained_s + trained_s))


def saved(seen: Seen, save: Save) -> Seen:
    """A step is committed on disk; its row, and those of the steps after it, may come later."""
    return _sampled(replace(seen, unsampled=(*seen.unsampled, save)[-SAVES_KEPT:]))


def uploaded(seen: Seen, upload: Span) -> Seen:
    """A step is committed in the object tier; upload: since it was chosen to go there."""
    return replace(seen, uploads=(*seen.uploads, upload)[-SAVES_KEPT:])


def failed(seen: Seen, kind: Kind) -> Seen:
    """The run went on after a failure of this kind."""
    return replace(seen, failures={**seen.failures, kind: seen.failures.get(kind, 0) + 1})


def remember(
    seen: Seen,
    *,
    failures: Mapping[Any, int],
    trained_s: float,
    disk_s: float = 0.0,
    object_s: float = 0.0,
    reason: str = "",
) -> Seen:
    """What the run directory knows. The spacing is taken over by a manager that has none."""
    merged = {kind: max(seen.failures.get(kind, 0), failures.get(kind, 0)) for kind in KINDS}
    seen = replace(seen, failures=merged, trained_s=max(seen.trained_s, trained_s))
    if seen.disk_s or seen.object_s:
        return seen
    return replace(seen, disk_s=disk_s, object_s=object_s, reason=reason)


def revise(asked: Asked, seen: Seen, now_s: float) -> tuple[Seen, dict[str, Any] | None]:
    """The spacing that is due now and, if it is a new one, what its event says.

    now_s: one clock in all calls. None too while too little is known, or too soon.
    """
    soon = now_s - seen.changed_s < REVISE_S
    found = None if soon or len(seen.saves) < ENOUGH_SAVES else _measured(asked, seen)
    if found is None:
        return seen, None
    disk, outward = _spacings(asked, found)
    reasons = [
        f"{tier} every {spacing.every_s:.3g} s{_before(was_s)}: {spacing.reason}"
        for tier, spacing, was_s in (
            ("disk", disk, seen.disk_s),
            ("object", outward, seen.object_s),
        )
        if spacing is not None and _differs(spacing.every_s, was_s)
    ]
    if not reasons:
        return seen, None
    changed = replace(
        seen,
        disk_s=disk.every_s if disk else 0.0,
        object_s=outward.every_s if outward else seen.object_s,
        changed_s=now_s,
        reason="; ".join(reasons),
    )
    return changed, _told(seen, changed, found)


def _sampled(seen: Seen) -> Seen:
    """Look at the saves whose steps are all known by now; forget those that never will be."""
    if not seen.unsampled or not seen.ends:
        return seen
    newest = seen.ends[-1]
    at_s = {end[:2]: end.at_s for end in seen.ends}
    waiting: list[Save] = []
    found: list[tuple[Span, Sample]] = []
    for save in seen.unsampled:
        begin_s = at_s.get(save[:2])
        if begin_s is None:
            if (save.generation, save.step) > (newest.generation, newest.step):
                waiting.append(save)
            continue
        span = Span(begin_s, begin_s + save.seconds)
        if newest.at_s < span.end_s and newest.generation == save.generation:
            waiting.append(save)
        elif taken := sample(steps_of(seen.ends), span):
            found.append((span, taken))
    saves = (*seen.saves, *found)[-SAVES_KEPT:]
    return replace(seen, unsampled=tuple(waiting), saves=saves)


def _measured(asked: Asked, seen: Seen) -> _Measured | None:
    """How long a restart takes is the same for every spacing, so it is left out."""
    spans, steps = [span for span, _ in seen.saves], steps_of(seen.ends)
    step_s = plain_step_s(steps, [*spans, *seen.uploads])
    if step_s is None:
        return None
    by_kind = rates(asked.mtbf_s, seen.failures, seen.trained_s)
    save_s = cost_s([taken for _, taken in seen.saves], step_s) or 0.0
    takes_s = max(span.seconds for span in spans[-NEWEST:])
    near = TierCosts(
        save_s=max(save_s, HIDDEN * takes_s),
        durable_s=takes_s,
        restore_s=0.0,
        rate=by_kind["disk"] + (0.0 if asked.memory else by_kind["memory"]),
    )
    if not seen.uploads:
        return _Measured(step_s, save_s, near, None)
    quiet = apart(steps, spans)
    samples = [taken for upload in seen.uploads if (taken := sample(quiet, upload))]
    upload_s = max(upload.seconds for upload in seen.uploads[-NEWEST:])
    far = TierCosts(
        save_s=max(cost_s(samples, step_s) or 0.0, HIDDEN * upload_s),
        durable_s=takes_s + upload_s,
        restore_s=0.0,
        rate=by_kind["object"],
    )
    return _Measured(step_s, save_s, near, far)


def _spacings(asked: Asked, found: _Measured) -> tuple[Spacing | None, Spacing | None]:
    """None for a tier whose spacing is not automatic, or not known yet."""
    near, far, step_s = found.near, found.far, found.step_s
    if asked.disk and asked.object and far is not None:
        return two_tiers(near, far, step_s, asked.max_s)
    disk = optimum(near, step_s, asked.max_s) if asked.disk else None
    outward = optimum(far, step_s, asked.max_s) if asked.object and far is not None else None
    return disk, outward


def _differs(found_s: float, was_s: float) -> bool:
    return not was_s or abs(found_s / was_s - 1) > DEAD_BAND


def _before(was_s: float) -> str:
    return f", {was_s:.3g} s before" if was_s else ""


def _told(seen: Seen, changed: Seen, found: _Measured) -> dict[str, Any]:
    """Plain JSON: the reason, the spacing, and the numbers that it was made of."""
    near, far = found.near, found.far
    numbers = {
        "disk_every_s": changed.disk_s or None,
        "object_every_s": changed.object_s or None,
        "step_s": found.step_s,
        "save_s": found.save_s,
        "disk_s": near.durable_s,
        "upload_s": far.durable_s - near.durable_s if far else None,
        "disk_failures_per_day": near.rate * DAY_S,
        "object_failures_per_day": far.rate * DAY_S if far else None,
        "trained_s": seen.trained_s,
    }
    rounded = {name: float(f"{value:.6g}") for name, value in numbers.items() if value is not None}
    return {"reason": changed.reason, **rounded, "failures": dict(seen.failures)}
