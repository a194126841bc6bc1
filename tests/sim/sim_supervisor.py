"""The supervisor and Ray Train in one: epochs, respawns, draining, and the written record."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from relit_platform.control.ports import AgentError
from relit_platform.control.row_tail import RowTail
from relit_platform.facts import Drained, Fact, FinishedRank, RunHistory
from relit_storage.errors import StorageError

if TYPE_CHECKING:
    from sim_rank import SimRank
    from sim_run import SimRun

DRAIN_EVERY_S = 0.2
FLUSH_EVERY_S = 0.9


class SimSupervisor:
    """facts and rows are what is written; what is drained but not flushed dies with it."""

    def __init__(self, run: SimRun) -> None:
        self._run = run
        self._clock = run.clock
        self.facts: list[Fact] = []
        self.rows: dict[int, dict[str, Any]] = {}
        self.verdict = ""
        self.over = False
        self.epoch = 0
        self._life = 0
        self._after = self._written = 0
        self._manager_life = -1
        self._unwritten: list[Fact | dict[str, Any]] = []
        self._workers: list[SimRank] = []
        self._respawning = 0
        self._ready = False
        self._down = False
        self._new_epoch()

    def kill(self) -> None:
        """Its workers end with it, at once or when the next epoch seals the node."""
        if self.over or self._down:
            return
        self._down = True
        self._clock.say("supervisor dies")
        self._life += 1
        self._unwritten.clear()
        self._ready = False
        for worker in self._workers:
            if self._clock.chance(0.8):
                worker.kill("its supervisor died")
        self._workers = []
        self._after = self._written = 0
        self._clock.after(self._clock.between(0.5, 2.0), self._new_epoch)

    def _new_epoch(self) -> None:
        self.epoch += 1
        self._down = False
        self._respawning = 0
        self._ready = False
        self._begin(self._life)
        self._loop(self._life, self.epoch)
        self._flush_loop(self._life, self.epoch)

    def _begin(self, life: int) -> None:
        """start_epoch until it works, then the worker group."""
        if life != self._life:
            return
        try:
            self._run.manager.call("start_epoch", self.epoch, self._history())
        except (ConnectionError, AgentError, StorageError):
            self._clock.after(0.3, lambda: self._begin(life))
            return
        count = self._run.config.scaling.workers + self._run.config.scaling.spares
        self._workers = [self._run.new_rank(self.epoch) for _ in range(count)]
        self._ready = True

    def _history(self) -> RunHistory:
        formed = [f for f in self._known() if f.kind == "generation.formed"]
        lineage = tuple((f.generation, int(f.data["start_step"])) for f in formed)
        respaced = [f for f in self._known() if f.kind == "ckpt.respaced"]
        return RunHistory(
            generation=max((g for g, _ in lineage), default=0),
            last_row_step=max(self.rows, default=0),
            rows_whole_to=self._tail(sorted(lineage)).whole_to,
            rows_again_at=self._tail(sorted(lineage)).next_whole,
            lineage=lineage,
            finished=tuple(
                FinishedRank(**f.data) for f in self._known() if f.kind == "rank.finished"
            ),
            spacing=next((f.data for f in reversed(respaced)), {}),
        )

    def _tail(self, lineage: Sequence[tuple[int, int]]) -> RowTail:
        """As History folds it."""
        tail = RowTail()
        for generation, start in lineage:
            tail.formed(generation, start)
        for step in sorted(self.rows):
            tail.wrote(int(self.rows[step]["generation"]), step)
        return tail

    def _known(self) -> list[Fact]:
        """Written or about to be: as long as this life lasts it knows both."""
        return self.facts + [f for f in self._unwritten if isinstance(f, Fact)]

    # ---- rounds ----

    def _loop(self, life: int, epoch: int) -> None:
        if life != self._life or epoch != self.epoch or self.over:
            return
        self._clock.after(DRAIN_EVERY_S, lambda: self._loop(life, epoch))
        try:
            self._drain()
        except (ConnectionError, AgentError, StorageError):
            pass
        if self._ready:
            self._watch()

    def _drain(self) -> None:
        drained: Drained = self._run.manager.call("drain", self._after, self._written)
        if self._manager_life != self._run.manager.life:
            self._manager_life = self._run.manager.life
            self._after = self._written = 0
        if drained.status["epoch"] != self.epoch:
            self._run.manager.call("start_epoch", self.epoch, self._history())
        self._unwritten += [*drained.facts, *drained.rows]
        self._after = drained.next
        if drained.status["epoch"] != self.epoch:
            return  # what it says is about another life of the workers
        self.verdict = drained.status["verdict"]
        if self.verdict or drained.status["finished"]:
            self._last_words()

    def _last_words(self) -> None:
        if not self.verdict and any(not w.finished and w.alive for w in self._workers):
            return  # Ray Train's fit() returns when every worker has
        drained = self._run.manager.call("drain", self._after, self._written)
        self._after = drained.next
        self._unwritten += [*drained.facts, *drained.rows]
        self._flush()
        saving = drained.status["saving"]
        self.over = bool(self.verdict) or not saving

    def _flush_loop(self, life: int, epoch: int) -> None:
        if life == self._life and epoch == self.epoch and not self.over:
            self._flush()
            self._clock.after(FLUSH_EVERY_S, lambda: self._flush_loop(life, epoch))

    def _flush(self) -> None:
        for item in self._unwritten:
            if isinstance(item, Fact):
                self.facts.append(item)
            else:
                known = self.rows.get(item["step"])
                if known is None or known["generation"] < item["generation"]:
                    self.rows[item["step"]] = item
        self._unwritten.clear()
        self._written = self._after

    # ---- Ray Train ----

    def _watch(self) -> None:
        dead = [w for w in self._workers if not w.alive]
        if not dead:
            if self._respawning == 0 and all(w.finished for w in self._workers):
                self._returned()
            return
        healthy = len(self._workers) - len(dead)
        if healthy == 0 and self._respawning == 0:
            self._restart()
            return
        for worker in dead:
            self._workers.remove(worker)
            self._respawning += 1
            respawn = partial(self._respawn, self.epoch, self._life)
            self._clock.after(self._clock.between(1.5, 4.0), respawn)

    def _respawn(self, epoch: int, life: int) -> None:
        if (epoch, life) == (self.epoch, self._life) and not self.over:
            self._respawning -= 1
            self._workers.append(self._run.new_rank(epoch))

    def _returned(self) -> None:
        """fit() came back, but a manager that was killed in between may have forgotten why."""
        try:
            status = self._run.manager.call("status")
        except ConnectionError:
            return
        if not status["finished"] and status["epoch"] == self.epoch:
            self._restart()

    def _restart(self) -> None:
        self._clock.say("the workers have ended, the run has not: a new fit()")
        fact = Fact(kind="run.restarting", at_s=self._clock.now, src="supervisor")
        self._unwritten.append(fact)
        self._workers = []
        self._ready = False
        self._clock.after(1.0, partial(self._new_epoch_if, self._life))

    def _new_epoch_if(self, life: int) -> None:
        if life == self._life:
            self._new_epoch()
