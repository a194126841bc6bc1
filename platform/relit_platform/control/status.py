"""The status of a run as the manager knows it: plain JSON, the body of status.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relit_platform.control.journal import Journal
from relit_platform.machines.budget import BudgetState
from relit_platform.machines.checkpoint_state import CheckpointBook
from relit_platform.machines.generation import GenerationState, Phase
from relit_platform.run_config import RunConfig


def make_status(
    config: RunConfig,
    state: GenerationState,
    book: CheckpointBook,
    journal: Journal,
    budget: BudgetState,
    spacing: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """finished: every rank returned. stopped: the run ended because somebody asked. verdict: ""
    or why it must not go on. saving: some step is still on its way to a tier. spacing: what
    `auto` has found, with the reason; None where nothing is automatic or known.
    """
    return {
        "epoch": state.epoch,
        "generation": state.newest,
        "phase": str(state.phase),
        "world": len(journal.members) if state.newest else 0,
        "waiting": len(state.waiting),
        "step": journal.rows.newest,
        "completed_step": journal.completed_step,
        "loss": journal.rows.loss,
        "total_steps": journal.loop.get("total_steps"),
        "committed": {
            "memory": journal.memory_step,
            "disk": book.newest("disk"),
            "object": book.newest("object"),
        },
        "workers": journal.members,
        "recoveries": budget.recoveries,
        "lineage": [list(entry) for entry in state.lineage.entries],
        "saving": book.saving,
        "spacing": spacing,
        "ignored": {**book.ignored, "rows": journal.rows.refused_count},
        "placement": {"workers": config.scaling.workers, "spares": config.scaling.spares},
        **_outcome(state, journal),
        **_rates(journal),
    }


def _outcome(state: GenerationState, journal: Journal) -> dict[str, Any]:
    done = state.phase is Phase.DONE
    verdict = journal.verdict
    text = "" if verdict.go_on else f"{verdict.code}: {verdict.reason}"
    everyone = not state.unfinished() and len(journal.values) == state.world
    asked = bool(journal.stopped_ranks) or bool(state.stopping and not everyone)
    return {
        "verdict": text,
        "verdict_code": verdict.code,
        "finished": done and everyone and not text and not journal.stopped_ranks,
        "stopped": done and not text and asked,
        "stopping": bool(state.stopping),
        "stop_reason": state.stopping,
        "value": journal.value,
    }


def _rates(journal: Journal) -> dict[str, Any]:
    samples_per_s = journal.rows.rate("samples")
    per_sample = journal.loop.get("tokens_per_sample") or 0
    tokens_per_s = samples_per_s * per_sample if samples_per_s and per_sample else None
    return {
        "samples_per_s": None if samples_per_s is None else round(samples_per_s, 3),
        "tokens_per_s": None if tokens_per_s is None else round(tokens_per_s, 1),
    }
