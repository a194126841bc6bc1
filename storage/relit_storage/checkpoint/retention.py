"""Which steps of a tier may go. Pure: it decides and says why, others delete.

Steps are ordered by (generation, step), not by step: after a rollback an older generation may
have left a higher step that is off the surviving line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepOnTier:
    """One step as a tier holds it; committed: its manifest is published there."""

    step: int
    generation: int
    committed: bool

    @property
    def order(self) -> tuple[int, int]:
        """Newer steps compare greater."""
        return self.generation, self.step


def plan_expiry(
    steps: Sequence[StepOnTier], keep: int, protected: frozenset[tuple[int, int]]
) -> tuple[tuple[StepOnTier, ...], tuple[str, ...]]:
    """The steps to delete, oldest first, and for each of them the reason.

    The newest `keep` committed steps stay, and at least one. protected holds (step, generation) of
    steps that are being restored. An uncommitted step goes once a newer one is committed: before
    that it may still be on its way.
    """
    committed = sorted((s for s in steps if s.committed), key=lambda s: s.order, reverse=True)
    kept = {s.order for s in committed[: max(1, keep)]}
    newest = committed[0].order if committed else None
    drop, reasons = [], []
    for step in sorted(steps, key=lambda s: s.order):
        if step.order in kept or (step.step, step.generation) in protected:
            continue
        if step.committed:
            reason = f"older than the newest {max(1, keep)} committed"
        elif newest is not None and step.order < newest:
            reason = f"never committed, and step {newest[1]} is"
        else:
            continue
        drop.append(step)
        reasons.append(reason)
    return tuple(drop), tuple(reasons)
