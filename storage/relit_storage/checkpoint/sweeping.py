"""Giving up steps of the object tier by hand: what may go, and taking it away.

    retired        the log says that its files are gone, and some are still there
    superseded     a later generation committed the same step again
    never committed   an upload that was cut off, older than the newest commit
    old            commits beyond the newest N, where the caller names an N

Only for a run that nobody drives: the caller holds its lease. The log says first that a step is
given up, so that a reader never finds half of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.checkpoint.log_records import LogView
from relit_storage.checkpoint.retention import Keep, StepOnTier, plan_retention
from relit_storage.run.layout import STEPS_PREFIX, manifest_key, parse_step_prefix
from relit_storage.stores.protocol import ObjectStore

Place = tuple[int, int]  # step, generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """A step's files that may go. in_log: its commit is in force and must be retired first."""

    step: int
    generation: int
    reason: str
    in_log: bool
    keys: tuple[str, ...]
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "step": self.step,
            "generation": self.generation,
            "reason": self.reason,
            "files": len(self.keys),
            "bytes": self.num_bytes,
        }


def plan_sweep(
    store: ObjectStore,
    view: LogView,
    *,
    keep: int | None,
    spared: Collection[Place],
    pins: Collection[int],
) -> tuple[Garbage, ...]:
    """What may go, oldest first; nothing of `spared`, and no commit in force of a pinned step.

    keep is how many of the newest commits stay, None for all. One listing and a look at the size
    of each file. StoreError.
    """
    files = _files(store)
    reasons: dict[Place, str] = {}
    for record in view.retired:
        if record.identity in files:
            reasons[record.identity] = "retired, and not yet deleted"
    for record in view.superseded:
        reasons[record.identity] = "a later generation committed this step again"
    commits = {record.identity for record in view.commits}
    tier = [
        StepOnTier(step, generation, (step, generation) in commits)
        for step, generation in sorted(commits | (files.keys() - reasons.keys()))
    ]
    plan = plan_retention(
        tier, Keep(newest=len(commits) if keep is None else keep), protected=spared, pinned=pins
    )
    reasons |= {(gone.step, gone.generation): why for gone, why in plan.dropped}
    in_log = commits | {record.identity for record in view.superseded}
    chosen = sorted(reasons.keys() - set(spared), key=lambda place: (place[1], place[0]))
    return tuple(
        garbage_of(store, place, reasons[place], place in in_log, files.get(place, ()))
        for place in chosen
    )


def garbage_of(
    store: ObjectStore, place: Place, reason: str, in_log: bool, keys: Sequence[str]
) -> Garbage:
    """The files of one step as garbage; looks at each one's size. StoreError."""
    return Garbage(
        step=place[0],
        generation=place[1],
        reason=reason,
        in_log=in_log,
        keys=tuple(keys),
        num_bytes=sum(store.size(key) or 0 for key in keys),
    )


def give_up(
    store: ObjectStore, log: CommitLog, garbage: Garbage, *, epoch: int, at_s: float
) -> None:
    """Retire a step in the log if it is in force, then delete its files; repeatable.

    epoch is that of the lease which the caller holds. FencedError if a newer one has taken over,
    RetentionError for the newest commit; then nothing was deleted. StoreError.
    """
    if garbage.in_log:
        log.append_retire(epoch=epoch, generation=garbage.generation, step=garbage.step, at_s=at_s)
    first = manifest_key(garbage.step, garbage.generation)
    for key in sorted(garbage.keys, key=lambda key: (key != first, key)):
        store.delete(key)


def files_of(store: ObjectStore, place: Place) -> tuple[str, ...]:
    """Keys of everything that lies in one step's folder. StoreError."""
    return _files(store).get(place, ())


def _files(store: ObjectStore) -> Mapping[Place, tuple[str, ...]]:
    found: dict[Place, list[str]] = {}
    for key in store.list(STEPS_PREFIX):
        place = parse_step_prefix(key)
        if place is not None:
            found.setdefault(place, []).append(key)
    return {place: tuple(keys) for place, keys in found.items()}
