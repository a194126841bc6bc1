"""When the places of a generation are filled, and by whom: the pure heart of recovery.

Used by generation.py only. `settle` runs after every event, so no rule here needs to know which
event made it true.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from relit_platform.facts import Assignment, StateSource
from relit_platform.machines.generation_state import (
    Action,
    Announce,
    Dismiss,
    Emit,
    GenerationState,
    Phase,
    PlanRestore,
    Step,
    Waiter,
)


def settle(state: GenerationState, now: float) -> Step:
    """Form, plan or dismiss as far as the state allows now."""
    if state.phase is Phase.DONE:
        return state, []
    if state.phase is Phase.PLANNING:
        if all(w in fresh_waiters(state, now) for w in state.chosen.values()):
            return state, []
        state = replace(state, phase=Phase.FORMING, chosen={})
    if state.stopping and _nobody_holds_state(state):
        return _stop_idle(state)
    places = fill(state, now)
    if places is None:
        return state, []
    actions: list[Action] = []
    if state.phase is Phase.RUNNING:
        # Every holder is gone: nobody was left to say that the generation is over.
        state = replace(state, phase=Phase.FORMING, broken_at_s=now)
        actions.append(Emit(kind="generation.lost", data={"worker_id": "", "rank": None}))
    state = replace(state, filled_at_s=now, reason=_reason(state, places))
    state, more = _source_or_plan(state, places)
    return state, actions + more


def fill(state: GenerationState, now: float) -> dict[int, str] | None:
    """Worker by rank if every place that must be filled is, else None.

    Once some ranks have finished, only unfinished ones need a place, and members that are still
    busy after their loop are not waited for.
    """
    waiters = fresh_waiters(state, now)
    silent = silent_ranks(state, waiters)
    if silent and not _given_up(state, waiters, now):
        return None
    wanted = state.unfinished()
    if state.finished:
        wanted = [rank for rank in wanted if rank not in silent]
    places = {r: w for r, w in state.holders.items() if r in wanted and w in waiters}
    holders = set(state.holders.values())
    newcomers = sorted(
        (w for w in waiters if w not in holders), key=lambda w: (waiters[w].since_s, w)
    )
    free = [rank for rank in wanted if rank not in places]
    if not wanted or len(newcomers) < len(free):
        return None
    places.update(zip(free, newcomers, strict=False))
    return dict(sorted(places.items()))


def fresh_waiters(state: GenerationState, now: float) -> dict[str, Waiter]:
    """Who waits and was heard of lately enough to be alive."""
    return {w: waiter for w, waiter in state.waiting.items() if waiter.heard_until_s >= now}


def silent_ranks(state: GenerationState, waiters: Mapping[str, Waiter]) -> list[int]:
    """Unfinished ranks whose holder neither waits nor is known to be gone."""
    return [
        rank
        for rank, holder in sorted(state.holders.items())
        if rank not in state.finished
        and holder not in waiters
        and holder not in state.gone
        and holder not in state.waiting  # waited once and fell silent: counts as dead
    ]


def give_up_at(state: GenerationState) -> float | None:
    """When silent holders lose their ranks by time alone; None if that is not at stake."""
    if state.phase is Phase.DONE or not silent_ranks(state, state.waiting):
        return None
    if state.broken_at_s is not None:
        began = state.broken_at_s
    elif state.finished and state.waiting:
        began = min(waiter.since_s for waiter in state.waiting.values())
    else:
        return None
    explained = _refused_files(state) or any(
        holder in state.gone for rank, holder in state.holders.items() if rank not in state.finished
    )
    return began + (state.straggler_s if explained and not state.finished else state.silent_s)


def _refused_files(state: GenerationState) -> bool:
    """Somebody has refused a file, while the others may be reading theirs, in no collective that
    would break: their silence says nothing.
    """
    faults = (waiter.request.fault for waiter in state.waiting.values())
    return any(fault is not None and fault.kind == "restore_refused" for fault in faults)


def _given_up(state: GenerationState, waiters: Mapping[str, Waiter], now: float) -> bool:
    if _all_processes_wait(state, waiters):
        return True
    deadline = give_up_at(state)
    return deadline is not None and now >= deadline


def _all_processes_wait(state: GenerationState, waiters: Mapping[str, Waiter]) -> bool:
    """As many as the run has processes were alive when the youngest came: nobody else can be.

    A waiter that has not asked again since then may have died and be the one it replaces.
    """
    if len(waiters) < state.world + state.spares:
        return False
    youngest_s = max(waiter.since_s for waiter in waiters.values())
    return all(waiter.heard_s >= youngest_s for waiter in waiters.values())


def announce(state: GenerationState, places: Mapping[int, str], source: StateSource) -> Step:
    """Number the generation and answer its members. places: worker by rank, all waiting."""
    number = max(state.newest, state.floor) + 1
    requests = {worker: state.waiting[worker].request for worker in places.values()}
    assert all(r.step is None or r.step <= source.step for r in requests.values()), (
        "a member holds a newer state than the source"
    )
    lineage = state.lineage.started(number, source.step)
    ranks = sorted(places)
    members = tuple(places[rank] for rank in ranks)
    assigned = {
        worker: Assignment(
            generation=number,
            epoch=state.epoch,
            rank=index,
            world=len(members),
            members=members,
            endpoint=requests[members[0]].endpoint,
            source=source,
            epilogue=bool(state.finished),
            reason=state.reason,
            lineage=lineage.entries,
        )
        for index, worker in enumerate(members)
    }
    formed = _formed_fact(state, places, source, number)
    state = replace(
        state,
        newest=number,
        phase=Phase.RUNNING,
        holders={**state.holders, **places},
        waiting={w: waiter for w, waiter in state.waiting.items() if w not in requests},
        assigned=assigned,
        answered=requests,
        chosen={},
        lineage=lineage,
        broken_at_s=None,
    )
    return state, [Announce(assignments=assigned), formed]


def _source_or_plan(state: GenerationState, places: Mapping[int, str]) -> Step:
    ranks = sorted(places)
    held = {
        index: state.waiting[places[rank]].request.step
        for index, rank in enumerate(ranks)
        if state.waiting[places[rank]].request.step is not None
    }
    if held:
        step = max(s for s in held.values() if s is not None)
        holder = min(index for index, s in held.items() if s == step)
        return announce(state, places, StateSource(kind="member", step=step, rank=holder))
    nodes = sorted({state.waiting[w].request.node_id for w in places.values()})
    plan_id = state.plan_id + 1
    state = replace(state, phase=Phase.PLANNING, plan_id=plan_id, chosen=dict(places))
    plan = PlanRestore(
        plan_id=plan_id,
        epoch=state.epoch,
        generation=state.newest,
        nodes=tuple(nodes),
        excluded=state.excluded,
        lineage=state.lineage,
    )
    return state, [plan]


def _nobody_holds_state(state: GenerationState) -> bool:
    alive = [
        holder
        for rank, holder in state.holders.items()
        if rank not in state.finished and holder not in state.gone
    ]
    held = [w for w, waiter in state.waiting.items() if waiter.request.step is not None]
    return not alive and not held


def _stop_idle(state: GenerationState) -> Step:
    told = tuple(state.waiting)
    done = replace(state, phase=Phase.DONE, done_reason=state.stopping, waiting={}, chosen={})
    return done, [Dismiss(worker_ids=told, reason=state.stopping)]


def _reason(state: GenerationState, places: Mapping[int, str]) -> str:
    if not state.holders:
        return "start"
    new = [rank for rank, worker in places.items() if state.holders.get(rank) != worker]
    if not new:
        return "same members again"
    return "new worker in rank " + ", ".join(str(rank) for rank in new)


def _formed_fact(
    state: GenerationState, places: Mapping[int, str], source: StateSource, number: int
) -> Emit:
    members = [
        {
            "rank": rank,
            "worker_id": worker,
            "node_id": state.waiting[worker].request.node_id,
            "pid": state.waiting[worker].request.pid,
            "newcomer": state.holders.get(rank) != worker,
            "waiting_since_s": state.waiting[worker].since_s,
        }
        for rank, worker in sorted(places.items())
    ]
    plan = source.plan
    return Emit(
        kind="generation.formed",
        data={
            "generation": number,
            "world": len(places),
            "start_step": source.step,
            "source": source.kind,
            "source_rank": source.rank,
            "tier": plan.tier if plan else "",
            "refusals": list(plan.refusals) if plan else [],
            "members": members,
            "reason": state.reason,
            "epilogue": bool(state.finished),
            "filled_at_s": state.filled_at_s,
        },
    )
