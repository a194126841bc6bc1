"""What a rank leaves behind at each boundary: heartbeat, metric row, snapshot, persist request.

Nothing here waits for another process except `finish`, `table` and `artifact`. Per completed step:

    row      kept by every rank, beside each snapshot too, until the supervisor has written it;
             sent by rank 0 in batches a few times a second
    snapshot into this worker's shared-memory slots, every `memory_every_steps`
    persist  asked of the node's agent when the disk tier is due (pace.py); the slot is pinned
             first, so that an agent that is killed in between finds it when it comes back
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relit_platform.facts import Fact, RowBatch
from relit_platform.node.heartbeat import ControlPage, HeartbeatPage
from relit_platform.run_config import RunConfig
from relit_platform.worker.drill import Drill
from relit_platform.worker.manager_client import ActorLink
from relit_platform.worker.pace import Pace
from relit_platform.worker.snapshot import Snapshotter
from relit_platform.worker.state_memo import StateMemo
from relit_storage.data.ledger import LedgerRow
from relit_storage.run.layout import checked_name
from relit_storage.stores.protocol import ObjectStore

ROWS_KEPT = 4096  # while the store is away; else a few seconds' worth
ROWS_IN_EXTRAS = 1024  # at 200 bytes a row, 200 KB at the most beside each snapshot
SHIP_EVERY_S = 0.25
URGENT_STEPS = 3  # told at once: a recovery is over with the first new step, one or two are redone
RESEND_S = 5.0  # rows are written some 3 s after they were sent; then they may have been lost
FINISH_S = 30.0


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
        self._agent = agent
        self.manager = manager
        self._heartbeat = HeartbeatPage.open(heartbeat_path)
        self._control = ControlPage.open(control_path)
        self._snapshotter = Snapshotter(
            worker_id=worker_id,
            open_slots=lambda count, image, extras: self._agent.call(
                "open_slots", worker_id, count, image, extras
            ),
            release_slots=lambda paths: self._agent.send("release_slots", worker_id, paths),
        )
        self._objects: Mapping[str, Any] = {}
        self._memo = StateMemo()
        self._pace = Pace(config.checkpoint)
        self._rows: deque[_Row] = deque(maxlen=ROWS_KEPT)
        self._shipped_step = 0
        self._shipped_at_s = 0.0
        self._urgent = 0
        self._asked: Any = None  # a call of `rows` whose answer will say what is written
        self._oldest = (0, 0.0)  # step of the oldest row kept, and since when it is
        self._place = (0, 0)  # rank, generation
        self._memory_step: int | None = None
        self._newest_slot = (0, 0, "")  # step, generation and path of the newest snapshot
        self._on_disk = (0, 0)  # newest step, and its generation, that was asked to be persisted
        self._skips = 0
        self.drill: Drill | None = None
        self._data_id = ""

    # ---- signs of life ----

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
            self.manager.send(
                "fact",
                Fact(
                    kind="loop.begun",
                    at_s=time.time(),
                    src="rank:0",
                    generation=member.generation,
                    step=member.step,
                    data={
                        "total_steps": total_steps,
                        "data": self._data_id,
                        "tokens_per_sample": int(getattr(data, "block_len", 0)),
                    },
                ),
            )

    def bind(self, objects: Mapping[str, Any]) -> None:
        """The registered objects, before the first generation is entered."""
        self._objects = objects

    def place(self, rank: int, generation: int, last_row_step: int) -> None:
        """A new generation was entered; rows after last_row_step are sent again by rank 0."""
        self._place = (rank, generation)
        self._shipped_step = last_row_step
        self._urgent = URGENT_STEPS
        self._asked = None  # an answer from before knows nothing of this line

    # ---- the boundary ----

    def votes(self) -> tuple[float, ...]:
        """This rank's part of what decides when to save; summed over ranks with each step."""
        return self._pace.votes(self._place[0])

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
        due = self._pace.decide(step, agreed)
        self._pace.measure(logged)
        if due.before:
            self._persist_newest(member, step - 1)
        self._save(member, cursor, step, to_disk=due.this, last=final or stopping)
        self._ship(now_s, force=final or stopping or self._urgent > 0)
        self._urgent = max(0, self._urgent - 1)
        if self.drill is not None:
            self.drill.check(member.rank, step, "boundary")
        self.phase("data", step)

    def rejoined(self, member: Any, cursor: Mapping[str, Any]) -> None:
        """A generation begins at a boundary that is not the first: put its state into a slot.

        A newcomer has none of this step yet. If all ranks died before the next boundary, the
        newest step that is whole in memory would lie two steps back.
        """
        if member.step > 0 and self._config.checkpoint.memory_every_steps > 0:
            self._snapshot(member, cursor, member.step, drill=None)

    def save_last(self, member: Any, cursor: Mapping[str, Any]) -> None:
        """Save the last step of all, unless this rank did so in this generation."""
        if self._on_disk != (member.step, member.generation):
            self._save(member, cursor, member.step, to_disk=True, last=True)

    def _save(
        self, member: Any, cursor: Mapping[str, Any], step: int, *, to_disk: bool, last: bool
    ) -> None:
        to_disk = to_disk or last
        if not to_disk and not _due(step, self._config.checkpoint.memory_every_steps):
            return
        if self._snapshot(member, cursor, step, drill=self.drill) is not None and to_disk:
            self._persist_newest(member, step, last=last)

    def _persist_newest(self, member: Any, step: int, *, last: bool = False) -> None:
        """Ask for the newest snapshot to go to disk, if it is this step's of this generation."""
        held, generation, path = self._newest_slot
        place = (step, member.generation)
        if (held, generation) != place or (self._on_disk == place and not last):
            return
        self._snapshotter.pin(path)
        self.manager.send("persisting", *place, member.rank, member.world, last)
        self._agent.send("persist", self._worker_id, path, *place)
        self._on_disk = place

    def _snapshot(
        self, member: Any, cursor: Mapping[str, Any], step: int, *, drill: Drill | None
    ) -> str | None:
        """Into a slot of shared memory: its path, or None if there was no room."""
        tensors, skeleton = self._memo.flatten(self._objects)
        extras = self._extras_text(member, cursor, skeleton)
        rank = member.rank
        taken = self._snapshotter.take(
            step=step,
            generation=member.generation,
            rank=rank,
            world=member.world,
            tensors=tensors,
            extras=extras,
            before_commit=(lambda: drill.check(rank, step, "snapshot")) if drill else None,
        )
        if taken.path is None:
            self._skipped(member, step, taken.reason)
            return None
        self._memory_step = step
        self._newest_slot = (step, member.generation, taken.path)
        return taken.path

    def _skipped(self, member: Any, step: int, reason: str) -> None:
        self._skips += 1
        if self._skips & (self._skips - 1) == 0:  # 1, 2, 4, 8, ...: said, never flooding
            self.manager.send(
                "fact",
                Fact(
                    kind="ckpt.skipped",
                    at_s=time.time(),
                    src=f"rank:{member.rank}",
                    generation=member.generation,
                    step=step,
                    level="warning",
                    data={"reason": reason, "skips": self._skips},
                ),
            )

    def extras(self, member: Any, cursor: Mapping[str, Any], skeleton: Any) -> dict[str, Any]:
        """The JSON beside a snapshot, and with a broadcast: all that is not a tensor.

        Its rows are those that may not be in the run directory yet.
        """
        rows = [row.fields for row in self._newest_rows()]
        return {**self._extras_head(member, cursor), "objects": skeleton, "rows": rows}

    def _extras_text(self, member: Any, cursor: Mapping[str, Any], skeleton: bytes) -> bytes:
        """`extras` as JSON, out of parts that are JSON already."""
        head = json.dumps(self._extras_head(member, cursor)).encode()
        rows = b",".join(row.text for row in self._newest_rows())
        return b'%b,"objects":%b,"rows":[%b]}' % (head[:-1], skeleton, rows)

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
        if not force and now_s - self._shipped_at_s < SHIP_EVERY_S:
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
            memory_step=self._memory_step,
        )

    def _forget_written(self, now_s: float) -> None:
        """Drop the rows that are in the run directory; send those again that do not get there."""
        if self._asked is not None:
            over, written = self.manager.answered(self._asked)
            if over:
                self._asked = None
                while self._rows and written is not None and self._rows[0].step <= written:
                    self._rows.popleft()
        oldest = self._rows[0].step if self._rows else 0
        if oldest != self._oldest[0]:
            self._oldest = (oldest, now_s)
        elif self._rows and now_s - self._oldest[1] > RESEND_S:
            self._shipped_step = min(self._shipped_step, oldest - 1)
            self._oldest = (oldest, now_s)

    # ---- rare ----

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
        deadline_s = time.monotonic() + FINISH_S
        while self.manager.call("rows", self._batch(0)) < 0 and time.monotonic() < deadline_s:
            time.sleep(0.2)  # a manager that was re-created waits for its supervisor
        self.phase("done", member.step)
        rank = member.rank if member.entered else -1
        self.manager.call("finished", self._worker_id, rank, dump_value(value), stopped)

    def close(self) -> None:
        """Let go of the mapped pages; the agent owns the files."""
        self._snapshotter.close()
        self._heartbeat.close()
        self._control.close()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def dump_value(value: Any) -> str:
    """The user's return value as JSON text; TypeError naming what is not JSON."""
    try:
        return json.dumps(value)
    except TypeError as error:
        raise TypeError(f"train() must return JSON values or None: {error}") from None
