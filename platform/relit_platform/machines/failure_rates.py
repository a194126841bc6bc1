"""How often failures come, by what was expected of them and by what was seen. Pure.

A failure's kind is the nearest tier that survives it: "memory", "disk" or "object". Failures of
a kind are taken to come at random at a constant rate. What is expected of that rate is a Gamma
distribution, whose shape is the expected share of the kind, and whose rate parameter the expected
seconds between two failures of whatever kind; so after n failures of the kind in T seconds of
training the mean of the rate is

    (share + n) / (mtbf_s + T)

(the conjugate prior of a Poisson process: Gelman et al., Bayesian Data Analysis, 3rd ed., 2013,
section 2.6). What is expected weighs as much as one failure that was seen: a calm hour proves
little, and failures that come every hour soon speak for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Kind = Literal["memory", "disk", "object"]

KINDS: tuple[Kind, ...] = ("memory", "disk", "object")
SHARES: Mapping[Kind, float] = {"memory": 0.7, "disk": 0.2, "object": 0.1}
DAY_S = 86400.0
# Large fleets report 3.8 to 6.5 failures in 1,000 node-days; here one node is one rank.
NODE_DAYS_PER_FAILURE = 200.0


def expected_mtbf_s(ranks: int, given_s: float = 0.0) -> float:
    """Seconds between two failures of a run of so many ranks: as given, 0: as fleets report."""
    return given_s if given_s > 0 else NODE_DAYS_PER_FAILURE * DAY_S / max(1, ranks)


def kind_of(tier: str) -> Kind:
    """The kind of a failure after which the state came from this tier; a survivor's memory, ""
    in the events, is memory.
    """
    return "disk" if tier == "disk" else "object" if tier == "object" else "memory"


def rates(mtbf_s: float, seen: Mapping[Kind, int], trained_s: float) -> dict[Kind, float]:
    """Failures a second by kind. seen: how many there were in `trained_s` seconds of training."""
    whole_s = mtbf_s + max(0.0, trained_s)
    return {kind: (SHARES[kind] + seen.get(kind, 0)) / whole_s for kind in KINDS}
