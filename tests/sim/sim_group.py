"""A process group: members that arrive with the same assignment, take state, and step together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sim_state import token

from relit_platform.facts import Assignment

if TYPE_CHECKING:
    from sim_rank import SimRank
    from sim_run import SimRun

FORM_TIMEOUT_S = 3.0
COLLECTIVE_TIMEOUT_S = 4.0


class Groups:
    """Where ranks with an assignment find each other."""

    def __init__(self, run: SimRun) -> None:
        self._run = run
        self._forming: dict[tuple[int, int, tuple[str, int]], SimGroup] = {}

    def arrive(self, rank: SimRank, assignment: Assignment) -> None:
        key = (assignment.epoch, assignment.generation, assignment.endpoint)
        if key not in self._forming:
            self._forming[key] = SimGroup(self._run, assignment)
        self._forming[key].arrive(rank, assignment)


class SimGroup:
    """broken once any member died, fell silent too long, or left."""

    def __init__(self, run: SimRun, assignment: Assignment) -> None:
        self._run = run
        self._clock = run.clock
        self.assignment = assignment
        self.generation = assignment.generation
        self.members = assignment.members
        self.here: dict[str, SimRank] = {}
        self.broken = False
        self.entered = False
        self._clock.after(FORM_TIMEOUT_S, self._form_timeout)

    def arrive(self, rank: SimRank, assignment: Assignment) -> None:
        if self.broken:
            rank.fault("collective", "the group is gone")
            return
        self.here[rank.worker_id] = rank
        rank.group = self
        if set(self.here) == set(self.members):
            self._clock.after(0.01, self._formed)

    def ranks(self) -> list[SimRank]:
        return [self.here[worker] for worker in self.members]

    # ---- breaking ----

    def broken_by(self, culprit: SimRank | None, kind: str = "collective") -> None:
        """The others notice within milliseconds; some may have completed the step under way."""
        if self.broken:
            return
        self.broken = True
        survivors = [r for r in self.here.values() if r is not culprit and r.alive]
        if self.entered and kind == "collective" and self._clock.chance(0.3):
            self._some_complete(survivors)
        for rank in survivors:
            self._clock.after(self._clock.between(0.02, 0.1), partial(self._leave, rank, kind))

    def _some_complete(self, survivors: list[SimRank]) -> None:
        """Everybody, the dead one too, had sent its gradients: so its last snapshot was whole."""
        able = [
            rank
            for rank in survivors
            if rank.phase == "train" and not rank.frozen and rank.step < self._run.steps
        ]
        lucky = [rank for rank in able if self._clock.chance(0.5)]
        if lucky and all(rank.step == lucky[0].step for rank in self.ranks()):
            for rank in self.ranks():
                rank.complete_slot(dead_too=True)
            self._complete(lucky)

    def _complete(self, ranks: list[SimRank]) -> None:
        """These complete the step, for which everybody had sent gradients and votes."""
        votes = [rank.pace.votes(rank.rank) for rank in self.ranks()]
        agreed = [sum(places) for places in zip(*votes, strict=True)]
        due = {rank.complete_step(agreed) for rank in ranks}
        assert len(due) == 1, "ranks in step disagree about the disk"

    def _leave(self, rank: SimRank, kind: str) -> None:
        if rank.alive and rank.frozen:
            self._clock.after(0.2, lambda: self._leave(rank, kind))
        elif rank.group is self and rank.phase in ("form", "restore", "train"):
            rank.fault(kind, "a peer is gone")

    def _form_timeout(self) -> None:
        if not self.entered:
            self.broken_by(None, "timeout")

    # ---- state ----

    def _formed(self) -> None:
        if self.broken or any(not r.alive for r in self.ranks()):
            self.broken_by(None)
            return
        for number, rank in enumerate(self.ranks()):
            rank.formed(self, number, self.assignment)
        source = self.assignment.source
        if source.kind == "member":
            holder = self.ranks()[source.rank or 0]
            self._run.check.holder(holder, source.step)
            for rank in self.ranks():
                if rank is not holder and (not rank.holds or rank.step != source.step):
                    rank.holds = False
        elif source.kind == "checkpoint":
            for rank in self.ranks():
                rank.holds = False
        self._clock.after(self._clock.between(0.02, 0.3), self._take_state)

    def _take_state(self) -> None:
        if self.broken or any(r.frozen for r in self.ranks()):
            if not self.broken:
                self._clock.after(0.2, self._take_state)
            return
        source = self.assignment.source
        if source.kind == "checkpoint" and not self._loaded():
            return
        content, marks, rows = token(0), dict[str, Any](), dict[int, dict[str, Any]]()
        if source.kind == "member":
            holder = self.ranks()[source.rank or 0]
            content, marks, rows = holder.content, holder.pace.marks(), dict(holder.rows)
        elif source.plan is not None:
            content = self._content
            saved = source.plan.step, source.plan.generation
            marks, rows = self._run.marks[saved], self._run.kept[saved]
        for rank in self.ranks():
            rank.take(source.step, content, marks, rows)
        self.entered = True
        self._run.check.entered(self)
        for rank in self.ranks():
            rank.tell_entered(source.kind)
        self._next()

    def _loaded(self) -> bool:
        plan = self.assignment.source.plan
        assert plan is not None
        contents = set()
        reader = self.ranks()[0]
        for shard in plan.shards:
            try:
                contents.add(reader.load(shard, plan.step, plan.generation))
            except ValueError as error:
                self._run.check.refused(shard, plan.step, plan.generation)
                refused = {
                    "tier": plan.tier,
                    "step": plan.step,
                    "generation": plan.generation,
                    "file": shard.location,
                    "reason": str(error),
                }
                self._clock.say(f"refused {refused}")
                self.broken = True
                for rank in self.ranks():
                    rank.fault("restore_refused", str(error), refused)
                return False
        assert len(contents) == 1, f"a mix of states: {contents}"
        self._content = contents.pop()
        return True

    # ---- training ----

    def _next(self) -> None:
        if all(rank.step >= self._run.steps for rank in self.ranks()):
            for rank in self.ranks():
                rank.phase = "done"
                rank.group = None
                self._clock.after(self._clock.between(0.01, 1.0), rank.finish)
            return
        self._clock.after(self._clock.between(0.2, 0.5), lambda: self._step(self._clock.now))

    def _step(self, began_s: float) -> None:
        if self.broken:
            return
        if any(rank.frozen for rank in self.ranks()):
            if self._clock.now - began_s > COLLECTIVE_TIMEOUT_S:
                self.broken_by(None, "timeout")
            else:
                self._clock.after(0.2, lambda: self._step(began_s))
            return
        self._complete(self.ranks())
        self._next()
