"""The coordinator: the manager's thread-safe core, without Ray.

It owns the pure machines (generation, checkpoint, budget), one lock, and what the supervisor has
not written down yet. Ranks long-poll `join`; agents send `fact`; the supervisor drains. Every
decision is taken under the lock in microseconds; everything slow runs in the background and
comes back as an event, so a join is answered the moment the last place is filled.

    rank        join, lost, persisting, rows, spacing, finished, user_error
    agent       fact(ShardPersisted | ShardUploaded | ShardFailed | WorkerExited | Fact)
    supervisor  start_epoch, drain, status, request_stop, rescue

A coordinator that is created anew knows nothing until start_epoch: then it learns its generation
from the agents' fences, the members' heartbeats, the commit log and the run directory, and its
steps from the agents' disks. Joins that come before wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from relit_platform.control.cadence_desk import CadenceDesk
from relit_platform.control.checkpoint_desk import CheckpointDesk
from relit_platform.control.generation_desk import GenerationDesk
from relit_platform.control.journal import Journal
from relit_platform.control.node_watch import NodeWatch
from relit_platform.control.peer_desk import PeerDesk
from relit_platform.control.planning import Answer, Planner
from relit_platform.control.ports import AgentError, AgentPort, BackgroundPort, ObjectPort
from relit_platform.control.rebuild import Found, Patience, checkpoints, gather
from relit_platform.control.rescue import Rescuer
from relit_platform.control.row_book import metric_values
from relit_platform.control.status import make_status
from relit_platform.control.stop_bell import StopBell
from relit_platform.errors import PlatformError
from relit_platform.facts import (
    Drained,
    Fact,
    JoinReply,
    JoinRequest,
    RowBatch,
    RunHistory,
    ShardFailed,
    ShardPersisted,
    ShardUploaded,
    Verdict,
    Waiting,
    WorkerExited,
)
from relit_platform.machines.checkpoint_state import (
    Adopted,
    CheckpointEvent,
    Finishing,
    Note,
    Persisting,
    Restoring,
)
from relit_platform.machines.generation import (
    Event,
    Joined,
    MemberFinished,
    Phase,
    Planned,
    PlanRestore,
    StopRequested,
    Tick,
    WorkerGone,
    next_deadline,
)
from relit_platform.run_config import RunConfig

MAX_BLOCKED_JOINS = 48
TICK_S = 1.0
STOP_AGAIN_S = 1.0


class Coordinator:
    """See the module's text. Every public method may be called from any thread.

    clock gives Unix seconds, for what is written down and compared with other processes' times;
    steady measures waiting: no setting of the clock may look like time that has passed.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        agents: AgentPort,
        objects: ObjectPort,
        background: BackgroundPort,
        clock: Callable[[], float],
        steady: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._config = config
        self._agents = agents
        self._objects = objects
        self._background = background
        self._steady = steady
        self._patience = Patience(steady, sleep)
        self._changed = threading.Condition()  # re-entrant: background work may come back at once
        self._epoch_lock = threading.Lock()
        self._blocked = 0
        self._bell, self._nodes = StopBell(agents), NodeWatch(agents, clock, steady)
        self._ticked_s, self._stop_told_s = -TICK_S, -STOP_AGAIN_S
        self._saved_step = 0  # the newest that an earlier life has committed
        self._journal = Journal(clock)
        self._saves = CheckpointDesk(
            config=config,
            agents=agents,
            objects=objects,
            background=background,
            reenter=self._checkpoint,
            say=self._note,
            steady=steady,
        )
        self._cadence = CadenceDesk(
            config=config, journal=self._journal, space=self._saves.space_object, clock=steady
        )
        self._journal.heard = self._cadence.heard
        self._members = GenerationDesk(
            config=config,
            journal=self._journal,
            checkpoints=self._saves,
            plan=self._plan,
            clock=clock,
            steady=steady,
        )
        self._rescuer = Rescuer(
            agents=agents,
            saves=self._saves,
            lock=self._changed,
            say=self._note,
            take_rows=self.rows,
            clock=clock,
        )
        self._peers = PeerDesk(
            config=config,
            agents=agents,
            background=background,
            epoch=lambda: self._members.state.epoch,
            say=self._say,
            steady=steady,
        )
        self._planner = Planner(
            config=config,
            agents=agents,
            objects=objects,
            background=background,
            answer=self._planned,
            listen=self._peers.listen,
            steady=steady,
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
                self._members.remember(history)
                self._journal.outbox.raise_above(history.told)
                self._saved_step = max(self._saved_step, history.saved_step)
                state = self._members.state
                if epoch <= state.epoch:
                    return state.newest
                newest = max(state.newest, history.generation)
            found = gather(self._agents, self._objects, epoch, newest, self._patience)
            with self._changed:
                self._members.begin_epoch(epoch, found, history)
                self._saves.begin_epoch(epoch, self._members.state.lineage)
                if not found.holders and self._members.state.unfinished():
                    self._saves.feed(Restoring())  # nobody has state: whatever is there may be it
                self._saves.measured(history.metrics.items())
                self._cadence.remember(history)
                self._peers.soon()
                self._adopt(found)
                if not self._members.state.unfinished():
                    self._saves.feed(Finishing())
                for what, reason in found.silent.items():
                    data = {"what": what, "reason": reason}
                    self._members.say("part.silent", data, "warning")
                self._changed.notify_all()
                return self._members.state.newest

    def drain(self, after: int, written: int | None = None) -> Drained:
        """Facts and rows numbered above `after`, and the status.

        written: what is numbered up to here is in the run directory (None: up to `after`). It is
        forgotten here, and ranks may forget its rows; the rest is kept for the next supervisor.
        """
        with self._changed:
            self._tick()
            return self._journal.outbox.drain(after, self.status(), written)

    def status(self) -> dict[str, Any]:
        """What status.json shows of the run; plain JSON. See status.py."""
        with self._changed:
            members = self._members
            return make_status(
                self._config,
                members.state,
                self._saves.book,
                self._journal,
                members.budget,
                self._cadence.status(),
            )

    def request_stop(self, reason: str) -> None:
        """Have the run end at its next boundary. Repeating it is harmless."""
        with self._changed:
            if not self._members.state.stopping:
                self._members.say("stop.requested", {"reason": reason})
            self._feed(StopRequested(reason=reason))
            now = self._steady()
            if now - self._stop_told_s < STOP_AGAIN_S:
                return
            self._stop_told_s = now
        self._background.submit(self._bell.ring)

    def rescue(self) -> str:
        """See Rescuer.rescue."""
        return self._rescuer.rescue()

    # ---- the ranks' calls ----

    def join(self, request: JoinRequest, wait_s: float) -> JoinReply:
        """Ask for a place: answered as soon as it is decided, else with Waiting after wait_s."""
        deadline_s = self._steady() + wait_s
        worker = request.worker_id
        with self._changed:
            replies = self._members.replies
            if self._blocked >= MAX_BLOCKED_JOINS:
                deadline_s = min(deadline_s, self._steady() + 0.1)
            replies.pop(worker, None)
            heard_epoch = self._joined(request, wait_s)
            self._blocked += 1
            try:
                while worker not in replies and self._steady() < deadline_s:
                    self._changed.wait(self._pause_s(deadline_s))
                    self._tick()
                    if heard_epoch != self._members.state.epoch and worker not in replies:
                        heard_epoch = self._joined(request, deadline_s - self._steady())
            finally:
                self._blocked -= 1
            return replies.get(worker) or self._waiting(worker)

    def lost(self, generation: int) -> bool:
        """True if a generation is over, or one of its members has ended: its others cannot meet."""
        with self._changed:
            state = self._members.state
            if state.newest != generation:
                return state.newest > generation  # a manager just re-created may know less
            over = state.phase in (Phase.FORMING, Phase.PLANNING, Phase.DONE)
            return over or any(worker in state.gone for worker in state.assigned)

    def persisting(
        self, step: int, generation: int, rank: int, world: int, final: bool = False
    ) -> None:
        """A rank has asked its agent to persist a step. final: it goes to every tier."""
        self._checkpoint(
            Persisting(step=step, generation=generation, rank=rank, world=world, final=final)
        )

    def rows(self, batch: RowBatch) -> int:
        """Rows of completed steps; see RowBatch.

        Returns the step up to which no row is needed again, for it is in the run directory: the
        sender keeps later ones with its state, and sends them again unless a later answer covers
        them. -1: not known yet, keep everything.
        """
        with self._changed:
            state = self._members.state
            fresh = self._journal.take_rows(batch, state.newest, state.lineage)
            self._saves.measured(metric_values(fresh, self._config.checkpoint.metric))
            self._cadence.rows(fresh)
            return self._journal.written_row_step if state.epoch else -1

    def spacing(self) -> float:
        """Seconds between two saves to disk that this run should have; 0: not known, or not asked
        for. Rank 0 asks every few seconds.
        """
        with self._changed:
            return self._cadence.disk_every_s

    def finished(self, worker_id: str, rank: int, value_json: str, stopped: bool = False) -> bool:
        """A worker's function has returned. rank -1: it never had a place.

        False: a manager that was re-created does not know its epoch yet; tell it again.
        """
        with self._changed:
            state = self._members.state
            if not state.epoch:
                return False
            held = state.rank_of(worker_id)
            if held is None and rank not in state.holders:
                held = rank  # a re-created manager that meets this member for the first time
            if held is None or held < 0 or held in self._journal.values:
                return True
            if self._journal.verdict.code:
                return True
            self._journal.note_finished(held, value_json, stopped)
            data = {
                "epoch": state.epoch,
                "rank": held,
                "worker_id": worker_id,
                "value_json": value_json,
                "stopped": stopped,
            }
            self._members.say("rank.finished", data)
            self._feed(MemberFinished(worker_id=worker_id, rank=rank))
            if not self._members.state.unfinished():
                self._saves.feed(Finishing())
            return True

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
            held = self._members.state.rank_of(worker_id)
            verdict = self._members.user_error(
                rank=rank if held is None else held,
                step=step,
                error_type=error_type,
                message=message,
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
            self._members.say("worker.error", self._members.with_marks(data), "error")
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
                    if fact.kind == "loop.begun":
                        self._journal.loop = dict(fact.data)
                        self._saves.data_id = str(fact.data.get("data") or "")
                    elif fact.kind == "agent.started":
                        self._saves.agent_started()
                        node = str(fact.data.get("node_id"))
                        self._background.submit(partial(self._meet_agent, node))
                        self._peers.soon()
                    self._journal.outbox.add(fact)
            case _:
                raise TypeError(f"no fact: {type(fact).__name__}")

    # ---- under the lock ----

    def _feed(self, event: Event) -> None:
        if self._members.feed(event):
            self._changed.notify_all()

    def _halt(self, verdict: Verdict) -> None:
        self._members.halt(verdict)
        self._changed.notify_all()

    def _joined(self, request: JoinRequest, hold_s: float) -> int:
        self._journal.note_completed(request.step or 0)
        self._feed(Joined(request=request, hold_s=max(0.0, hold_s)))
        return self._members.state.epoch

    def _waiting(self, worker: str) -> Waiting:
        state = self._members.state
        if worker not in state.waiting:
            return Waiting(spare=False, reason="the manager does not know this epoch yet")
        spare = state.phase is Phase.RUNNING
        reason = "every place is taken" if spare else "the generation is not complete"
        return Waiting(spare=spare, reason=reason)

    def _pause_s(self, deadline_s: float) -> float:
        """Until the answer is due, or a silent member loses its place."""
        now = self._steady()
        due = next_deadline(self._members.state)
        ends = [deadline_s, now + TICK_S] + ([due] if due is not None and due > now else [])
        return max(0.0, min(ends) - now)

    def _tick(self) -> None:
        self._feed(Tick())
        if self._steady() - self._ticked_s >= TICK_S:
            self._ticked_s = self._steady()
            self._saves.tick()
            self._peers.tick()
        state = self._members.state
        if state.holders and self._nodes.due(forming=state.phase is Phase.FORMING):
            self._background.submit(self._look_at_nodes)

    def _look_at_nodes(self) -> None:
        with self._changed:
            members, generation = list(self._journal.members), self._members.state.newest
        for fact in self._nodes.ended(members, generation):
            self._worker_exited(fact)

    def _adopt(self, found: Found) -> None:
        for checkpoint, manifest in checkpoints(found):
            if manifest is not None:
                self._saves.know_manifest(checkpoint.key, manifest)
            self._saves.feed(Adopted(checkpoint=checkpoint))

    def _plan(self, request: PlanRestore) -> None:
        self._background.submit(partial(self._planner.plan, request))

    # ---- from the background ----

    def _checkpoint(self, event: CheckpointEvent) -> None:
        with self._changed:
            self._saves.feed(event)

    def _note(self, note: Note) -> None:
        with self._changed:
            self._journal.say(
                note.kind,
                note.data,
                generation=note.generation,
                level=note.level,
                step=note.step,
            )

    def _say(self, kind: str, data: dict[str, Any]) -> None:
        with self._changed:
            self._members.say(kind, data)

    def _planned(self, answer: Answer) -> None:
        with self._changed:
            state = self._members.state
            if answer.plan_id != state.plan_id or state.phase is not Phase.PLANNING:
                return
            self._members.learn(max((i.fence for i in answer.inventories), default=0))
            if plan := answer.source and answer.source.plan:
                self._saves.feed(Restoring(steps=frozenset({(plan.step, plan.generation)})))
            self._adopt(Found(inventories=list(answer.inventories)))
            error = answer.error
            if answer.source is not None and answer.source.kind == "fresh":
                error = self._why_not_fresh()
            if answer.source is None or error:
                self._halt(Verdict(go_on=False, code="not_restorable", reason=error))
            else:
                self._feed(Planned(plan_id=answer.plan_id, source=answer.source))

    def _why_not_fresh(self) -> str:
        """A run that has saved something never begins again at step 0 on its own."""
        book = self._saves.book
        saved = max(self._saved_step, book.newest("disk") or 0, book.newest("object") or 0)
        if not saved:
            return ""
        return (
            f"step {saved} was saved, and no tier holds any checkpoint now; "
            "submit it under another run id to begin from scratch"
        )

    def _worker_exited(self, fact: WorkerExited) -> None:
        with self._changed:
            if self._members.exited(fact):
                self._feed(WorkerGone(worker_id=fact.worker_id))

    def _meet_agent(self, node: str) -> None:
        """An agent came (back): its disk may hold steps that nobody has told this manager."""
        try:
            inventory = self._agents.inventory(node)
        except (AgentError, PlatformError):
            return  # it says so again when it is back
        with self._changed:
            if self._members.state.epoch:
                self._members.learn(inventory.fence)
                self._adopt(Found(inventories=[inventory]))
