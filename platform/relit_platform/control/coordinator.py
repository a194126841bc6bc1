"""The coordinator: the manager's thread-safe core, without Ray.

It owns the pure machines (generation, checkpoint, budget), one lock, and what the supervisor has
not written down yet. Ranks long-poll `join`; agents send `fact`; the supervisor drains. Every
decision is taken under the lock in microseconds; everything slow runs in the background and
comes back as an event, so a join is answered the moment the last place is filled.

    rank        join, persisting, rows, finished, user_error
    agent       fact(ShardPersisted | ShardUploaded | ShardFailed | WorkerExited | Fact)
    supervisor  start_epoch, drain, status, request_stop

A coordinator that is created anew knows nothing until start_epoch: then it learns its generation
from the agents' fences, the members' heartbeats, the commit log and the run directory, and its
steps from the agents' disks. Joins that come before wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from relit_platform.control.checkpoint_desk import CheckpointDesk
from relit_platform.control.journal import Journal
from relit_platform.control.planning import Answer, Planner
from relit_platform.control.ports import AgentError, AgentPort, BackgroundPort, ObjectPort
from relit_platform.control.rebuild import Found, checkpoints, gather
from relit_platform.control.status import make_status
from relit_platform.errors import PlatformError
from relit_platform.facts import (
    Dismissed,
    Drained,
    Fact,
    JoinReply,
    JoinRequest,
    Refused,
    RowBatch,
    RunHistory,
    ShardFailed,
    ShardPersisted,
    ShardUploaded,
    Verdict,
    Waiting,
    WorkerExited,
)
from relit_platform.machines.budget import BudgetState, note_recovery, note_user_error
from relit_platform.machines.checkpoint_state import (
    Adopted,
    CheckpointEvent,
    GenerationFormed,
    Note,
    Persisting,
)
from relit_platform.machines.generation import (
    Action,
    Announce,
    Dismiss,
    Emit,
    EpochStarted,
    Event,
    GenerationState,
    Halted,
    Joined,
    MemberFinished,
    Phase,
    Planned,
    PlanRestore,
    Refuse,
    StopRequested,
    Tick,
    WorkerGone,
    advance,
    next_deadline,
)
from relit_platform.run_config import RunConfig

MAX_BLOCKED_JOINS = 48
MAX_REPLIES = 4096
TICK_S = 1.0
STOP_NUMBER = 1
STOP_AGAIN_S = 1.0


class Coordinator:
    """See the module's text. Every public method may be called from any thread."""

    def __init__(
        self,
        *,
        config: RunConfig,
        agents: AgentPort,
        objects: ObjectPort,
        background: BackgroundPort,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._config = config
        self._agents = agents
        self._objects = objects
        self._background = background
        self._clock = clock
        self._sleep = sleep
        self._changed = threading.Condition()
        self._epoch_lock = threading.Lock()
        scaling = config.scaling
        self._state = GenerationState(world=scaling.workers, spares=scaling.spares)
        self._budget = BudgetState()
        self._replies: dict[str, JoinReply] = {}
        self._blocked = 0
        self._next_tick_s = 0.0
        self._stop_told_s = -STOP_AGAIN_S
        self._restoring: frozenset[tuple[int, int]] = frozenset()
        self.journal = Journal(clock)
        self._desk = CheckpointDesk(
            config=config,
            agents=agents,
            objects=objects,
            background=background,
            reenter=self._checkpoint,
            say=self._note,
            clock=clock,
        )
        self._planner = Planner(
            config=config,
            agents=agents,
            objects=objects,
            background=background,
            answer=self._planned,
        )

    # ---- the supervisor's calls ----

    def start_epoch(self, epoch: int, history: RunHistory | None = None) -> int:
        """A supervisor life begins; returns the highest generation known. Repeating it is harmless.

        Blocks on agents and the object tier. When it returns, no worker of an older epoch runs on
        a node whose agent answers. Raises FencedError if a newer epoch has taken over.
        """
        history = history or RunHistory()
        with self._epoch_lock:
            with self._changed:
                self._remember(history)
                if epoch <= self._state.epoch:
                    return self._state.newest
                newest = max(self._state.newest, history.generation)
            found = gather(self._agents, self._objects, epoch, newest, self._sleep)
            with self._changed:
                self._begin(epoch, found, history)
                return self._state.newest

    def drain(self, after: int) -> Drained:
        """Facts and rows numbered above `after`, and the status. Forgets those up to `after`."""
        with self._changed:
            self._tick()
            return self.journal.outbox.drain(after, self.status())

    def status(self) -> dict[str, Any]:
        """What status.json shows of the run; plain JSON. See status.py."""
        with self._changed:
            return make_status(
                self._config, self._state, self._desk.book, self.journal, self._budget
            )

    def request_stop(self, reason: str) -> None:
        """Have the run end at its next boundary. Repeating it is harmless."""
        with self._changed:
            if not self._state.stopping:
                self._say("stop.requested", {"reason": reason})
            self._feed(StopRequested(reason=reason))
            now = self._clock()
            if now - self._stop_told_s < STOP_AGAIN_S:
                return
            self._stop_told_s = now
        self._background.submit(self._set_stop)

    # ---- the ranks' calls ----

    def join(self, request: JoinRequest, wait_s: float) -> JoinReply:
        """Ask for a place: answered as soon as it is decided, else with Waiting after wait_s."""
        deadline_s = self._clock() + wait_s
        worker = request.worker_id
        with self._changed:
            if self._blocked >= MAX_BLOCKED_JOINS:
                deadline_s = min(deadline_s, self._clock() + 0.1)
            self._replies.pop(worker, None)
            heard_epoch = self._joined(request, wait_s)
            self._blocked += 1
            try:
                while worker not in self._replies and self._clock() < deadline_s:
                    self._changed.wait(self._pause_s(deadline_s))
                    self._tick()
                    if heard_epoch != self._state.epoch and worker not in self._replies:
                        heard_epoch = self._joined(request, deadline_s - self._clock())
            finally:
                self._blocked -= 1
            return self._replies.get(worker) or self._waiting(worker)

    def persisting(
        self, step: int, generation: int, rank: int, world: int, final: bool = False
    ) -> None:
        """A rank has asked its agent to persist a step. final: it goes to every tier."""
        self._checkpoint(
            Persisting(step=step, generation=generation, rank=rank, world=world, final=final)
        )

    def rows(self, batch: RowBatch) -> None:
        """Rows of completed steps; see RowBatch."""
        with self._changed:
            self.journal.take_rows(batch, self._state.newest, self._state.lineage)

    def finished(self, worker_id: str, rank: int, value_json: str, stopped: bool = False) -> None:
        """A worker's function has returned. rank -1: it never had a place."""
        with self._changed:
            if self._state.phase is Phase.DONE or (rank < 0 and not self._holds(worker_id)):
                return
            self._feed(MemberFinished(worker_id=worker_id, rank=rank))
            held = self._state.rank_of(worker_id)
            if held is not None:
                self.journal.note_finished(held, value_json, stopped)
                self._say("rank.finished", {"rank": held, "worker_id": worker_id})

    def user_error(
        self,
        worker_id: str,
        rank: int,
        step: int,
        error_type: str,
        message: str,
        traceback_text: str,
    ) -> tuple[bool, str]:
        """The user's loop raised. Returns whether it may be tried again, and why (not)."""
        with self._changed:
            held = self._state.rank_of(worker_id)
            self._budget, verdict = note_user_error(
                self._budget,
                self._config.recovery,
                error_type=error_type,
                message=message,
                step=step,
                rank=rank if held is None else held,
                processes=self._config.scaling.workers + self._config.scaling.spares,
            )
            data = {
                "worker_id": worker_id,
                "rank": held,
                "step": step,
                "type": error_type,
                "message": message,
                "traceback": traceback_text,
                "final": not verdict.go_on,
                "reason": verdict.reason,
            }
            self._say("worker.error", self._with_marks(data), "error")
            if not verdict.go_on:
                self._halt(verdict)
            return verdict.go_on, verdict.reason

    # ---- the agents' call ----

    def fact(self, fact: object) -> None:
        """Anything an agent or a rank reports. Unknown types raise TypeError: our bug."""
        match fact:
            case ShardPersisted() | ShardUploaded() | ShardFailed():
                self._checkpoint(fact)
            case WorkerExited():
                self._worker_exited(fact)
            case Fact():
                with self._changed:
                    self._remember_loop(fact)
                    self.journal.outbox.add(fact)
            case _:
                raise TypeError(f"no fact: {type(fact).__name__}")

    # ---- under the lock ----

    def _holds(self, worker: str) -> bool:
        return self._state.rank_of(worker) is not None

    def _joined(self, request: JoinRequest, hold_s: float) -> int:
        self.journal.note_completed(request.step or 0)
        self._feed(Joined(request=request, hold_s=max(0.0, hold_s)))
        return self._state.epoch

    def _waiting(self, worker: str) -> Waiting:
        if worker not in self._state.waiting:
            return Waiting(spare=False, reason="the manager does not know this epoch yet")
        spare = self._state.phase is Phase.RUNNING
        reason = "every place is taken" if spare else "the generation is not complete"
        return Waiting(spare=spare, reason=reason)

    def _pause_s(self, deadline_s: float) -> float:
        """Until the answer is due, or a silent member loses its place."""
        now = self._clock()
        due = next_deadline(self._state)
        ends = [deadline_s, now + TICK_S] + ([due] if due is not None and due > now else [])
        return max(0.0, min(ends) - now)

    def _tick(self) -> None:
        self._feed(Tick())
        if self._clock() >= self._next_tick_s:
            self._next_tick_s = self._clock() + TICK_S
            self._desk.tick()

    def _feed(self, event: Event) -> None:
        """Advance the generation machine and perform what it asks for."""
        self._state, actions = advance(self._state, event, self._clock())
        reached = self._state
        for action in actions:
            self._perform(action)
            if self._state is not reached:
                break  # the budget ended the run on the way: the rest no longer holds
        if actions:
            self._changed.notify_all()

    def _perform(self, action: Action) -> None:
        match action:
            case Announce():
                self._announce(action)
            case Dismiss():
                for worker in action.worker_ids:
                    self._reply(worker, Dismissed(reason=action.reason))
            case Refuse():
                newest = self._state.newest
                self._reply(
                    action.worker_id, Refused(reason=action.reason, newest_generation=newest)
                )
            case PlanRestore():
                self._background.submit(partial(self._planner.plan, action))
            case Emit():
                self._emitted(action)

    def _reply(self, worker: str, reply: JoinReply) -> None:
        self._replies.pop(worker, None)
        self._replies[worker] = reply
        while len(self._replies) > MAX_REPLIES:
            del self._replies[next(iter(self._replies))]

    def _announce(self, action: Announce) -> None:
        for worker, assignment in action.assignments.items():
            # Steps that are done again send their rows again: equal losses are the proof.
            last = min(self.journal.rows.newest, assignment.source.step)
            self._reply(worker, replace(assignment, last_row_step=last))
            plan = assignment.source.plan
            self._restoring = frozenset({(plan.step, plan.generation)} if plan else ())

    def _emitted(self, action: Emit) -> None:
        data = self._with_marks(action.data)
        match action.kind:
            case "generation.lost":
                self._generation_lost(data)
            case "generation.formed":
                self.journal.note_formed(data)
                self._say(action.kind, data, step=data["start_step"])
                self._desk.feed(
                    GenerationFormed(
                        generation=data["generation"],
                        start_step=data["start_step"],
                        protected=self._restoring,
                    )
                )
            case _:
                self._say(action.kind, data, action.level)

    def _generation_lost(self, data: dict[str, Any]) -> None:
        self._budget, verdict = note_recovery(
            self._budget, self._config.recovery, self.journal.completed_step
        )
        data["budget"] = {
            "used": self._budget.recoveries,
            "allowed": self._config.recovery.max_recoveries,
            "without_progress": self._budget.streak,
        }
        self._say("generation.lost", data, "warning")
        if not verdict.go_on:
            self._halt(verdict)

    def _halt(self, verdict: Verdict) -> None:
        self.journal.verdict = verdict
        self._say("run.verdict", {"code": verdict.code, "reason": verdict.reason}, "error")
        self._feed(Halted(reason=f"{verdict.code}: {verdict.reason}"))

    def _begin(self, epoch: int, found: Found, history: RunHistory) -> None:
        was, old = self._state.epoch, self._state
        over = old.phase is not Phase.DONE
        ended = [old.holders[r] for r in old.unfinished() if r in old.holders and over]
        self.journal.begin_epoch(history)
        self._feed(
            EpochStarted(
                epoch=epoch,
                seen_generation=found.generation,
                holders=found.holders,
                lineage=history.lineage,
            )
        )
        self._desk.begin_epoch(epoch, self._state.lineage)
        for checkpoint, manifest in checkpoints(found):
            if manifest is not None:
                self._desk.know_manifest(checkpoint.key, manifest)
            self._desk.feed(Adopted(checkpoint=checkpoint))
        data = {"epoch": epoch, "was": was, "ended": ended, "holders": len(found.holders)}
        self._say("epoch.started", self._with_marks(data))
        for what, reason in found.silent.items():
            self._say("part.silent", {"what": what, "reason": reason}, "warning")
        self._changed.notify_all()

    def _remember(self, history: RunHistory) -> None:
        self._budget = replace(
            self._budget,
            recoveries=max(self._budget.recoveries, history.recoveries),
            step=max(self._budget.step, history.last_row_step),
        )
        self.journal.note_completed(history.last_row_step)

    def _remember_loop(self, fact: Fact) -> None:
        if fact.kind == "loop.begun":
            self.journal.loop = dict(fact.data)
            self._desk.data_id = str(fact.data.get("data") or "")

    def _with_marks(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """What the incident machine needs beside the fact itself."""
        marks = {
            "noticed_at_s": self._clock(),
            "completed_step": self.journal.completed_step,
        }
        return {**marks, **data}

    def _say(
        self, kind: str, data: Mapping[str, Any], level: str = "info", step: int | None = None
    ) -> None:
        at_s = data.get("at_s")
        self.journal.say(
            kind, data, generation=self._state.newest, level=level, step=step, at_s=at_s
        )

    # ---- back from the background ----

    def _checkpoint(self, event: CheckpointEvent) -> None:
        with self._changed:
            self._desk.feed(event)

    def _note(self, note: Note) -> None:
        with self._changed:
            self.journal.say(
                note.kind,
                note.data,
                generation=note.generation,
                level=note.level,
                step=note.step,
            )

    def _planned(self, answer: Answer) -> None:
        with self._changed:
            if answer.plan_id != self._state.plan_id or self._state.phase is not Phase.PLANNING:
                return
            if answer.source is None:
                self._halt(Verdict(go_on=False, code="not_restorable", reason=answer.error))
            else:
                self._feed(Planned(plan_id=answer.plan_id, source=answer.source))

    def _worker_exited(self, fact: WorkerExited) -> None:
        with self._changed:
            if fact.worker_id in self._state.gone:
                return  # told twice
            rank = self._state.rank_of(fact.worker_id)
            done = self._state.phase is Phase.DONE or rank in self._state.finished
            self.journal.note_completed(fact.last_step if rank is not None else 0)
            data = {
                "worker_id": fact.worker_id,
                "node_id": fact.node_id,
                "pid": fact.pid,
                "at_s": fact.at_s,
                "rank": rank,
                "last_step": fact.last_step,
                "last_phase": fact.last_phase,
                "expected": done,
            }
            level = "info" if done or rank is None else "warning"
            self._say("worker.exited", self._with_marks(data), level)
            self._feed(WorkerGone(worker_id=fact.worker_id))

    def _set_stop(self) -> None:
        for node in self._agents.nodes():
            try:
                self._agents.set_stop(node, STOP_NUMBER)
            except (AgentError, PlatformError):
                pass  # asked again with the supervisor's next request
