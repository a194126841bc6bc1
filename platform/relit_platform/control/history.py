"""What a new supervisor life learns from the run directory: all of it, from the events alone."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from relit_platform.control.row_book import metric_values
from relit_platform.control.row_tail import RowTail
from relit_platform.facts import FinishedRank, RunHistory
from relit_platform.machines.failure_rates import kind_of
from relit_platform.machines.save_costs import Ended, ends_of, steps_of
from relit_storage.errors import ObjectMissingError
from relit_storage.run import layout
from relit_storage.run.event_log import read_rows
from relit_storage.stores.protocol import ObjectStore


@dataclass(slots=True)
class History:
    """A fold of the event log, kept up to date by `add`. Times are Unix seconds.

    acked: keys of commands that were obeyed already, in this life or an earlier one. agents: pid
    of the newest agent of each node. loop: how long the run is and what it reads. state: the
    run's, by its last supervisor. told: number of the manager's newest fact that was written.
    metrics: by step, the number by which checkpoints are judged. failures: closed incidents, by the
    tier that the state came from in the end, formed_tier. trained_s: the steps of all rows
    together, up to last_end. spacing: what `auto` found last. forming: the newest generation and
    its start, as long as it may still be refused its state: then it cuts nothing off, so that the
    run goes back to what was refused once that is whole again.
    """

    started_at_s: float = 0.0
    generation: int = 0
    last_row_step: int = 0
    recoveries: int = 0
    lineage: list[tuple[int, int]] = field(default_factory=list)
    acked: set[str] = field(default_factory=set)
    agents: dict[str, int] = field(default_factory=dict)
    state: str = ""
    told: int = 0
    saved_step: int = 0
    loop: dict[str, Any] = field(default_factory=dict)
    finished: list[FinishedRank] = field(default_factory=list)
    metrics: dict[int, float] = field(default_factory=dict)
    formed_tier: str = ""
    failures: dict[str, int] = field(default_factory=dict)
    trained_s: float = 0.0
    last_end: tuple[Ended, ...] = ()
    spacing: dict[str, Any] = field(default_factory=dict)
    tail: RowTail = field(default_factory=RowTail)
    forming: tuple[int, int] | None = None

    @classmethod
    def read(
        cls, store: ObjectStore, events: Iterable[Mapping[str, Any]], metric: str = ""
    ) -> History:
        """Fold all events of the run; reads its rows, so it blocks on the store.

        metric: the name in them of the number by which checkpoints are judged.
        """
        history = cls()
        for event in events:
            history.add(event)
        rows = read_rows(store)
        history.metrics = dict(metric_values(rows, metric))
        for row in rows:
            history.add_row(row)
            history.wrote(row)
        history.started_at_s = _submitted_at(store)
        return history

    def add(self, event: Mapping[str, Any]) -> None:
        """Fold one event in."""
        data = event.get("data") or {}
        kind = event["kind"]
        self.told = max(self.told, int(event.get("number") or 0))
        if kind == "generation.formed":
            generation = int(event.get("gen") or data.get("generation") or 0)
            self.generation = max(self.generation, generation)
            self.formed_tier = str(data.get("tier") or "")
            start = data.get("start_step", data.get("step", event.get("step")))
            known = [*self.lineage, *([self.forming] if self.forming else [])]
            if start is not None and generation not in [g for g, _ in known]:
                self._began()
                self.forming = (generation, int(start))
        elif kind in ("generation.lost", "member.fault") and data.get("fault") == "restore_refused":
            if self.forming and self.forming[0] == event.get("gen"):
                self.forming = None
        elif kind == "incident.closed":
            self.recoveries += 1
            kind_of_it = kind_of(self.formed_tier)
            self.failures[kind_of_it] = self.failures.get(kind_of_it, 0) + 1
        elif kind == "run.state":
            self.state = str(data.get("state") or "")
        elif kind == "control.acked":
            self.acked.add(str(data.get("command")))
        elif kind == "loop.begun":
            self.loop = dict(data)
        elif kind == "rank.finished" and "value_json" in data:
            self.finished.append(FinishedRank(**data))
        elif kind == "ckpt.committed":
            self.saved_step = max(self.saved_step, int(event.get("step") or 0))
        elif kind == "rows.lost":
            self.tail.lost(int(data["before"]) - 1)
        elif kind == "ckpt.respaced":
            self.spacing = dict(data)
        elif kind == "agent.started":
            self.agents[str(data.get("node_id"))] = int(data.get("pid") or 0)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Fold one metric row in; one that comes again adds nothing."""
        ends = tuple(ends_of([row]))
        if not self.last_end or ends[0].step > self.last_end[0].step:
            self.trained_s += sum(step.seconds for step in steps_of([*self.last_end, *ends]))
            self.last_end = ends

    def wrote(self, row: Mapping[str, Any]) -> None:
        """A metric row is in the run directory."""
        step, generation = int(row["step"]), int(row.get("generation") or 0)
        if self.forming and generation >= self.forming[0]:
            self._began()
        self.last_row_step = max(self.last_row_step, step)
        self.tail.wrote(generation, step)

    def for_manager(self) -> RunHistory:
        """The part that the manager needs to begin an epoch."""
        if self.forming:  # nobody has said that it was refused: it may have begun by now
            began = replace(self, lineage=[*self.lineage], tail=copy.deepcopy(self.tail))
            began._began()
            return began.for_manager()
        return RunHistory(
            generation=self.generation,
            last_row_step=self.last_row_step,
            rows_whole_to=self.tail.whole_to,
            rows_again_at=self.tail.next_whole,
            recoveries=self.recoveries,
            lineage=tuple(sorted(self.lineage)),
            loop=self.loop,
            finished=tuple(self.finished),
            saved_step=self.saved_step,
            told=self.told,
            metrics=self.metrics,
            failures=dict(self.failures),
            trained_s=self.trained_s,
            spacing=self.spacing,
        )

    def _began(self) -> None:
        """What formed last had its state: the line goes on from there."""
        if self.forming:
            self.lineage.append(self.forming)
            self.tail.formed(*self.forming)
        self.forming = None


def _submitted_at(store: ObjectStore) -> float:
    """When the run was submitted, from run.json; now, if that cannot be read."""
    try:
        return float(json.loads(store.get(layout.RUN))["created_at_s"])
    except (ObjectMissingError, ValueError, KeyError, TypeError):
        return time.time()
