"""What a spacing of checkpoints costs, and which spacing costs least. Pure; seconds throughout.

Of each tier: d, by which a save delays the loop; L, from the boundary until the save counts; R,
from a fault until training goes on; rate, of the failures for which this tier is the nearest one
that survives them. With a spacing tau the share of time that is lost is, to first order,

    H = sum over tiers of  d / tau  +  rate * (tau / 2 + L + R)

    saving: d / tau    redone work: rate * (tau / 2 + L)    restarts: rate * R

L is lost work too: whatever is trained until a save counts is done again. Tiers are independent to
this order, so each has its own optimum (two-level schemes: Vaidya, "A case for two-level recovery
schemes", IEEE Trans. Computers 47(6), 1998; Di, Robert, Vivien, Cappello, "Toward an optimal
online checkpoint solution under a two-level HPC checkpoint model", IEEE TPDS 28(1), 2017). That
of one tier, with M = 1 / rate, is Young's sqrt(2 d M) (CACM 17(9), 1974) in the higher order of
Daly:

    tau = sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d   for d < 2M, else M
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_OF_TIME = 0.01  # a tier may cost this share of the time, however often things fail
LONGEST_S = 86400.0  # a failure that was never seen may still come


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCosts:
    """Seconds, and failures a second; see the module."""

    save_s: float
    durable_s: float
    restore_s: float
    rate: float


@dataclass(frozen=True, slots=True)
class Loss:
    """Shares of the time that are lost: 0.01 is one hundredth."""

    saving: float
    redone: float
    restarts: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.saving + self.redone + self.restarts

    def plus(self, other: Loss) -> Loss:
        """Of two tiers together."""
        return Loss(
            self.saving + other.saving, self.redone + other.redone, self.restarts + other.restarts
        )


@dataclass(frozen=True, slots=True)
class Spacing:
    """A tier's best spacing: seconds, whole steps (at least one), and why it is this one."""

    every_s: float
    every_steps: int
    reason: str


def loss(costs: TierCosts, every_s: float) -> Loss:
    """What this tier loses when it saves every `every_s` > 0 seconds."""
    return Loss(
        saving=costs.save_s / every_s,
        redone=costs.rate * (every_s / 2 + costs.durable_s),
        restarts=costs.rate * costs.restore_s,
    )


def daly(save_s: float, mtbf_s: float) -> float:
    """The spacing between saves that loses least, in seconds of training."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    part = save_s / (2 * mtbf_s)
    whole = math.sqrt(2 * save_s * mtbf_s)
    return whole * (1 + math.sqrt(part) / 3 + part / 9) - save_s


def optimum(costs: TierCosts, step_s: float, most_s: float = LONGEST_S) -> Spacing:
    """The spacing that loses least, within what is possible and wanted.

    At least so long that saving costs MOST_OF_TIME; at most `most_s`, which is how much may be lost
    at once; and, whatever is wanted, at least a step and the time until a save counts, for one is
    on its way at a time.
    """
    save_s, durable_s = costs.save_s, costs.durable_s
    mtbf_s = 1 / costs.rate if costs.rate > 0 else math.inf
    if math.isfinite(mtbf_s):
        best_s = daly(save_s, mtbf_s)
        often = f"a failure of its kind comes in {mtbf_s / 3600:.3g} h"
        reason = f"a save costs {save_s:.3g} s, {often}"
    else:
        best_s, reason = most_s, "no failure of this kind is expected"
    share = f"a save costs {save_s:.3g} s, saving may cost {MOST_OF_TIME:.0%} of the time"
    best_s, reason = max((best_s, reason), (save_s / MOST_OF_TIME, share), key=_seconds)
    most = f"not more than {most_s:.6g} s may be lost at once"
    best_s, reason = min((best_s, reason), (most_s, most), key=_seconds)
    counts = f"a save takes {durable_s:.3g} s until it counts"
    least = f"a step, {step_s:.3g} s, is the least"
    best_s, reason = max((best_s, reason), (durable_s, counts), (step_s, least), key=_seconds)
    return Spacing(best_s, max(1, round(best_s / step_s)), reason)


def _seconds(candidate: tuple[float, str]) -> float:
    return candidate[0]


def two_tiers(
    near: TierCosts, far: TierCosts, step_s: float, most_s: float = LONGEST_S
) -> tuple[Spacing, Spacing]:
    """`auto`: the optimum of both tiers. The far one saves what the near one has saved, so its
    spacing is a multiple of the near one's.
    """
    first = optimum(near, step_s, most_s)
    alone = optimum(far, step_s, most_s)
    wanted = min(round(alone.every_steps / first.every_steps), int(most_s // first.every_s))
    times = max(1, wanted, math.ceil(far.durable_s / first.every_s))
    each = "each save" if times == 1 else f"every {times} saves"
    reason = f"{alone.reason}; {each} of the nearer tier"
    return first, Spacing(first.every_s * times, first.every_steps * times, reason)
