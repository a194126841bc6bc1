"""The generation machine, pure: who holds which rank, and when the next generation forms.

`advance(state, event, now) -> (state, actions)`. The manager feeds it what it hears and performs
what it answers; nothing in here waits, calls or reads a clock.

    phase     event                                      to        actions
    IDLE      Joined until `world` places are filled      PLANNING  PlanRestore
    RUNNING   Joined by a holder of this generation       FORMING   Emit generation.lost
    RUNNING   Joined by a holder whose answer was lost    RUNNING   Announce, the same again
    RUNNING   Joined by a newcomer                        RUNNING   - (it waits as a spare)
    RUNNING   all holders gone, all places filled         FORMING   Emit generation.lost, go on
    FORMING   all places filled, somebody holds state     RUNNING   Announce, generation.formed
    FORMING   all places filled, nobody holds state       PLANNING  PlanRestore
    PLANNING  Planned (of the newest plan)                RUNNING   Announce, generation.formed
    PLANNING  WorkerGone of a chosen member               FORMING   - (choose again)
    any       Joined of an older epoch, of a rank given   same      Refuse
              away, of a worker known to be gone
    any       MemberFinished of the last rank, Halted     DONE      Dismiss everyone
    DONE      Joined                                      DONE      Dismiss
    any       EpochStarted (newer)                        IDLE      - (RUNNING if holders live)

A place is filled by the holder of its rank when it waits, else by the newcomer that has waited
longest, once the holder is known to be gone. A holder that is merely silent keeps its place until
`silent_s` after the fault (`straggler_s` when a known death already explains the fault), or until
as many workers wait, all alive at one time, as the run has processes at all. Then its rank is
given away for good.

The number of a generation is the highest ever seen plus one, and one more after a manager was
re-created, for its predecessor may have announced one that left no trace. None is used twice.
"""

from __future__ import annotations

from dataclasses import replace

from relit_platform.facts import Assignment, JoinRequest
from relit_platform.machines.forming import announce, give_up_at, settle
from relit_platform.machines.generation_state import (
    HEARD_SLACK_S,
    MAX_EXCLUDED,
    MAX_GONE,
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
    Step,
    StopRequested,
    Tick,
    Waiter,
    WorkerGone,
)

__all__ = [
    "advance",
    "next_deadline",
    "GenerationState",
    "Phase",
    "Event",
    "Joined",
    "WorkerGone",
    "Planned",
    "EpochStarted",
    "MemberFinished",
    "StopRequested",
    "Halted",
    "Tick",
    "Action",
    "PlanRestore",
    "Announce",
    "Dismiss",
    "Refuse",
    "Emit",
]


def advance(state: GenerationState, event: Event, now: float) -> Step:
    """The next state and what has to be done; see the table above. Pure and total."""
    state, actions = _receive(state, event, now)
    state, more = settle(state, now)
    return state, actions + more


def next_deadline(state: GenerationState) -> float | None:
    """When a Tick could change something, in the clock of `now`; None if only an event can."""
    return give_up_at(state)


def _receive(state: GenerationState, event: Event, now: float) -> Step:
    match event:
        case Joined():
            return _joined(state, event, now)
        case WorkerGone():
            return _gone(state, event.worker_id), []
        case Planned():
            return _planned(state, event)
        case EpochStarted():
            return _epoch_started(state, event)
        case MemberFinished():
            return _finished(state, event)
        case StopRequested():
            return replace(state, stopping=state.stopping or event.reason or "stopped"), []
        case Halted():
            return _halted(state, event.reason)
        case Tick():
            return state, []


def _joined(state: GenerationState, event: Joined, now: float) -> Step:
    request = event.request
    worker = request.worker_id
    if request.epoch > state.epoch:
        return state, []  # its supervisor has not told us yet; it asks again
    if request.epoch < state.epoch:
        return state, [Refuse(worker_id=worker, reason="its supervisor's epoch is over")]
    if worker in state.gone:
        return state, [Refuse(worker_id=worker, reason="its process is known to have ended")]
    if state.phase is Phase.DONE:
        return state, [Dismiss(worker_ids=(worker,), reason=state.done_reason)]
    state = replace(state, lineage=state.lineage.merged(request.lineage))
    if state.rank_of(worker) is None and request.rank is not None:
        state, refusal = _claim(state, request)
        if refusal:
            return state, [Refuse(worker_id=worker, reason=refusal)]
    rank = state.rank_of(worker)
    if rank is None:
        # What a process without a rank holds may lie on a line that was cut off.
        return _wait(state, replace(request, step=None), event.hold_s, now), []
    if rank in state.finished:
        return state, [Dismiss(worker_ids=(worker,), reason="its rank has finished")]
    return _holder_joined(state, event, rank, now)


def _claim(state: GenerationState, request: JoinRequest) -> tuple[GenerationState, str]:
    """Settle a claim to a rank by a worker that is not in the book; the text refuses it."""
    rank, generation = request.rank, request.generation
    if rank is None or generation == 0 or rank >= state.world:
        return state, ""
    if generation > state.newest:
        # Only a manager that has just been re-created can know less than its members.
        return replace(
            state,
            newest=generation,
            holders={rank: request.worker_id},
            phase=Phase.RUNNING,
            assigned={},
            broken_at_s=None,
        ), ""
    if rank in state.holders:
        return state, f"rank {rank} was given away"
    if request.step is not None and not state.lineage.on_line(generation, request.step):
        return state, f"its step {request.step} was rolled back"
    return replace(state, holders={**state.holders, rank: request.worker_id}), ""


def _holder_joined(state: GenerationState, event: Joined, rank: int, now: float) -> Step:
    request = event.request
    worker = request.worker_id
    known = state.assigned.get(worker)
    if known and state.phase is Phase.RUNNING and _unanswered(state, known, request):
        return state, [Announce(assignments={worker: known})]
    first = worker not in state.waiting
    state = _wait(state, request, event.hold_s, now)
    if request.fault and request.fault.refused and request.fault.refused not in state.excluded:
        state = replace(state, excluded=(*state.excluded, request.fault.refused)[-MAX_EXCLUDED:])
    actions: list[Action] = []
    if first:
        actions.append(_fault_fact(request, rank))
    if state.phase is Phase.RUNNING:
        state = replace(state, phase=Phase.FORMING, broken_at_s=now)
        fault = request.fault.kind if request.fault else ""
        data = {"worker_id": worker, "rank": rank, "fault": fault}
        actions.append(Emit(kind="generation.lost", data=data))
    return state, actions


def _unanswered(state: GenerationState, known: Assignment, request: JoinRequest) -> bool:
    """True if this is the request that was answered, repeated because the answer was lost.

    A member that has tried to form the generation and failed opens another store, or has another
    fault to tell: then the generation is over.
    """
    before = state.answered.get(request.worker_id)
    if before is None or request.generation >= known.generation:
        return False
    return (before.endpoint, before.fault) == (request.endpoint, request.fault)


def _fault_fact(request: JoinRequest, rank: int) -> Emit:
    fault = request.fault
    return Emit(
        kind="member.fault",
        data={
            "worker_id": request.worker_id,
            "node_id": request.node_id,
            "rank": rank,
            "held_step": request.step,
            "fault": fault.kind if fault else "",
            "message": fault.message if fault else "",
            "at_s": fault.at_s if fault else request.at_s,
            "refused": fault.refused if fault else None,
        },
        level="warning",
    )


def _wait(
    state: GenerationState, request: JoinRequest, hold_s: float, now: float
) -> GenerationState:
    known = state.waiting.get(request.worker_id)
    waiter = Waiter(
        request=request,
        since_s=known.since_s if known else now,
        heard_s=now,
        heard_until_s=now + hold_s + HEARD_SLACK_S,
    )
    return replace(state, waiting={**state.waiting, request.worker_id: waiter})


def _gone(state: GenerationState, worker: str) -> GenerationState:
    gone = dict(state.gone)
    gone[worker] = None
    while len(gone) > MAX_GONE:
        del gone[next(iter(gone))]
    waiting = {w: waiter for w, waiter in state.waiting.items() if w != worker}
    return replace(state, gone=gone, waiting=waiting)


def _planned(state: GenerationState, event: Planned) -> Step:
    if state.phase is not Phase.PLANNING or event.plan_id != state.plan_id:
        return state, []
    return announce(state, dict(state.chosen), event.source)


def _epoch_started(state: GenerationState, event: EpochStarted) -> Step:
    newest = max(state.newest, event.seen_generation)
    lineage = state.lineage.merged(event.lineage)
    if event.epoch <= state.epoch:
        return replace(state, newest=newest, lineage=lineage), []
    over = tuple(w for w, waiter in state.waiting.items() if waiter.request.epoch < event.epoch)
    refusals: list[Action] = [
        Refuse(worker_id=w, reason="its supervisor's epoch is over") for w in over
    ]
    fresh = GenerationState(
        world=state.world,
        spares=state.spares,
        silent_s=state.silent_s,
        straggler_s=state.straggler_s,
        epoch=event.epoch,
        newest=newest,
        floor=max(state.floor, event.floor),
        phase=Phase.RUNNING if event.holders or event.finished else Phase.IDLE,
        holders={**event.holders, **event.finished},
        finished=dict(event.finished),
        gone=state.gone,
        lineage=lineage,
        plan_id=state.plan_id,
        excluded=state.excluded,
    )
    if not fresh.unfinished():
        fresh, dismissals = _halted(fresh, "finished")
        return fresh, [*refusals, *dismissals]
    return fresh, refusals


def _finished(state: GenerationState, event: MemberFinished) -> Step:
    if state.phase is Phase.DONE:
        return state, []
    rank = state.rank_of(event.worker_id)
    if rank is None and event.rank not in state.holders and 0 <= event.rank < state.world:
        # A re-created manager that has not met this member yet.
        state = replace(state, holders={**state.holders, event.rank: event.worker_id})
        rank = event.rank
    if rank is None:
        data = {"worker_id": event.worker_id, "rank": event.rank}
        return state, [Emit(kind="rank.stale_finish", data=data, level="warning")]
    waiting = {w: waiter for w, waiter in state.waiting.items() if w != event.worker_id}
    finished = {**state.finished, rank: event.worker_id}
    state = replace(state, finished=finished, waiting=waiting)
    if state.unfinished():
        return state, []
    return _halted(state, state.stopping or "finished")


def _halted(state: GenerationState, reason: str) -> Step:
    told = tuple(dict.fromkeys([*state.waiting, *state.holders.values()]))
    done = replace(state, phase=Phase.DONE, done_reason=reason, waiting={}, chosen={})
    return done, [Dismiss(worker_ids=told, reason=reason)]
