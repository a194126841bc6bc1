"""The incident machine, pure: facts in, one record per recovery out.

    state, records = advance(state, fact)

An incident opens with the first evidence against a member of the running generation and closes with
the first step that nobody had completed before. What happens in between, second faults included,
belongs to it. Facts that it reads (others are passed over):

    worker.exited      of a rank, unless `expected`        strong evidence: the process has ended
                       `node_lost`                         stronger: with all of its node
    worker.error       the user's loop raised              names the exception
    member.fault       a member's collective broke, or it refused a checkpoint file
    epoch.started      after workers ran, and no run.restarting came: the supervisor was lost
    run.epoch          `after` another supervisor that did not end the run: the same, and all that
                       is heard of it when the manager, which knew the workers, died as well
    run.restarting     before any other evidence: Ray Train's controller was lost
    generation.lost    the manager gave the generation up
    generation.formed  all places filled and a source of state chosen
    rank.entered       a rank is in the group and has its state
    step.completed     the first new step of a generation
    loop.begun         how many steps there are: after the last, being in place again is all
    rank.finished      the loop is over: it has recovered, with no step left to show it

Phases follow each other without gap, so their sum is the downtime:

    detect      from the fault (process exit, else first evidence) until the manager knew
    wait        until every place of the next generation was filled
    rendezvous  until all ranks were in the group, without
    restore     planning, reading and broadcasting state
    replay      until the first new step was complete
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relit_platform.facts import Fact
from relit_platform.machines.incident_record import make_record
from relit_platform.machines.incident_state import (
    MAX_EVIDENCE,
    Evidence,
    IncidentState,
    OpenIncident,
)

__all__ = ["IncidentState", "advance", "finish"]

Records = list[dict[str, Any]]

FAULT_WEIGHTS = {
    "user": ("exception", 4),
    "restore_refused": ("restore_refused", 2),
    "timeout": ("timeout", 1),
}


def advance(state: IncidentState, fact: Fact) -> tuple[IncidentState, Records]:
    """Feed one fact; records of incidents that it closed ("{id}" in the headline is the number)."""
    match fact.kind:
        case "worker.exited" | "worker.error" | "member.fault":
            return _blame(state, fact), []
        case "epoch.started":
            return _epoch_started(state, fact, len(fact.data.get("ended") or ())), []
        case "run.epoch" if fact.data.get("after"):
            return _epoch_started(state, fact, state.world), []
        case "run.restarting":
            return _restarting(state, fact), []
        case "generation.lost":
            return _lost(state, fact), []
        case "generation.formed":
            return _formed(state, fact), []
        case "rank.entered":
            return _entered(state, fact)
        case "step.completed":
            return _completed(state, fact)
        case "loop.begun":
            return replace(state, total_steps=int(fact.data.get("total_steps") or 0)), []
        case "rank.finished":
            return _finished(state, fact)
    return state, []


def finish(state: IncidentState, now: float) -> tuple[IncidentState, Records]:
    """The run is over: an incident that is still open was never recovered from, and says so."""
    if state.open is None:
        return state, []
    return replace(state, open=None), [make_record(state.open, now, recovered=False)]


def _blame(state: IncidentState, fact: Fact) -> IncidentState:
    evidence = _evidence(fact)
    if evidence is None:
        return state
    found = state.open or _opened(state, evidence, fact.generation)
    if len(found.evidence) < MAX_EVIDENCE and evidence not in found.evidence:
        found = replace(found, evidence=(*found.evidence, evidence))
    completed = int(fact.data.get("completed_step") or 0)
    if not found.formed:
        # Only before the next generation: later ones may count steps that this one has won.
        found = replace(found, completed_step=max(found.completed_step, completed))
    noticed = min(found.noticed_at_s, evidence.noticed_at_s)
    return replace(state, open=replace(found, noticed_at_s=noticed))


def _opened(state: IncidentState, evidence: Evidence, generation: int) -> OpenIncident:
    return OpenIncident(
        evidence=(),
        completed_step=state.step,
        generation=max(state.generation, generation),
        world_before=state.world,
        noticed_at_s=evidence.noticed_at_s,
    )


def _evidence(fact: Fact) -> Evidence | None:
    data = fact.data
    rank = data.get("rank")
    if rank is None or data.get("expected"):
        return None  # a spare, a finished rank: nobody waits for it
    if fact.kind == "worker.exited" and data.get("node_lost"):
        method, weight, text = "node_lost", 4, "Ray has declared its node dead"
    elif fact.kind == "worker.exited":
        method, weight = "exit", 3
        text = f"process {data.get('pid')} ended in phase {data.get('last_phase') or 'unknown'}"
    elif fact.kind == "worker.error":
        method, weight = "exception", 4
        text = f"{data.get('type')}: {data.get('message')}"
    else:
        method, weight = FAULT_WEIGHTS.get(str(data.get("fault")), ("collective_error", 0))
        text = str(data.get("message") or "")
    at_s = float(data.get("at_s") or fact.at_s)
    step = data.get("last_step", data.get("step", fact.step))
    return Evidence(
        method=method,
        weight=weight,
        at_s=at_s,
        noticed_at_s=float(data.get("noticed_at_s") or fact.at_s),
        rank=int(rank),
        worker_id=str(data.get("worker_id") or ""),
        node_id=str(data.get("node_id") or ""),
        pid=int(data.get("pid") or 0),
        step=step,
        text=text[:300],
    )


def _epoch_started(state: IncidentState, fact: Fact, num_ended: int) -> IncidentState:
    if not num_ended or (state.open is not None and state.open.restarted):
        return state
    evidence = Evidence(
        method="controller",
        weight=5,
        at_s=fact.at_s,
        noticed_at_s=fact.at_s,
        rank=None,
        text="a new supervisor took over; the workers of the old one were ended",
    )
    found = state.open or _opened(state, evidence, fact.generation)
    completed = max(found.completed_step, int(fact.data.get("completed_step") or 0))
    if all(known.method != evidence.method for known in found.evidence):
        found = replace(found, evidence=(*found.evidence, evidence)[:MAX_EVIDENCE])
    # Whoever lost the log's beginning has seen no generation before.
    world = found.world_before or num_ended
    return replace(state, open=replace(found, completed_step=completed, world_before=world))


def _restarting(state: IncidentState, fact: Fact) -> IncidentState:
    """Ray Train's run ended early. With workers known to be dead that is the consequence; without,
    its controller was lost and took the workers with it.
    """
    if state.open is not None:
        return replace(state, open=replace(state.open, restarted=True))
    evidence = Evidence(
        method="ray_train",
        weight=5,
        at_s=fact.at_s,
        noticed_at_s=fact.at_s,
        rank=None,
        text=str(fact.data.get("error") or "").split("\n", 1)[0][:300],
    )
    found = _opened(state, evidence, state.generation)
    found = replace(found, evidence=(evidence,), restarted=True)
    completed = max(found.completed_step, int(fact.data.get("completed_step") or 0))
    return replace(state, open=replace(found, completed_step=completed))


def _lost(state: IncidentState, fact: Fact) -> IncidentState:
    if state.open is None:
        return state
    completed = int(fact.data.get("completed_step") or 0)
    found = replace(
        state.open,
        noticed_at_s=min(state.open.noticed_at_s, fact.at_s),
        completed_step=max(state.open.completed_step, completed),
        budget=dict(fact.data.get("budget") or state.open.budget),
    )
    return replace(state, open=found)


def _formed(state: IncidentState, fact: Fact) -> IncidentState:
    data = fact.data
    generation = int(data["generation"])
    world, start = int(data["world"]), int(data["start_step"])
    found = state.open
    if found is not None:
        found = replace(
            found,
            formed=generation,
            formed_at_s=fact.at_s,
            filled_at_s=float(data.get("filled_at_s") or fact.at_s),
            formed_data=data,
            entered={},
            restore_s=0.0,
            completed_step=max(found.completed_step, start),
        )
    return replace(
        state, generation=generation, world=world, step=max(state.step, start), open=found
    )


def _entered(state: IncidentState, fact: Fact) -> tuple[IncidentState, Records]:
    found = state.open
    if found is None or fact.generation != found.formed:
        return state, []
    rank = int(fact.data.get("rank") or 0)
    restore_s = max(found.restore_s, float(fact.data.get("restore_s") or 0.0))
    found = replace(found, entered={**found.entered, rank: fact.at_s}, restore_s=restore_s)
    whole = len(found.entered) >= int(found.formed_data.get("world") or 0)
    start, total = int(found.formed_data.get("start_step") or 0), state.total_steps
    if whole and (found.formed_data.get("epilogue") or start >= total > 0):
        # Every step is done: being in place again is all there is to recover.
        record = make_record(found, max(found.entered.values()), recovered=True)
        return replace(state, open=None), [record]
    return replace(state, open=found), []


def _finished(state: IncidentState, fact: Fact) -> tuple[IncidentState, Records]:
    """A loop that came to its end has recovered, whatever else was heard of it."""
    found = state.open
    if found is None or not found.formed or fact.generation < found.formed:
        return state, []
    return replace(state, open=None), [make_record(found, fact.at_s, recovered=True)]


def _completed(state: IncidentState, fact: Fact) -> tuple[IncidentState, Records]:
    step = int(fact.data.get("step") or fact.step or 0)
    found = state.open
    state = replace(state, step=max(state.step, step))
    if found is None or not found.formed or fact.generation < found.formed:
        return state, []
    if step <= found.completed_step:
        return state, []
    return replace(state, open=None), [make_record(found, fact.at_s, recovered=True)]
