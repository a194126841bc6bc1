"""The invariants of the design's section 9, checked while the simulation runs and at its end."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from sim_state import checksum, token

from relit_platform.facts import Fact, ShardSource
from relit_platform.machines import incident
from relit_platform.machines.lineage import Lineage
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.checkpoint.manifest import Manifest

if TYPE_CHECKING:
    from sim_group import SimGroup
    from sim_rank import SimRank
    from sim_run import SimRun


@functools.cache
def parsed(raw: bytes) -> Manifest:
    """The manifest of these bytes; the same few are looked at again and again."""
    return Manifest.from_bytes(raw)


class Check:
    """Every method asserts; `corrupted` holds files that the atlas itself has damaged."""

    def __init__(self, run: SimRun) -> None:
        self._run = run
        self.corrupted: set[Any] = set()
        self.starts: dict[int, int] = {}
        self.done: dict[int, list[int]] = defaultdict(list)
        self.newest_entered = 0
        self.previous = 0
        self.highest = 0
        self.skips = 0
        self._durable: tuple[int, int] = (0, 0)

    # ---- while it runs ----

    def state(self, rank: SimRank, step: int, content: int) -> None:
        """What a rank takes is the state of exactly that step, never a mix."""
        assert content == token(step), f"{rank.worker_id} took something else as step {step}"

    def holder(self, rank: SimRank, step: int) -> None:
        """The source of a broadcast holds what the manager says it holds."""
        assert rank.holds and rank.step == step, f"{rank.worker_id} does not hold step {step}"

    def entered(self, group: SimGroup) -> None:
        """Numbers rise, and nobody goes back further than one step, as long as nothing was damaged.
        A newcomer has no snapshot before its first step: one more, if all die in that moment. Where
        snapshots were skipped (all slots pinned, because the agent that persists them was away),
        each rank may lack another step: then it is what the disk holds, at the worst.
        """
        generation, start = group.generation, group.assignment.source.step
        self.previous = self.newest_entered
        assert generation > self.newest_entered, f"generation {generation} entered late or twice"
        self.newest_entered = generation
        self.starts[generation] = start
        if not self.corrupted:
            young = self.highest - self.starts.get(self.previous, 0) <= 1
            oldest = self.highest - 1 - young
            if self.skips:
                oldest = min(oldest, self._newest_on_disk(generation))
            assert start >= oldest, f"back from {self.highest} to {start}"
        self._run.clock.say(f"generation {generation} from step {start}: {group.members}")

    def _newest_on_disk(self, generation: int) -> int:
        """The newest committed step that no generation before this one has cut off."""
        line = Lineage().merged(sorted((g, s) for g, s in self.starts.items() if g < generation))
        manifests = [place for node in self._run.nodes for place in node.manifests]
        return max((s for s, g in manifests if line.on_line(g, s)), default=0)

    def refused(self, shard: ShardSource, step: int, generation: int) -> None:
        """What a restore was told to read is damaged, if it is refused; nobody has deleted it."""
        place = (step, generation, shard.rank)
        there = any(place in node.disk for node in self._run.nodes)
        assert shard.tier != "disk" or there, f"{place} was deleted under its restore"

    def applied(self, rank: SimRank) -> None:
        """A member of an older generation never completes a step once a newer one trains."""
        generation, step = rank.generation, rank.step
        assert generation == self.newest_entered, f"{rank.worker_id} works on in {generation}"
        line = self.done[generation]
        if not line or line[-1] < step:
            expected = line[-1] + 1 if line else self.starts[generation] + 1
            assert step == expected, f"generation {generation} jumped to step {step}"
            line.append(step)
        self.highest = max(self.highest, step)

    def tiers(self) -> None:
        """Invariants 1, 2 and 3 over what lies on disk and in the object tier now."""
        for node in self._run.nodes:
            for (step, generation), raw in node.manifests.items():
                for entry in parsed(raw).shards:
                    place = (step, generation, entry.rank)
                    assert place in node.disk, f"manifest of {place} without its shard"
                    found = checksum(node.disk[place][0])
                    assert (found,) == entry.checksums or place in self.corrupted
        self._object_tier()

    def _object_tier(self) -> None:
        store = self._run.inner_store
        view = CommitLog(store).replay()
        generations = [r.generation for r in sorted(view.commits, key=lambda r: r.seq)]
        assert generations == sorted(generations), "an older generation committed over a newer one"
        steps = [r.step for r in view.commits]
        assert len(steps) == len(set(steps)), "two commits of one step"
        for record in view.commits:
            manifest = parsed(store.get(record.manifest_key))
            for entry in manifest.shards:
                place = ("object", entry.file)
                found = store.get(entry.file).decode()
                assert (found,) == entry.checksums or place in self.corrupted
        gone = self._run.pinned - set(steps)
        assert not gone, f"pinned steps {gone} are gone"
        if view.newest is not None:
            newest = (view.newest.generation, view.newest.step)
            assert newest >= self._durable, f"durable went back from {self._durable} to {newest}"
            self._durable = newest

    # ---- at the end ----

    def finished(self) -> None:
        """Invariant 4 and 5, the incidents, and nothing left over."""
        run = self._run
        lineage = Lineage().merged(sorted(self.starts.items()))
        for step in range(1, run.steps + 1):
            owners = [
                g for g, line in self.done.items() if step in line and lineage.on_line(g, step)
            ]
            assert len(owners) == 1, f"step {step} was consumed by generations {owners}"
            row = run.supervisor.rows.get(step)
            assert row is not None, f"no row of step {step}"
            assert row["loss"] == float(token(step)), f"another loss at step {step}"
        assert not run.supervisor.verdict, run.supervisor.verdict
        kinds = {fact.kind for fact in run.supervisor.facts}
        assert "row.conflict" not in kinds and "row.replaced" not in kinds
        status = run.manager.call("status")
        assert status["finished"] and status["waiting"] == 0
        self._all_saved(status["committed"])
        self._incidents(run.supervisor.facts)
        self._leaks()

    def _all_saved(self, committed: dict[str, Any]) -> None:
        """What is newest on disk is durable when the run ends, unless an upload failed for good."""
        failed = [
            fact
            for fact in self._run.supervisor.facts
            if fact.kind == "ckpt.failed" and fact.data["tier"] == "object"
        ]
        if not failed and not self.corrupted:
            assert committed["object"] == committed["disk"], committed

    def _incidents(self, facts: list[Fact]) -> None:
        state = incident.IncidentState()
        records = []
        # What was written but not yet acknowledged is handed out again after a supervisor's death.
        for fact in {id(fact): fact for fact in facts}.values():
            state, closed = incident.advance(state, fact)
            records += closed
        _, left = incident.finish(state, self._run.clock.now)
        for record in records + left:
            assert sum(record["phases"].values()) == record["downtime_s"]
            assert record["headline"].startswith("Incident {id}: ")
        # Only what the ending itself interrupted may stay open.
        assert all(r["recovered"] for r in records)

    def _leaks(self) -> None:
        for node in self._run.nodes:
            steps = {place[:2] for place in node.disk}
            kept = self._run.config.checkpoint.keep_disk
            assert len(node.manifests) <= kept + 6, f"retention lags: {sorted(node.manifests)}"
            assert len(steps) <= len(node.manifests) + 8, f"shards nobody owns: {sorted(steps)}"
            living = {w for w, rank in node.workers.items() if rank.alive}
            for worker in living:
                assert sum(s.worker_id == worker for s in node.slots) <= 3
