"""Choosing what to restore, pure: the newest whole step, each shard from the nearest tier.

Candidates are taken newest step first. Of one step memory comes before peer, disk and object, and
each shard is taken from the nearest that has it: those that a lost node held may come from its
peer's memory and the others from the memory of the nodes that are left. What was passed over on
the way leaves a refusal with its reason. A shard counts if every node where a rank will run can
read it: it lies on the only such node, or its node's agent answers those of other nodes.

`Nothing` means that this run never had a checkpoint. If it had one and none is whole any more,
NotRestorableError is raised: relit never starts from scratch in silence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from relit_platform.facts import NodeInventory, RestorePlan, ShardSource, Tier
from relit_platform.machines.lineage import Lineage
from relit_platform.machines.sources import (
    Sources,
    disk_source,
    missing_shard,
    object_source,
    reachable,
    slot_source,
)
from relit_storage.checkpoint.image import MAX_REASON
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.errors import ManifestError, NotRestorableError
from relit_storage.run.layout import manifest_key

NEARNESS: dict[Tier, int] = {"memory": 0, "peer": 1, "disk": 2, "object": 3}
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
    """A step on a tier. sources: by rank, nearest first, those of no use left out; problem: why
    the tier alone does not have all of it.
    """

    tier: Tier
    step: int
    generation: int
    world: int
    sources: Sources = field(default_factory=dict)
    file: str = ""
    problem: str = ""

    @property
    def nearness(self) -> int:
        return NEARNESS[self.tier]


def plan_restore(
    inventories: Sequence[NodeInventory],
    object_commits: Sequence[ObjectCommit],
    lineage: Lineage,
    excluded: Iterable[Refusal],
    world_nodes: Collection[str],
    run_id: str = "",
) -> RestorePlan | Nothing:
    """The plan, or Nothing. excluded: what a rank has refused: a tier's step and generation, if it
    says so only the shard of one rank, or what lies on one node.

    Raises NotRestorableError with every refusal if checkpoints exist but none is whole.
    """
    refused = [dict(refusal) for refusal in excluded]
    nodes = frozenset(world_nodes)
    found = [
        *_in_slots("memory", inventories, nodes),
        *_in_slots("peer", inventories, nodes),
        *_disk(inventories, nodes, run_id),
        *_object(object_commits, run_id),
    ]
    found = [_without(candidate, refused, lineage) for candidate in found]
    found.sort(key=lambda c: (-c.step, c.nearness, -c.generation))
    refusals: list[Refusal] = [dict(r) for inventory in inventories for r in inventory.refusals]
    for step in dict.fromkeys(candidate.step for candidate in found):
        of_step = [candidate for candidate in found if candidate.step == step]
        chosen = _chosen(of_step)
        passed = [c for c in of_step if c.problem and _before(c, chosen)]
        refusals += [_refusal(candidate) for candidate in passed]
        if chosen is not None:
            return replace(chosen, refusals=tuple(refusals[:MAX_REFUSALS]))
    if _never_had_one(found, inventories, lineage, refused):
        return Nothing(tuple(refusals[:MAX_REFUSALS]))
    there = {(c.tier, c.step, c.generation) for c in found}
    refusals += [r for r in refused if _key(r) not in there]  # deleted since
    raise NotRestorableError(run=run_id, refusals=[_sentence(r) for r in refusals[:MAX_REFUSALS]])


def _chosen(of_step: Sequence[_Candidate]) -> RestorePlan | None:
    """Of the generations that have all of this step the one that is nearest, then newest."""
    plans = []
    for generation, world in dict.fromkeys((c.generation, c.world) for c in of_step):
        mixed: dict[int, ShardSource] = {}
        for candidate in of_step:  # nearest tier first
            if (candidate.generation, candidate.world) == (generation, world):
                for rank, sources in candidate.sources.items():
                    if sources:
                        mixed.setdefault(rank, sources[0])
        if world and set(mixed) == set(range(world)):
            shards = tuple(mixed[rank] for rank in range(world))
            tier = max((shard.tier for shard in shards), key=lambda tier: NEARNESS[tier])
            plans.append(
                RestorePlan(
                    step=of_step[0].step,
                    generation=generation,
                    world=world,
                    tier=tier,
                    shards=shards,
                )
            )
    return min(plans, key=lambda p: (NEARNESS[p.tier], -p.generation), default=None)


def _before(candidate: _Candidate, chosen: RestorePlan | None) -> bool:
    """True if the candidate would have been taken before what was chosen."""
    if chosen is None:
        return True
    ours = (candidate.nearness, -candidate.generation)
    return ours < (NEARNESS[chosen.tier], -chosen.generation)


def _never_had_one(
    found: Sequence[_Candidate],
    inventories: Sequence[NodeInventory],
    lineage: Lineage,
    refused: Sequence[Refusal],
) -> bool:
    """True if all that is there can be the start of a first snapshot that nobody completed.

    Ranks are in step: whoever holds a second step was there when the first one was whole.
    """
    if refused or lineage.newest_start > 0:
        return False
    if any(c.tier not in ("memory", "peer") for c in found) or any(i.refusals for i in inventories):
        return False
    return len({(c.step, c.generation) for c in found}) <= 1


def _without(candidate: _Candidate, refused: Sequence[Refusal], lineage: Lineage) -> _Candidate:
    """The candidate without what is off the line, or was refused by a rank."""
    cut = lineage.cut_by(candidate.generation, candidate.step)
    if cut is not None and not candidate.problem:
        reason = f"off the line: generation {cut[0]} went back to step {cut[1]}"
        candidate = replace(candidate, problem=reason)
    if cut is not None:
        candidate = replace(candidate, sources={})
    key = (candidate.tier, candidate.step, candidate.generation)
    said = [refusal for refusal in refused if _key(refusal) == key]
    if not said:
        return candidate
    left = {
        rank: tuple(s for s in sources if not any(_hits(refusal, s) for refusal in said))
        for rank, sources in candidate.sources.items()
    }
    if candidate.sources and all(left.values()) and not candidate.problem:
        return replace(candidate, sources=left)  # another node has it, too
    reason = str(said[-1].get("reason", "refused by a rank"))
    return replace(candidate, sources=left, file=str(said[-1].get("file", "")), problem=reason)


def _hits(refusal: Refusal, source: ShardSource) -> bool:
    rank, node = refusal.get("rank"), refusal.get("node")
    return rank in (None, source.rank) and node in (None, "", source.node_id)


def _key(refusal: Refusal) -> tuple[Any, Any, Any]:
    return refusal.get("tier"), refusal.get("step"), refusal.get("generation")


def _in_slots(
    tier: Tier, inventories: Sequence[NodeInventory], nodes: frozenset[str]
) -> Iterator[_Candidate]:
    """Steps in the memory of the nodes: of their own ranks, or as copies of others'."""
    found: dict[tuple[int, int, int], dict[int, list[ShardSource]]] = defaultdict(dict)
    for inventory in inventories:
        for slot in inventory.memory if tier == "memory" else inventory.peers:
            by_rank = found[slot.step, slot.generation, slot.world]
            by_rank.setdefault(slot.rank, []).append(slot_source(tier, slot, inventory))
    what = "slot" if tier == "memory" else "copy"
    for (step, generation, world), by_rank in found.items():
        missing = sorted(set(range(world)) - set(by_rank))
        sources, problem = reachable(by_rank, nodes)
        yield _Candidate(
            tier=tier,
            step=step,
            generation=generation,
            world=world,
            sources=sources,
            problem=f"no {what} of ranks {missing}" if missing else problem,
        )


def _disk(
    inventories: Sequence[NodeInventory], nodes: frozenset[str], run_id: str
) -> Iterator[_Candidate]:
    """Published steps; each node has the manifest, and the shards that it holds."""
    seen: set[tuple[int, int, bytes]] = set()
    for inventory in inventories:
        for published in inventory.manifests:
            if published in seen:
                continue
            seen.add(published)
            step, generation, raw = published
            file = manifest_key(step, generation)
            candidate = _Candidate(
                tier="disk", step=step, generation=generation, world=0, file=file
            )
            try:
                manifest = Manifest.from_bytes(raw, file)
            except ManifestError as error:
                yield replace(candidate, problem=error.reason)
                continue
            yield _published(
                replace(candidate, world=manifest.world), manifest, inventories, nodes, run_id
            )


def _published(
    candidate: _Candidate,
    manifest: Manifest,
    inventories: Sequence[NodeInventory],
    nodes: frozenset[str],
    run_id: str,
) -> _Candidate:
    if problem := _of_another_run(manifest, run_id):
        return replace(candidate, problem=problem)
    by_rank: dict[int, list[ShardSource]] = defaultdict(list)
    for inventory in inventories:
        held = {s.rank: s for s in inventory.disk if _is_of(s.step, s.generation, manifest)}
        for entry in manifest.shards:
            shard = held.get(entry.rank)
            if shard is not None and shard.num_bytes == entry.num_bytes:
                by_rank[entry.rank].append(disk_source(entry, inventory))
    sources, problem = reachable(by_rank, nodes)
    file, missing = missing_shard(manifest, by_rank, inventories)
    return replace(
        candidate, sources=sources, file=file or candidate.file, problem=missing or problem
    )


def _is_of(step: int, generation: int, manifest: Manifest) -> bool:
    return (step, generation) == (manifest.step, manifest.generation)


def _object(commits: Sequence[ObjectCommit], run_id: str) -> Iterator[_Candidate]:
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
            entries = commit.manifest.shards
            yield replace(candidate, sources={e.rank: (object_source(e),) for e in entries})


def _of_another_run(manifest: Manifest, run_id: str) -> str:
    if run_id in ("", manifest.run_id):
        return ""
    return f"is a checkpoint of run {manifest.run_id!r}"[:MAX_REASON]


def _refusal(candidate: _Candidate) -> Refusal:
    return {
        "tier": candidate.tier,
        "step": candidate.step,
        "generation": candidate.generation,
        "file": candidate.file,
        "reason": candidate.problem,
    }


def _sentence(refusal: Mapping[str, Any]) -> str:
    where = f"{refusal.get('tier', '?')} step {refusal.get('step', '?')}"
    return f"{where} {refusal.get('file', '')}: {refusal.get('reason', '')}"
