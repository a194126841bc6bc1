"""What the checkpoint machine lets go of, once the pins are known: retention on each tier.

Steps of the surviving line are judged by the policy of their tier. What is off the line goes as
soon as a newer generation has a commit on that tier, not before: when a run had to go back
because its newest checkpoint was refused, that checkpoint is evidence, and may be all there is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relit_platform.facts import Tier
from relit_platform.machines.checkpoint_state import (
    TERMINAL,
    Checkpoint,
    CheckpointAction,
    CheckpointBook,
    CheckpointPhase,
    Discard,
    Key,
    Note,
    Outcome,
)
from relit_storage.checkpoint.retention import Keep, StepOnTier, plan_retention

TIERS: tuple[Tier, ...] = ("disk", "object")


def retained(book: CheckpointBook, pinned: frozenset[int]) -> Outcome:
    """The book without what no tier has to keep, and the deletions. Steps that still have to be
    uploaded stay on disk. Nothing goes during a restore: which step it takes is not known yet.
    """
    if book.restoring:
        return book, []
    actions: list[CheckpointAction] = []
    for tier in TIERS:
        book, more = _off_the_line(book, tier, pinned)
        actions += more
        book, more = _by_policy(book, tier, pinned)
        actions += more
    book, more = _halves(book, pinned)
    return book, actions + more


def discards(known: Checkpoint, reason: str) -> list[CheckpointAction]:
    """Delete it from every tier that holds something of it."""
    actions: list[CheckpointAction] = []
    if known.shards:
        actions.append(discard(known.key, "disk", known.nodes, reason))
    if known.on_object:
        actions.append(discard(known.key, "object", (), reason))
    return actions


def discard(key: Key, tier: Tier, nodes: tuple[str, ...], reason: str) -> Discard:
    """Delete one step from one tier."""
    return Discard(step=key[0], generation=key[1], tier=tier, nodes=nodes, reason=reason)


def _off_the_line(book: CheckpointBook, tier: Tier, pinned: frozenset[int]) -> Outcome:
    committed = [c.generation for c in book.on_line() if c.on_tier(tier)]
    newest = max(committed, default=0)
    actions: list[CheckpointAction] = []
    for known in list(book.steps.values()):
        cut = book.lineage.cut_by(known.generation, known.step)
        safe = known.key in book.protected or known.step in pinned
        if cut is None or safe or not known.on_tier(tier) or newest <= known.generation:
            continue
        reason = f"generation {cut[0]} went back to step {cut[1]}, and has a commit of its own"
        book = _gone(book, known, tier, reason)
        actions.append(discard(known.key, tier, known.nodes, reason))
    return book, actions


def _by_policy(book: CheckpointBook, tier: Tier, pinned: frozenset[int]) -> Outcome:
    here = [c for c in book.on_line() if c.on_tier(tier)]
    if not here:
        return book, []
    on_disk = tier == "disk"
    busy = {c.key for c in here if c.wants_object or c.phase is CheckpointPhase.UPLOADING}
    keep = _with_forecast(book.limits.keep_disk if on_disk else book.limits.keep_object, here)
    plan = plan_retention(
        [_as_held(book, c, keep) for c in here],
        keep,
        protected=book.protected | (busy if on_disk else frozenset()),
        pinned=pinned,
    )
    actions: list[CheckpointAction] = []
    for step, reason in plan.dropped:
        known = book.steps[step.step, step.generation]
        book = _gone(book, known, tier, reason)
        actions.append(discard(known.key, tier, known.nodes, reason))
    if plan.short_bytes:
        actions.append(_over_cap(here[-1], tier, keep, plan.forecast_bytes))
    return book, actions


def _halves(book: CheckpointBook, pinned: frozenset[int]) -> Outcome:
    """What waits for nodes that are away goes once every step that is kept is newer, and there are
    as many of these as shall be.
    """
    kept = [c.step for c in book.on_line() if c.on_disk]
    if len(kept) < max(1, book.limits.keep_disk.newest):
        return book, []
    actions: list[CheckpointAction] = []
    for known in list(book.steps.values()):
        wanted = known.key in book.protected or known.step in pinned
        if known.waits_for_nodes and not wanted and known.step < min(kept):
            reason = "older than all that is kept, and not whole on the nodes that are here"
            left = replace(known, published=False, phase=CheckpointPhase.EXPIRED, reason=reason)
            book = book.having(left)
            actions.append(discard(known.key, "disk", known.nodes, reason))
    return book, actions


def _with_forecast(keep: Keep, here: list[Checkpoint]) -> Keep:
    """The next step takes as much as the largest of those here."""
    if not keep.max_bytes:
        return keep
    return replace(keep, next_bytes=max(c.num_bytes for c in here))


def _as_held(book: CheckpointBook, known: Checkpoint, keep: Keep) -> StepOnTier:
    """A step whose size nobody knows any more counts as much as the next one will."""
    return StepOnTier(
        known.step,
        known.generation,
        committed=True,
        num_bytes=known.num_bytes or keep.next_bytes,
        metric=book.metrics.get(known.step),
    )


def _gone(book: CheckpointBook, known: Checkpoint, tier: Tier, reason: str) -> CheckpointBook:
    left = replace(known, on_disk=False) if tier == "disk" else replace(known, on_object=False)
    if not left.on_disk and not left.on_object and left.phase not in TERMINAL:
        left = replace(left, phase=CheckpointPhase.EXPIRED, reason=reason)
    return book.having(left)


def _over_cap(newest: Checkpoint, tier: Tier, keep: Keep, forecast_bytes: int) -> Note:
    data: dict[str, Any] = {
        "tier": tier,
        "max_bytes": keep.max_bytes,
        "forecast_bytes": forecast_bytes,
        "reason": "the newest, pinned and used steps and the next one take more than the cap",
    }
    return Note(
        kind="ckpt.over_cap",
        step=newest.step,
        generation=newest.generation,
        data=data,
        level="warning",
    )
