"""What a rank leaves behind at each boundary: heartbeat, metric row, snapshot, persist request.

Nothing here waits for another process except `finish`, `table` and `artifact`. Per completed step:

    row      kept by every rank, beside each snapshot too, until the supervisor has written it;
             sent by rank 0 in batches a few times a second
    snapshot into this worker's shared-memory slots, every `memory_every_steps` (saving.py)
    persist  asked of the node's agent when the disk tier is due (pace.py)
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from relit_platform.errors import PlatformError
from relit_platform.facts import RestorePlan, RowBatch
from relit_platform.node.heartbeat import ControlPage, HeartbeatPage
from relit_platform.run_config import RunConfig
from relit_platform.worker.advice import Adviser
from relit_platform.worker.cuts import split, with_cut_vote
from relit_platform.worker.drill import Drill
from relit_platform.worker.manager_client import ActorLink, tell
from relit_platform.worker.near import near
from relit_platform.worker.pace import Pace
from relit_platform.worker.saving import ExtrasText, Saver
from relit_storage.data.ledger import LedgerRow
from relit_storage.run.layout import checked_name
from relit_storage.stores.protocol import ObjectStore

ROWS_KEPT = 4096  # while the store is away; else a few seconds' worth
ROWS_IN_EXTRAS = 1024  # at 200 bytes a row, 200 KB at the most beside each snapshot
SHIP_EVERY_S = 0.25
URGENT_STEPS = 3  # told at once: a recovery is over with the first new step, one or two are redone
RESEND_S = 5.0  # rows are written some 3 s after they were sent; then they may have been lost
FINISH_S = 600.0  # a new epoch may take minutes to begin where agents do not answer
FETCH_S = 600.0  # for a shard of another node: 10 GB at 20 MB/s


@dataclass(frozen=True, slots=True)
class _Row:
    """One metric row, and its JSON text: it goes into many snapshots, but is encoded once."""

    step: int
    fields: dict[str, Any]
    text: bytes

    @classmethod
    def of(cls, fields: dict[str, Any]) -> _Row:
        return cls(int(fields["step"]), fields, json.dumps(fields).encode())


class Recorder:
    """One per rank; every method is called by the rank's own thread."""

    def __init__(
        self,
        *,
        config: RunConfig,
        worker_id: str,
        store: ObjectStore,
        agent: ActorLink,
        manager: ActorLink,
        heartbeat_path: str,
        control_path: str,
    ) -> None:
        self._config = config
        self._worker_id = worker_id
        self.store = store
        self.manager = manager
        self._agent = agent
        self._heartbeat = HeartbeatPage.open(heartbeat_path)
        self._control = ControlPage.open(control_path)
        self._saver = Saver(config.checkpoint, worker_id, agent, manager)
        self._pace = Pace(config.checkpoint)
        self._adviser = Adviser(manager, self._pace.advise) if config.checkpoint.disk_auto else None
        self._rows: deque[_Row] = deque(maxlen=ROWS_KEPT)
        self._shipped_step = 0
        self._shipped_at_s = 0.0
        self._urgent = 0
        self._asked: Any = None  # a call of `rows` whose answer will say what is written
        self._oldest = (0, 0.0)  # step of the oldest row kept, and since when it is
        self._place = (0, 0)  # rank, generation
        self._data_id = ""

    # ---- signs of life ----

    @property
    def drill(self) -> Drill | None:
        """The faults that this run was asked to suffer."""
        return self._saver.drill

    @drill.setter
    def drill(self, drill: Drill) -> None:
        self._saver.drill = drill

    @property
    def stop_requested(self) -> bool:
        """True once this node's control page asks for a stop; one read of shared memory."""
        return self._control.stop_requested > 0

    def phase(self, name: str, step: int) -> None:
        """Write the heartbeat: phase and completed steps; no system call."""
        rank, generation = self._place
        self._heartbeat.beat(rank=rank, generation=generation, step=step, phase=name)

    def announce(self, total_steps: int | None, data: Any, member: Any) -> None:
        """Say how long the run is and what it reads, once the loop has begun."""
        self._data_id = str(getattr(data, "fingerprint", ""))
        if member.rank == 0:
            about = {
                "total_steps": total_steps,
                "data": self._data_id,
                "tokens_per_sample": int(getattr(data, "block_len", 0)),
            }
            tell(self.manager, member, "loop.begun", about)

    def bind(self, objects: Mapping[str, Any]) -> None:
        """The registered objects, before the first generation is entered."""
        self._saver.bind(objects)

    def place(self, rank: int, generation: int, last_row_step: int) -> None:
        """A new generation was entered; rows after last_row_step are sent again by rank 0."""
        self._place = (rank, generation)
        self._shipped_step = last_row_step
        self._urgent = URGENT_STEPS
        self._asked = None  # an answer from before knows nothing of this line

    # ---- the boundary ----

    def votes(self) -> tuple[float, ...]:
        """This rank's part of what decides when to save; summed over ranks with each step."""
        ready = self._control.peered and self._saver.replicated
        return with_cut_vote(self._pace.votes(self._place[0]), ready)

    def completed(
        self,
        *,
        member: Any,
        ledger: LedgerRow,
        loss: float,
        logged: Mapping[str, float],
        cursor: Mapping[str, Any],
        final: bool,
        stopping: bool,
        agreed: Sequence[float],
    ) -> None:
        """A step is complete on this rank: row, snapshot and what is due; member.step counts it.

        agreed: the sum over ranks of `votes`.
        """
        now_s, step = time.time(), member.step
        row = {
            "step": step,
            "loss": loss,
            "at_s": round(now_s, 4),
            "epoch": ledger.epoch,
            "lo": ledger.lo,
            "hi": ledger.hi,
            "samples": ledger.hi - ledger.lo,
            "digest": ledger.digest,
            "world": member.world,
            "generation": member.generation,
            **logged,
        }
        self._rows.append(_Row.of(row))
        self.phase("snapshot", step)
        votes, cut = split(agreed, member.world)
        due = self._pace.decide(step, votes)
        self._pace.measure(logged)
        if due.before:
            self._saver.persist(member, step - 1)
        extras = self._extras_of(member, cursor)
        self._saver.save(member, extras, step, to_disk=due.this, last=final or stopping, cut=cut)
        self._ship(now_s, force=final or stopping or self._urgent > 0)
        self._urgent = max(0, self._urgent - 1)
        if self._adviser is not None and member.rank == 0:
            self._adviser.ask(now_s)
        if self.drill is not None:
            self.drill.check(member.rank, step, "boundary")
        self.phase("data", step)

    def settle(self, member: Any) -> None:
        """Wait until the newest snapshot is whole; see Saver.settle."""
        self._saver.settle(member)

    def rejoined(self, member: Any, cursor: Mapping[str, Any]) -> None:
        """A generation begins at a boundary that is not the first: put its state into a slot."""
        self._saver.rejoined(member, self._extras_of(member, cursor))

    def save_last(self, member: Any, cursor: Mapping[str, Any]) -> None:
        """Save the last step of all, unless this rank did so in this generation."""
        if not self._saver.asked(member):
            extras = self._extras_of(member, cursor)
            self._saver.save(member, extras, member.step, to_disk=True, last=True)

    def extras(self, member: Any, cursor: Mapping[str, Any], skeleton: Any) -> dict[str, Any]:
        """The JSON beside a snapshot, and with a broadcast: all that is not a tensor.

        Its rows are those that may not be in the run directory yet.
        """
        rows = [row.fields for row in self._newest_rows()]
        return {**self._extras_head(member, cursor), "objects": skeleton, "rows": rows}

    def _extras_of(self, member: Any, cursor: Mapping[str, Any]) -> ExtrasText:
        """`extras` as JSON, out of parts that are JSON already, once the skeleton is known."""

        def text(skeleton: bytes) -> bytes:
            head = json.dumps(self._extras_head(member, cursor)).encode()
            rows = b",".join(row.text for row in self._newest_rows())
            return b'%b,"objects":%b,"rows":[%b]}' % (head[:-1], skeleton, rows)

        return text

    def _newest_rows(self) -> list[_Row]:
        return list(self._rows)[-ROWS_IN_EXTRAS:]

    def _extras_head(self, member: Any, cursor: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "v": 1,
            "step": member.step,
            "generation": member.generation,
            "rank": member.rank,
            "world": member.world,
            "cursor": dict(cursor),
            "cadence": self._pace.marks(),
            "ids": {
                "config": self._config.config_sha,
                "code": self._config.code_sha,
                "data": self._data_id,
            },
            "rng": {"mode": "per_step", "seed": self._config.seed},
        }

    def adopt(self, extras: Mapping[str, Any]) -> None:
        """Go on from a state that was restored or received, by the JSON that came with it: its
        rows, without those of later steps, and when it was saved last.
        """
        step, rows = int(extras["step"]), list(extras["rows"])
        self._adopt_rows(rows, step)
        own: Mapping[str, Any] = next((row for row in rows if int(row["step"]) == step), {})
        self._pace.adopt(extras.get("cadence"), own)

    def _adopt_rows(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        merged = {int(row["step"]): _Row.of(dict(row)) for row in rows}
        merged.update({row.step: row for row in self._rows})
        self._rows = deque((merged[s] for s in sorted(merged) if s <= step), maxlen=ROWS_KEPT)

    def _ship(self, now_s: float, *, force: bool) -> None:
        """Rank 0 sends the new rows; every rank says what it has whole in shared memory."""
        if not force and abs(now_s - self._shipped_at_s) < SHIP_EVERY_S:  # clocks are set back
            return
        self._shipped_at_s = now_s
        self._forget_written(now_s)
        batch = self._batch(self._shipped_step)
        ref = self.manager.send("rows", batch)
        if ref is not None and batch.rows:
            self._shipped_step = batch.rows[-1]["step"]
        if self._asked is None:
            self._asked = ref

    def _batch(self, after: int) -> RowBatch:
        rank, generation = self._place
        fresh = tuple(r.fields for r in self._rows if r.step > after) if rank == 0 else ()
        return RowBatch(
            generation=generation,
            rank=rank,
            rows=fresh,
            worker_id=self._worker_id,
            memory_step=self._saver.memory_step,
            oldest_kept=self._rows[0].step if rank == 0 and self._rows else 0,
        )

    def _forget_written(self, now_s: float) -> None:
        """Drop the rows that are in the run directory; send those again that do not get there."""
        lost = False
        if self._asked is not None:
            over, written = self.manager.answered(self._asked)
            if over:
                self._asked, lost = None, written is None
                while self._rows and written is not None and self._rows[0].step <= written:
                    self._rows.popleft()
        oldest = self._rows[0].step if self._rows else 0
        if lost and oldest:  # the manager died, with what had been sent to it
            self._shipped_step = min(self._shipped_step, oldest - 1)
        if oldest != self._oldest[0]:
            self._oldest = (oldest, now_s)
        elif self._rows and abs(now_s - self._oldest[1]) > RESEND_S:
            self._shipped_step = min(self._shipped_step, oldest - 1)
            self._oldest = (oldest, now_s)

    # ---- rare ----

    def near(self, plan: RestorePlan, node_id: str) -> RestorePlan:
        """The plan with what other nodes hold brought to this one; blocks. See near.py."""
        return near(plan, node_id, partial(self._agent.call, "fetch", timeout_s=FETCH_S))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """tables/<name>/<step>.jsonl in the run directory."""
        body = "".join(json.dumps(dict(row)) + "\n" for row in rows)
        self.store.put(f"tables/{checked_name(name)}/{step:012d}.jsonl", body.encode())

    def artifact(self, name: str, content: bytes | str) -> None:
        """artifacts/<name>: bytes as they are, or the file at a path."""
        key = f"artifacts/{checked_name(name)}"
        if isinstance(content, bytes):
            self.store.put(key, content)
        else:
            self.store.put_file(key, os.fspath(content))

    def finish(self, member: Any, value: Any, *, stopped: bool) -> None:
        """The loop is over on this rank. Blocks until the manager knows, and has the rows."""
        rank = member.rank if member.entered else -1
        last = (self._worker_id, rank, dump_value(value), stopped)
        deadline_s = time.monotonic() + FINISH_S
        while True:
            known = self.manager.call("rows", self._batch(0)) >= 0
            self.phase("done", member.step)
            if known and self.manager.call("finished", *last) is not False:
                return
            if time.monotonic() > deadline_s:
                raise PlatformError(f"the manager knows no epoch for {FINISH_S:.0f} s.")
            time.sleep(0.2)  # a manager that was re-created waits for its supervisor

    def close(self) -> None:
        """Let go of the mapped pages; the agent owns the files."""
        self._saver.close()
        self._heartbeat.close()
        self._control.close()


def dump_value(value: Any) -> str:
    """The user's return value as JSON text; TypeError naming what is not JSON."""
    try:
        return json.dumps(value)
    except TypeError as error:
        raise TypeError(f"train() must return JSON values or None: {error}") from None
