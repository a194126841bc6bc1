"""Choosing what to restore, pure: the newest whole step, from the nearest tier.

Candidates are taken newest step first, and of one step memory before disk before object. Whatever
is passed over leaves a refusal with its reason. In this version a step is read from one place:
memory and disk count only if all of it lies on the single node where every rank will run.

`Nothing` means that this run never had a checkpoint. If it had one and none is whole any more,
NotRestorableError is raised: relit never starts from scratch in silence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from relit_platform.facts import (
    NodeInventory,
    RestorePlan,
    ShardPersisted,
    ShardSource,
    SlotInfo,
    Tier,
)
from relit_platform.machines.lineage import Lineage
from relit_storage.checkpoint.image import MAX_REASON
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.errors import ManifestError, NotRestorableError
from relit_storage.run.layout import manifest_key

NEARNESS: dict[Tier, int] = {"memory": 0, "disk": 1, "object": 2}
MAX_REFUSALS = 64

Refusal = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectCommit:
    """A commit of the object tier's log. manifest None: it could not be read, problem says why.

    generation 0: a slot of the log that cannot be read, and may have been a commit of any step.
    """

    step: int
    generation: int
    manifest: Manifest | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Nothing:
    """No tier ever held a checkpoint of this run: start at step 0."""

    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A step on a tier; problem: why it cannot be used, else shards are complete."""

    tier: Tier
    step: int
    generation: int
    world: int
    shards: tuple[ShardSource, ...] = ()
    file: str = ""
    problem: str = ""


def plan_restore(
    inventories: Sequence[NodeInventory],
    object_commits: Sequence[ObjectCommit],
    lineage: Lineage,
    excluded: Iterable[Refusal],
    world_nodes: Collection[str],
    run_id: str = "",
) -> RestorePlan | Nothing:
    """The plan, or Nothing. excluded: files that a rank has refused (tier, step, generation).

    Raises NotRestorableError with every refusal if checkpoints exist but none is whole.
    """
    refused = {(r.get("tier"), r.get("step"), r.get("generation")): r for r in excluded}
    memory = list(_memory(inventories, world_nodes))
    found = [*memory, *_disk(inventories, world_nodes, run_id), *_object(object_commits, run_id)]
    found.sort(key=lambda c: (-c.step, NEARNESS[c.tier], -c.generation))
    refusals: list[Refusal] = [dict(r) for inventory in inventories for r in inventory.refusals]
    for candidate in found:
        problem = candidate.problem or _cut_off(candidate, lineage)
        said = refused.get((candidate.tier, candidate.step, candidate.generation))
        if said is not None:
            candidate = replace(candidate, file=str(said.get("file", "")))
            problem = str(said.get("reason", "refused by a rank"))
        if not problem:
            return RestorePlan(
                step=candidate.step,
                generation=candidate.generation,
                world=candidate.world,
                tier=candidate.tier,
                shards=candidate.shards,
                refusals=tuple(refusals[:MAX_REFUSALS]),
            )
        refusals.append(_refusal(candidate, problem))
    if _never_had_one(found, inventories, lineage, refused):
        return Nothing(tuple(refusals[:MAX_REFUSALS]))
    there = {(c.tier, c.step, c.generation) for c in found}
    refusals += [dict(r) for key, r in refused.items() if key not in there]  # deleted since
    raise NotRestorableError(run=run_id, refusals=[_sentence(r) for r in refusals[:MAX_REFUSALS]])


def _never_had_one(
    found: Sequence[_Candidate],
    inventories: Sequence[NodeInventory],
    lineage: Lineage,
    refused: Mapping[Any, Refusal],
) -> bool:
    """True if all that is there can be the start of a first snapshot that nobody completed.

    Ranks are in step: whoever holds a second step was there when the first one was whole.
    """
    if refused or lineage.newest_start > 0:
        return False
    if any(c.tier != "memory" for c in found) or any(i.refusals for i in inventories):
        return False
    return len({(c.step, c.generation) for c in found}) <= 1


def _cut_off(candidate: _Candidate, lineage: Lineage) -> str:
    cut = lineage.cut_by(candidate.generation, candidate.step)
    return "" if cut is None else f"off the line: generation {cut[0]} went back to step {cut[1]}"


def _memory(inventories: Sequence[NodeInventory], nodes: Collection[str]) -> Iterable[_Candidate]:
    slots: dict[tuple[int, int, int], dict[int, SlotInfo]] = defaultdict(dict)
    for inventory in inventories:
        for slot in inventory.memory:
            slots[slot.step, slot.generation, slot.world].setdefault(slot.rank, slot)
    for (step, generation, world), by_rank in slots.items():
        candidate = _Candidate(tier="memory", step=step, generation=generation, world=world)
        missing = sorted(set(range(world)) - set(by_rank))
        places = {slot.node_id for slot in by_rank.values()}
        if missing:
            yield replace(candidate, problem=f"no slot of ranks {missing}")
        elif problem := _elsewhere(places, nodes):
            yield replace(candidate, problem=problem)
        else:
            yield replace(candidate, shards=tuple(_slot_source(by_rank[r]) for r in range(world)))


def _slot_source(slot: SlotInfo) -> ShardSource:
    return ShardSource(
        rank=slot.rank,
        tier="memory",
        node_id=slot.node_id,
        location=slot.path,
        extras_location="",
        num_bytes=slot.image_bytes,
        chunk_bytes=0,
        checksums=(),
        extras_bytes=0,
        extras_checksum="",
    )


def _disk(
    inventories: Sequence[NodeInventory], nodes: Collection[str], run_id: str
) -> Iterable[_Candidate]:
    for inventory in inventories:
        here = {(s.step, s.generation, s.rank): s for s in inventory.disk}
        for step, generation, raw in inventory.manifests:
            file = manifest_key(step, generation)
            candidate = _Candidate(
                tier="disk", step=step, generation=generation, world=0, file=file
            )
            try:
                manifest = Manifest.from_bytes(raw, file)
            except ManifestError as error:
                yield replace(candidate, problem=error.reason)
                continue
            candidate = replace(candidate, world=manifest.world)
            file, problem = _missing_shard(manifest, here)
            problem = _of_another_run(manifest, run_id) or problem
            problem = problem or _elsewhere({inventory.node_id}, nodes)
            if problem:
                yield replace(candidate, file=file or candidate.file, problem=problem)
            else:
                yield replace(candidate, shards=_entries(manifest, "disk", inventory))


def _missing_shard(
    manifest: Manifest, here: Mapping[tuple[int, int, int], ShardPersisted]
) -> tuple[str, str]:
    for entry in manifest.shards:
        shard = here.get((manifest.step, manifest.generation, entry.rank))
        if shard is None:
            return entry.file, "has no record on this node"
        if shard.num_bytes != entry.num_bytes:
            return entry.file, f"has {shard.num_bytes} bytes, the manifest says {entry.num_bytes}"
    return "", ""


def _object(commits: Sequence[ObjectCommit], run_id: str) -> Iterable[_Candidate]:
    for commit in commits:
        candidate = _Candidate(
            tier="object",
            step=commit.step,
            generation=commit.generation,
            world=commit.manifest.world if commit.manifest else 0,
            file=manifest_key(commit.step, commit.generation),
        )
        if commit.manifest is None:
            yield replace(candidate, problem=commit.problem or "manifest cannot be read")
        elif problem := _of_another_run(commit.manifest, run_id):
            yield replace(candidate, problem=problem)
        else:
            yield replace(candidate, shards=_entries(commit.manifest, "object", None))


def _entries(
    manifest: Manifest, tier: Tier, inventory: NodeInventory | None
) -> tuple[ShardSource, ...]:
    root = f"{inventory.disk_root}/" if inventory and inventory.disk_root else ""
    return tuple(
        ShardSource(
            rank=entry.rank,
            tier=tier,
            node_id=inventory.node_id if inventory else "",
            location=root + entry.file,
            extras_location=root + entry.extras_file,
            num_bytes=entry.num_bytes,
            chunk_bytes=entry.chunk_bytes,
            checksums=tuple(entry.checksums),
            extras_bytes=entry.extras_bytes,
            extras_checksum=entry.extras_checksum,
        )
        for entry in manifest.shards
    )


def _of_another_run(manifest: Manifest, run_id: str) -> str:
    if run_id in ("", manifest.run_id):
        return ""
    return f"is a checkpoint of run {manifest.run_id!r}"[:MAX_REASON]


def _elsewhere(places: Collection[str], nodes: Collection[str]) -> str:
    if set(places) == set(nodes) and len(places) == 1:
        return ""
    return f"lies on {sorted(places)}, the ranks run on {sorted(nodes)}"


def _refusal(candidate: _Candidate, problem: str) -> Refusal:
    return {
        "tier": candidate.tier,
        "step": candidate.step,
        "generation": candidate.generation,
        "file": candidate.file,
        "reason": problem,
    }


def _sentence(refusal: Refusal) -> str:
    where = f"{refusal.get('tier', '?')} step {refusal.get('step', '?')}"
    return f"{where} {refusal.get('file', '')}: {refusal.get('reason', '')}"
