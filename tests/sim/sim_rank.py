"""A rank's process: asks for a place, meets the others, trains in step, saves, finishes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim_node import SimNode, SimSlot
from sim_state import checksum, token

from relit_platform.facts import (
    Assignment,
    Dismissed,
    Fact,
    FaultReport,
    JoinRequest,
    Refused,
    RowBatch,
    ShardSource,
)
from relit_platform.worker.pace import Pace
from relit_platform.worker.recorder import RESEND_S
from relit_storage.errors import StoreError

if TYPE_CHECKING:
    from sim_group import SimGroup
    from sim_run import SimRun


Rows = dict[int, dict[str, Any]]


class SimRank:
    """One process life. rank and generation are those of the last generation it was whole in."""

    def __init__(self, run: SimRun, number: int, node: SimNode, epoch: int) -> None:
        self.run = run
        self.clock = run.clock
        self.number = number
        self.worker_id = f"w{number}"
        self.node = node
        self.epoch = epoch
        self.alive = True
        self.frozen = False
        self.cut_until_s = 0.0
        self.died_at_s = 0.0
        self.phase = "start"
        self.rank = 0
        self.generation = 0
        self.step = 0
        self.content = 0
        self.holds = False
        self.entered = False
        self.lineage: tuple[tuple[int, int], ...] = ()
        self.group: SimGroup | None = None
        self.rows: Rows = {}
        skew_s = run.clock.between(-30.0, 30.0)  # no two machines have the same time
        self.pace = Pace(run.config.checkpoint, lambda: run.clock.now + skew_s)
        self.shipped = 0
        self._oldest = (0, 0.0)
        self.finished = False
        self._attempt = 0
        self._writing: SimSlot | None = None
        self._fault: FaultReport | None = None
        node.workers[self.worker_id] = self
        self.clock.after(self.clock.between(0.1, 0.5), lambda: self.enter(None))

    def kill(self, why: str) -> None:
        if self.alive:
            self.clock.say(f"{self.worker_id} (rank {self.rank}) dies: {why}")
            self.alive = False
            self.died_at_s = self.clock.now
            self.node.worker_died(self)
            if self.group is not None:
                self.group.broken_by(self)

    # ---- joining ----

    def enter(self, fault: FaultReport | None) -> None:
        """Begin an attempt to get a place, with a fresh rendezvous store."""
        if not self.alive:
            return
        self._attempt += 1
        self.group = None
        self.phase = "join"
        self._fault = fault
        self._ask(self._attempt)

    def fault(self, kind: Any, message: str, refused: dict[str, Any] | None = None) -> None:
        self.enter(
            FaultReport(
                kind=kind, message=message, at_s=self.clock.now, step=self.step, refused=refused
            )
        )

    def _ask(self, attempt: int) -> None:
        if not self.alive or attempt != self._attempt or self.phase != "join":
            return
        self.clock.after(0.05, lambda: self._ask(attempt))
        if self.frozen:
            return
        try:
            reply = self._call("join", self._request(), 0.0)
        except ConnectionError:
            return
        if self.clock.chance(0.05):
            return  # the answer was lost
        if isinstance(reply, Assignment):
            self.phase = "form"
            self.run.groups.arrive(self, reply)
        elif isinstance(reply, Dismissed):
            self.phase = "dismissed"
            self.finish(stopped=True)
        elif isinstance(reply, Refused):
            self.kill(f"refused: {reply.reason}")

    def _request(self) -> JoinRequest:
        return JoinRequest(
            worker_id=self.worker_id,
            epoch=self.epoch,
            node_id=self.node.node_id,
            pid=self.number,
            rank=self.rank if self.entered else None,
            generation=self.generation,
            step=self.step if self.holds else None,
            endpoint=(self.worker_id, self._attempt),
            at_s=self.clock.now,
            fault=self._fault,
            lineage=self.lineage,
        )

    def _call(self, method: str, *args: Any) -> Any:
        if self.clock.now < self.cut_until_s:
            raise ConnectionError
        return self.run.manager.call(method, *args)

    # ---- state ----

    def formed(self, group: SimGroup, rank: int, assignment: Assignment) -> None:
        """The process group is up; state comes next."""
        self.group = group
        self.rank, self.generation = rank, assignment.generation
        self.lineage = assignment.lineage
        self.shipped = assignment.last_row_step
        self.phase = "restore"

    def take(self, step: int, content: int, marks: dict[str, Any], rows: Rows) -> None:
        """A whole state has arrived, and the rows that were kept with it; those of later steps are
        no longer this line's.
        """
        self.run.check.state(self, step, content)
        if not self.holds:
            self.pace.adopt(marks, {})
        self.step, self.content, self.holds, self.entered = step, content, True, True
        merged = {**rows, **self.rows}
        self.rows = {s: merged[s] for s in sorted(merged) if s <= step}
        self.phase = "train"

    def tell_entered(self, source: str) -> None:
        fact = Fact(
            kind="rank.entered",
            at_s=self.clock.now,
            src=f"rank:{self.rank}",
            generation=self.generation,
            step=self.step,
            data={"rank": self.rank, "worker_id": self.worker_id, "source": source},
        )
        try:
            self._call("fact", fact)
        except ConnectionError:
            pass

    def load(self, shard: ShardSource, step: int, generation: int) -> int:
        """The content of one shard, or ValueError with the reason for which it is refused."""
        place = (step, generation, shard.rank)
        if shard.tier == "memory":
            for slot in self.node.slots:
                if (slot.path, slot.step, slot.generation) == (shard.location, step, generation):
                    return self._checked(slot.content, step)
            raise ValueError("slot was overwritten")
        if shard.tier == "disk":
            if place not in self.node.disk:
                raise ValueError("file is missing")
            found = checksum(self.node.disk[place][0])
        else:
            try:
                found = self.run.store.get(shard.location).decode()
            except StoreError as error:
                raise ValueError(str(error)) from error
        if (found,) != shard.checksums:
            raise ValueError("checksum differs")
        return int(found, 16)

    def _checked(self, content: int, step: int) -> int:
        if content < 0:  # how the atlas marks a flipped bit in memory
            raise ValueError("slot header crc differs")
        return content

    # ---- the loop ----

    def complete_step(self, agreed: list[float]) -> bool:
        """The update is applied: row, snapshot, and what is due; True if that is the disk."""
        self.complete_slot()
        self.step += 1
        self.content = token(self.step)
        self.run.check.applied(self)
        self.rows[self.step] = {
            "step": self.step,
            "loss": float(self.content),
            "at_s": self.clock.now,
            "generation": self.generation,
            "samples": 1,
        }
        due = self.pace.decide(self.step, agreed).this
        self.run.marks[self.step, self.generation] = self.pace.marks()
        if self.rank == 0:
            self.run.kept[self.step, self.generation] = dict(self.rows)
        self._save(to_disk=due, final=self.step == self.run.steps)
        self.ship()
        return due

    def _save(self, *, to_disk: bool, final: bool) -> None:
        step, generation, group = self.step, self.generation, self.group
        assert group is not None
        due = final or to_disk
        slot = SimSlot(
            worker_id=self.worker_id,
            step=step,
            generation=generation,
            rank=self.rank,
            world=len(group.members),
            content=self.content,
            pinned=due,
        )
        if self.node.begin_slot(slot):
            self._writing = slot
            self.clock.after(0.03, self.complete_slot)
        else:
            self.run.check.skips += 1
        if due:
            try:
                self._call("persisting", step, generation, self.rank, len(group.members), final)
            except ConnectionError:
                pass  # the shards open the step as well

    def complete_slot(self, *, dead_too: bool = False) -> None:
        """A moment later, and before this rank's gradients of the next step; not after death."""
        slot, self._writing = self._writing, None
        if slot is not None and (self.alive or dead_too):
            self.node.complete_slot(slot)

    def ship(self) -> None:
        """Rows go out as often as wanted; the answer says which are written. A batch may be lost
        without a word, so what is not written for long goes out again.
        """
        try:
            self._send(self.shipped)
        except ConnectionError:
            pass
        oldest = min(self.rows, default=0)
        if oldest != self._oldest[0]:
            self._oldest = (oldest, self.clock.now)
        elif oldest and self.clock.now - self._oldest[1] > RESEND_S:
            self.shipped = min(self.shipped, oldest - 1)
            self._oldest = (oldest, self.clock.now)
        if self.rank == 0:
            self._ask_spacing()

    def _send(self, after: int) -> bool:
        """The rows after this one, by rank 0; forgets what is written, if that is known: True."""
        mine = self.rows if self.rank == 0 else {}
        rows = tuple(row for step, row in sorted(mine.items()) if step > after)
        if rows:
            self.shipped = int(rows[-1]["step"])
        batch = RowBatch(
            generation=self.generation,
            rank=self.rank,
            rows=rows,
            memory_step=max(0, self.step - 1),
            oldest_kept=min(mine, default=0),
        )
        written = int(self._call("rows", batch))
        self.rows = {step: row for step, row in self.rows.items() if step > written}
        return written >= 0

    def _ask_spacing(self) -> None:
        """As Adviser does; here the answer comes at once, or is lost."""
        try:
            every_s = self._call("spacing")
        except ConnectionError:
            return
        if every_s:
            self.pace.advise(every_s)

    def finish(self, *, stopped: bool = False) -> None:
        """Tell the manager until it knows; then the process ends its work."""
        if not self.alive or self.finished:
            return
        if not stopped:
            self.phase = "done"
        rank = self.rank if self.entered else -1
        try:
            if self.frozen:
                raise ConnectionError
            if not self._send(0):
                raise ConnectionError  # rows first
            if not self._call("finished", self.worker_id, rank, "null", stopped):
                raise ConnectionError
        except ConnectionError:
            self.clock.after(0.3, lambda: self.finish(stopped=stopped))
            return
        self.finished = True
        self.clock.say(f"{self.worker_id} (rank {rank}) has finished")
