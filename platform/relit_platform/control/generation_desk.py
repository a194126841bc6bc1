"""Performs what the generation machine decides: answers, plans, budget, facts for the log.

The counterpart of CheckpointDesk. Never blocks; used under the coordinator's lock only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from relit_platform.control.checkpoint_desk import CheckpointDesk
from relit_platform.control.journal import Journal
from relit_platform.control.rebuild import Found
from relit_platform.facts import Dismissed, JoinReply, Refused, RunHistory, Verdict, WorkerExited
from relit_platform.machines.budget import BudgetState, note_recovery, note_user_error
from relit_platform.machines.checkpoint_state import GenerationFormed, Restoring
from relit_platform.machines.generation import (
    Action,
    Announce,
    Dismiss,
    Emit,
    EpochStarted,
    Event,
    GenerationState,
    Halted,
    Phase,
    PlanRestore,
    Refuse,
    advance,
)
from relit_platform.run_config import RunConfig

MAX_REPLIES = 4096


class GenerationDesk:
    """The shell of the generation machine. replies: the newest answer to each worker's join."""

    def __init__(
        self,
        *,
        config: RunConfig,
        journal: Journal,
        checkpoints: CheckpointDesk,
        plan: Callable[[PlanRestore], None],
        clock: Callable[[], float],
        steady: Callable[[], float],
    ) -> None:
        scaling = config.scaling
        self.state = GenerationState(world=scaling.workers, spares=scaling.spares)
        self.budget = BudgetState()
        self.replies: dict[str, JoinReply] = {}
        self._config = config
        self._journal = journal
        self._checkpoints = checkpoints
        self._plan = plan
        self._clock = clock
        self._steady = steady
        self._restoring: frozenset[tuple[int, int]] = frozenset()

    def feed(self, event: Event) -> bool:
        """Advance the machine and perform what it asks for; True if somebody may have an answer."""
        self.state, actions = advance(self.state, event, self._steady())
        reached = self.state
        for action in actions:
            self._perform(action)
            if self.state is not reached:
                break  # the budget ended the run on the way: the rest no longer holds
        return bool(actions)

    def begin_epoch(self, epoch: int, found: Found, history: RunHistory) -> None:
        """Enter an epoch with what was found, and say which members of the old one it ended.

        A rank that has told an earlier manager its value, or is past its loop, needs no place; the
        run has finished only when the value of every rank is known.
        """
        old = self.state
        over = old.phase is Phase.DONE
        ended = [old.holders[r] for r in old.unfinished() if r in old.holders and not over]
        # Generations that the supervisor before has not written down: rows after them are made
        # again, whatever the run directory has.
        untold = [start for gen, start in old.lineage.entries if gen > history.generation]
        whole_to = min([history.rows_whole_to, *untold])
        self._journal.begin_epoch(replace(history, rows_whole_to=whole_to), found.members)
        told = [finished for finished in history.finished if finished.epoch == epoch]
        for finished in told:
            self._journal.note_finished(finished.rank, finished.value_json, finished.stopped)
        self.feed(
            EpochStarted(
                epoch=epoch,
                seen_generation=found.generation,
                floor=found.generation + 1 if found.generation and not old.epoch else 0,
                holders=found.holders,
                finished={**found.done, **{f.rank: f.worker_id for f in told}},
                lineage=history.lineage,
            )
        )
        data = {"epoch": epoch, "was": old.epoch, "ended": ended, "holders": len(found.holders)}
        self.say("epoch.started", self.with_marks(data))

    def remember(self, history: RunHistory) -> None:
        """What a supervisor has read in the run directory."""
        self.budget = replace(
            self.budget,
            recoveries=max(self.budget.recoveries, history.recoveries),
            step=max(self.budget.step, history.last_row_step),
        )
        self._journal.note_completed(history.last_row_step)
        if self.state.epoch:
            self.learn(history.generation, history.lineage)

    def learn(self, generation: int, lineage: tuple[tuple[int, int], ...] = ()) -> None:
        """No generation may get a number that somebody has seen already."""
        epoch = self.state.epoch
        self.feed(EpochStarted(epoch=epoch, seen_generation=generation, lineage=lineage))

    def user_error(self, *, rank: int, step: int, error_type: str, message: str) -> Verdict:
        """Count an exception of the user's loop; the caller halts the run if it must not go on."""
        scaling = self._config.scaling
        self.budget, verdict = note_user_error(
            self.budget,
            self._config.recovery,
            error_type=error_type,
            message=message,
            step=step,
            rank=rank,
            processes=scaling.workers + scaling.spares,
        )
        return verdict

    def exited(self, fact: WorkerExited) -> bool:
        """Say that a worker's process has ended; False if that was known. The caller feeds it."""
        state = self.state
        if fact.worker_id in state.gone:
            return False
        rank = state.rank_of(fact.worker_id)
        if rank is None and fact.rank >= 0 and state.newest in (0, fact.generation):
            rank = fact.rank  # a manager that was re-created does not know the holders yet
        done = state.phase is Phase.DONE or rank in state.finished
        self._journal.note_completed(fact.last_step if rank is not None else 0)
        data = {
            "worker_id": fact.worker_id,
            "node_id": fact.node_id,
            "pid": fact.pid,
            "at_s": fact.at_s,
            "rank": rank,
            "last_step": fact.last_step,
            "last_phase": fact.last_phase,
            "expected": done,
            "node_lost": fact.node_lost,
        }
        level = "info" if done or rank is None else "warning"
        self.say("worker.exited", self.with_marks(data), level)
        self.learn(fact.generation)
        return True

    def halt(self, verdict: Verdict) -> None:
        """The run must not go on: everybody is dismissed, and the status says why."""
        self._journal.verdict = verdict
        self.say("run.verdict", {"code": verdict.code, "reason": verdict.reason}, "error")
        self.feed(Halted(reason=f"{verdict.code}: {verdict.reason}"))

    def with_marks(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """What the incident machine needs beside the fact itself."""
        completed = self._journal.completed_step
        return {"noticed_at_s": self._clock(), "completed_step": completed, **data}

    def say(
        self, kind: str, data: Mapping[str, Any], level: str = "info", step: int | None = None
    ) -> None:
        """One fact of the newest generation; data may carry its own at_s."""
        self._journal.say(
            kind,
            data,
            generation=self.state.newest,
            level=level,
            step=step,
            at_s=data.get("at_s"),
        )

    # ---- actions ----

    def _perform(self, action: Action) -> None:
        match action:
            case Announce():
                self._announce(action)
            case Dismiss():
                for worker in action.worker_ids:
                    self._reply(worker, Dismissed(reason=action.reason))
            case Refuse():
                refused = Refused(reason=action.reason, newest_generation=self.state.newest)
                self._reply(action.worker_id, refused)
            case PlanRestore():
                self._checkpoints.feed(Restoring())
                self._plan(action)
            case Emit():
                self._emitted(action)

    def _reply(self, worker: str, reply: JoinReply) -> None:
        self.replies.pop(worker, None)
        self.replies[worker] = reply
        while len(self.replies) > MAX_REPLIES:
            del self.replies[next(iter(self.replies))]

    def _announce(self, action: Announce) -> None:
        for worker, assignment in action.assignments.items():
            # Steps that are done again send their rows again: equal losses are the proof.
            last = min(self._journal.rows.needed_after, assignment.source.step)
            self._reply(worker, replace(assignment, last_row_step=last))
            plan = assignment.source.plan
            self._restoring = frozenset({(plan.step, plan.generation)} if plan else ())

    def _emitted(self, action: Emit) -> None:
        data = self.with_marks(_dated(action.data, self._clock() - self._steady()))
        match action.kind:
            case "generation.lost":
                self._generation_lost(data)
            case "generation.formed":
                self._generation_formed(data)
            case _:
                self.say(action.kind, data, action.level)

    def _generation_formed(self, data: dict[str, Any]) -> None:
        start = int(data["start_step"])
        self._journal.note_formed(data)
        self.say("generation.formed", data, step=start)
        self._checkpoints.feed(
            GenerationFormed(
                generation=int(data["generation"]), start_step=start, protected=self._restoring
            )
        )

    def _generation_lost(self, data: dict[str, Any]) -> None:
        if data.get("fault") == "restore_refused":
            # Each one takes a damaged checkpoint out of the choice, so they end by themselves.
            self.say("generation.lost", data, "warning")
            return
        self.budget, verdict = note_recovery(
            self.budget, self._config.recovery, self._journal.completed_step
        )
        data["budget"] = {
            "used": self.budget.recoveries,
            "allowed": self._config.recovery.max_recoveries,
            "without_progress": self.budget.streak,
        }
        self.say("generation.lost", data, "warning")
        if not verdict.go_on:
            self.halt(verdict)


def _dated(data: Mapping[str, Any], ahead_s: float) -> dict[str, Any]:
    """What the machine emits, its times in Unix seconds: the machine itself counts on the steady
    clock, which is so much behind. Times that came with a request are Unix seconds already.
    """
    dated = dict(data)
    if "filled_at_s" in data:
        dated["filled_at_s"] = data["filled_at_s"] + ahead_s
        dated["members"] = [
            {**member, "waiting_since_s": member["waiting_since_s"] + ahead_s}
            for member in data["members"]
        ]
    return dated
