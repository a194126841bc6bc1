"""What the run has shown so far: rows, the newest step, values, and the facts for the log.

Not thread-safe; the coordinator's lock guards it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from relit_platform.control.outbox import Outbox
from relit_platform.control.row_book import RowBook
from relit_platform.facts import Fact, Json, RowBatch, RunHistory, Verdict
from relit_platform.machines.lineage import Lineage


class Journal:
    """completed_step is the newest step that any generation has completed, rolled back or not.

    heard: called with each fact of the manager's own, as it is said.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.outbox = Outbox(clock())
        self.heard: Callable[[Fact], None] = lambda fact: None
        self.rows = RowBook()
        self.completed_step = 0
        self.members: list[dict[str, Any]] = []
        self.values: dict[int, str] = {}
        self.stopped_ranks: set[int] = set()
        self.verdict = Verdict(go_on=True)
        self.loop: dict[str, Any] = {}
        self.memory_steps: dict[int, int] = {}
        self._announced_generation = 0
        self._to_beat = 0  # the first new step of this generation is above it

    def say(
        self,
        kind: str,
        data: Mapping[str, Any],
        *,
        generation: int,
        level: Any = "info",
        step: int | None = None,
        at_s: float | None = None,
    ) -> None:
        """One fact of the manager's own."""
        fact = Fact(
            kind=kind,
            at_s=self._clock() if at_s is None else at_s,
            src="manager",
            generation=generation,
            step=step,
            level=level,
            data=dict(data),
        )
        self.outbox.add(fact)
        self.heard(fact)

    def begin_epoch(self, history: RunHistory, members: list[dict[str, Any]]) -> None:
        """Nothing has finished; rows that the supervisor does not have are asked for again.

        members: those that were found running, by a manager that was re-created.
        """
        self.loop = self.loop or dict(history.loop)
        self.rows.resume(history.last_row_step, history.rows_whole_to, history.rows_again_at)
        self.note_completed(history.last_row_step)
        self.values.clear()
        self.stopped_ranks.clear()
        self.members = members
        self.memory_steps = {}
        self.verdict = Verdict(go_on=True)

    def note_completed(self, step: int) -> None:
        """Somebody holds the state after `step`, or has written that it did."""
        self.completed_step = max(self.completed_step, step)

    @property
    def written_row_step(self) -> int:
        """Rows of all steps up to here are in the run directory."""
        step, first = self.rows.needed_after, self.outbox.first_unwritten_row
        return step if first is None else min(step, first - 1)

    def note_formed(self, data: Mapping[str, Any]) -> None:
        """A generation was announced; data as in its fact."""
        self.rows.rewind(int(data["start_step"]))
        self.members = [dict(member) for member in data["members"]]
        self.memory_steps = {}
        self._to_beat = max(self.completed_step, int(data["start_step"]))

    def note_finished(self, rank: int, value_json: str, stopped: bool) -> None:
        """A rank's function returned; the first answer counts."""
        if rank not in self.values:
            self.values[rank] = value_json
            if stopped:
                self.stopped_ranks.add(rank)

    def take_rows(self, batch: RowBatch, newest: int, lineage: Lineage) -> list[dict[str, Json]]:
        """Queue new rows and alarms, and say when a generation has completed its first new step.

        Returns the rows that are news.
        """
        fresh, alarms = self.rows.take(batch, lineage, self._clock())
        if batch.generation == newest and (lost := self.rows.skip_lost(batch.oldest_kept)):
            alarms.append(lost)
        for kind, level, data in alarms:
            self.say(kind, data, generation=newest, level=level, step=data["step"])
        for row in fresh:
            self.outbox.add(row)
            self.note_completed(int(row["step"]))
            self._first_new_step(row, newest)
        if batch.memory_step is not None and batch.generation == newest:
            self.memory_steps[batch.rank] = batch.memory_step
        return fresh

    @property
    def memory_step(self) -> int | None:
        """The newest step that every rank that said so has whole in shared memory."""
        return min(self.memory_steps.values(), default=None)

    @property
    def value(self) -> Json:
        """What rank 0 returned, or None."""
        text = self.values.get(0)
        return None if text is None else json.loads(text)

    def _first_new_step(self, row: Mapping[str, Any], newest: int) -> None:
        generation, step = int(row["generation"]), int(row["step"])
        if generation != newest or generation == self._announced_generation:
            return
        if step > self._to_beat:
            self._announced_generation = generation
            at_s = float(row["at_s"])
            self.say("step.completed", {"step": step}, generation=newest, step=step, at_s=at_s)
