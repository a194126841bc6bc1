"""The supervisor's second thread: everything that flows into the run directory flows through here.

    manager.drain() -> events, metric rows, incidents, status.json, Ray metrics, lease, commands

The supervisor holds the lease, so it is the one writer. A store that is slow or away never holds
training up: what could not be written stays in bounded buffers and is tried again at the next
tick; the manager keeps what was not drained. A manager that was re-created is told the epoch again.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import ray

from relit_platform.control.history import History
from relit_platform.control.incidents import IncidentLog
from relit_platform.control.telemetry import Telemetry
from relit_platform.facts import Drained, Fact
from relit_platform.run_config import RunConfig
from relit_platform.worker.manager_client import ManagerClient
from relit_storage.errors import FencedError, ObjectMissingError, StoreError
from relit_storage.run import layout
from relit_storage.run.event_log import EventWriter, RowWriter, read_events
from relit_storage.run.held_lease import HeldLease
from relit_storage.run.lease import Lease
from relit_storage.run.redaction import Redactor
from relit_storage.stores.protocol import ObjectStore

RUNNING = "RUNNING"
TICK_S = 0.2
STATUS_EVERY_S = 0.5
COMMANDS_EVERY_S = 1.0
DRAIN_TIMEOUT_S = 10.0
WAITING_EVERY_S = 5.0
PAUSE_S = 5.0  # after a round that failed by surprise: its trace goes to the log each time
MAX_LAST_BATCHES = 256  # many more than the manager keeps, in batches as small as buffers are


class Pump:
    """See the module's text. `tick` does one round; `start` runs rounds in a daemon thread.

    why_waiting is asked now and then while the run has no workers, and may raise RayError.
    """

    def __init__(
        self,
        *,
        store: ObjectStore,
        config: RunConfig,
        manager: ManagerClient,
        lease: Lease,
        why_waiting: Callable[[], str] = str,
    ) -> None:
        self._store = store
        self._config = config
        self._manager = manager
        self._lease = HeldLease(lease, config.recovery.lease_s / 4)  # bears three failures
        self._why_waiting = why_waiting
        self._waiting = ""
        events = read_events(store)
        self._history = History.read(store, events, config.checkpoint.metric)
        self._events = self._writer(lease.epoch)
        self._rows = RowWriter(store, lease.epoch)
        self._incidents = IncidentLog(store, events)
        self._redactor = Redactor.from_environment(config.secret_names)
        self._telemetry = Telemetry(config.run_id)
        self._lock = threading.RLock()
        self._halt = threading.Event()
        self._after = 0
        self._written = 0  # as _after, of what is in the run directory
        self._appended: list[dict[str, Any]] = []  # rows that no segment has yet
        self._manager_pid = 0
        self._state = "PENDING"
        self._reason = ""
        self._status: dict[str, Any] = {}
        self._next_s = {"status": 0.0, "commands": 0.0, "waiting": 0.0}
        self._stopping = ""
        self._rounds: threading.Thread | None = None
        self._on_fenced: Callable[[], None] = lambda: None
        self.fenced = 0  # the epoch that has taken over, if one has

    # ---- the supervisor's side ----

    def keep_lease(self, on_fenced: Callable[[], None]) -> None:
        """Renew the lease from now on until the result is written, whatever is waited for.
        on_fenced is called by the rounds' thread, as the last thing it does.
        """
        self._on_fenced = on_fenced
        self._lease.start()

    def start(self) -> None:
        """Begin the rounds."""
        self._rounds = threading.Thread(target=self._loop, name="pump", daemon=True)
        self._rounds.start()

    @property
    def taken_over(self) -> bool:
        """Whether another supervisor drove the run until now, and did not bring it to an end."""
        return self._history.state == RUNNING

    def history(self) -> Any:
        """What the run directory knows, for the manager's start_epoch."""
        return self._history.for_manager()

    def fact(self, fact: Fact) -> None:
        """Write one of the supervisor's own facts."""
        with self._lock:
            self._take(fact)

    def set_state(self, state: str, reason: str = "") -> None:
        """The state that status.json shows from the next round on."""
        with self._lock:
            if (state, reason) != (self._state, self._reason):
                self._state, self._reason = state, reason
                self._take(
                    Fact(
                        kind="run.state",
                        at_s=time.time(),
                        src="supervisor",
                        data={"state": state, "reason": reason},
                    )
                )

    def request_stop(self, reason: str) -> None:
        """Hand a stop on to the manager; repeated by each round until it is acknowledged."""
        self._stopping = self._stopping or reason or "stop asked for"

    def next_epoch(self, take: Callable[[], Lease]) -> Lease:
        """A new life of the workers under a new lease; segments carry its number from now on."""
        with self._lock:
            self._until_written(lambda: self._flush(time.monotonic(), force=True))
            lease = self._lease.replace(take)
            self._until_written(self._read_history)
            self._events = self._writer(lease.epoch)
            self._rows = RowWriter(self._store, lease.epoch)
            return lease

    def _read_history(self) -> None:
        metric = self._config.checkpoint.metric
        self._history = History.read(self._store, read_events(self._store), metric)

    def close(self, state: str, reason: str, result: Mapping[str, Any]) -> None:
        """Drain to the end, write the last events and status, then result.json, last of all.

        FencedError if another supervisor has taken the run over meanwhile.
        """
        try:
            self._close(state, reason, result)
        finally:
            self._lease.stop()

    def _close(self, state: str, reason: str, result: Mapping[str, Any]) -> None:
        self._halt.set()
        if self._rounds is not None:
            self._rounds.join(DRAIN_TIMEOUT_S * 2)
        with self._lock:
            self._lease.check()
            self._drain_to_the_end()
            for record in self._incidents.finish(time.time()):
                self._closed(record, 0, None)
            self.set_state(state, reason)
            self._until_written(lambda: self._flush(time.monotonic(), force=True))
            self._until_written(lambda: self._write_status(time.time()))
            body = self._redactor.data(
                {**result, "incidents": self._incidents.count, "status": self._status}
            )
            self._lease.check()
            self._until_written(lambda: self._store.put(layout.RESULT, _json(body)))

    # ---- a round ----

    def _loop(self) -> None:
        while not self._halt.wait(TICK_S):
            try:
                with self._lock:
                    self.tick(time.time(), time.monotonic())
            except FencedError as fenced:
                newest = fenced.newest
                self.fenced = newest if isinstance(newest, int) else self._lease.epoch + 1
                self._lease.stop()
                self._on_fenced()
                return
            except StoreError as error:
                print(f"relit: the store is away, trying again: {error}", flush=True)
            except (ray.exceptions.RayError, ValueError) as error:  # ValueError: no such actor
                print(f"relit: the manager is away, trying again: {error!r:.500}", flush=True)
            except Exception:  # a run that nobody records any more is worse than a round that fails
                traceback.print_exc()
                self._halt.wait(PAUSE_S)

    def tick(self, now: float, steady_s: float) -> None:
        """One round; raises StoreError or RayError for the caller to log, FencedError to obey.

        steady_s: what is due goes by a clock that nobody sets; `now`, set back by an hour, would
        stop commands and status for an hour.
        """
        self._lease.check()
        self._drain()
        if self._stopping:
            self._manager.link.send("request_stop", self._stopping)
        self._flush(steady_s)
        if self._due("status", steady_s, STATUS_EVERY_S):
            self._look_why_waiting(steady_s)
            self._write_status(now)
        if self._due("commands", steady_s, COMMANDS_EVERY_S):
            self._read_commands(now)

    def _due(self, what: str, now: float, every_s: float) -> bool:
        if now < self._next_s[what]:
            return False
        self._next_s[what] = now + every_s
        return True

    def _drain(self) -> None:
        while self._drain_batch():
            pass

    def _drain_to_the_end(self) -> None:
        """Nobody will ask again: room is made for each batch, should the store have been away."""
        for _ in range(MAX_LAST_BATCHES):
            self._until_written(lambda: self._flush(time.monotonic(), force=True))
            if self._drain_batch() is False:
                return

    def _drain_batch(self) -> bool | None:
        """Whether there is more. None: there is no room for it now."""
        drained: Drained = self._manager.link.call(
            "drain", self._after, self._written, timeout_s=DRAIN_TIMEOUT_S
        )
        self._check_epoch(drained.status)
        self._manager_changed(drained.status)
        for fact in drained.facts:
            if fact.number > self._history.told:  # else the supervisor before us wrote it
                self._take_or_say(fact)
        if not self._append(drained.rows):
            return None  # the store is far behind; the manager keeps them, and tells them again
        if drained.overflow:
            self._take(
                Fact(
                    kind="log.overflow",
                    at_s=time.time(),
                    src="manager",
                    level="warning",
                    data={"dropped": drained.overflow},
                )
            )
        self._after = drained.next
        self._status = dict(drained.status)
        return drained.more

    def _append(self, rows: Iterable[dict[str, Any]]) -> bool:
        """False if there is no room for all of them, for the store is away.

        Room is made on the way: rows that are large may be more than the buffer takes, and a batch
        that never fits would be told again and again.
        """
        for row in rows:
            if not self._rows.append(row):
                try:
                    self._flush(time.monotonic(), force=True)
                except StoreError:
                    return False
                if not self._rows.append(row):
                    return False
            self._appended.append(row)
            self._history.add_row(row)
        return True

    def _check_epoch(self, status: Mapping[str, Any]) -> None:
        """What a manager tells under a newer epoch is for another supervisor's ears."""
        newest = int(status.get("epoch") or 0)
        if newest > self._lease.epoch:
            raise FencedError(what="epoch", ours=self._lease.epoch, newest=newest)

    def _manager_changed(self, status: Mapping[str, Any]) -> None:
        pid = int(status.get("manager_pid") or 0)
        if self._manager_pid and pid != self._manager_pid:
            self._after = self._written = 0
            self._take(
                Fact(
                    kind="manager.restarted",
                    at_s=time.time(),
                    src="supervisor",
                    level="warning",
                    data={"pid": pid, "was": self._manager_pid},
                )
            )
        if status.get("epoch") != self._lease.epoch:
            self._manager.link.call("start_epoch", self._lease.epoch, self._history.for_manager())
        self._manager_pid = pid

    def _take_or_say(self, fact: Fact) -> None:
        """One that cannot be understood must not keep all that come after it from being written."""
        try:
            self._take(fact)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            print(f"relit: a fact of kind {fact.kind} is passed over", flush=True)
            traceback.print_exc()

    def _take(self, fact: Fact) -> None:
        fact = replace(fact, data=self._redactor.data(fact.data))
        event = self._events.append(asdict(fact))
        self._history.add(event)
        for record in self._incidents.add(fact):
            self._closed(record, fact.generation, fact.step)

    def _closed(self, record: Mapping[str, Any], generation: int, step: int | None) -> None:
        self._telemetry.incident(record)
        event = self._events.append(
            {
                "kind": "incident.closed",
                "at_s": time.time(),
                "src": "supervisor",
                "generation": generation,
                "step": step,
                "level": "warning",
                "data": {"id": record.get("id"), "headline": record.get("headline")},
            }
        )
        self._history.add(event)

    def _flush(self, now: float, *, force: bool = False) -> None:
        rows_too = force or self._rows.due(now)
        if rows_too or self._events.due(now):
            self._events.flush(now)
        if rows_too:  # after the events: what was drained with them is forgotten by the manager
            self._rows.flush(now)
            self._written = self._after  # ranks keep with their state what is not written
            for row in self._appended:
                self._history.wrote(row)
            self._appended.clear()
        self._incidents.flush()

    def _look_why_waiting(self, steady_s: float) -> None:
        """Only of a run that has no generation now: ranks say by themselves how they are."""
        if self._state != RUNNING or self._status.get("phase") in ("running", "done"):
            self._waiting = ""
        elif self._due("waiting", steady_s, WAITING_EVERY_S):
            self._waiting = self._why_waiting()

    def _write_status(self, now: float) -> None:
        """status.json: what a reader without the cluster knows of the live run."""
        state = self._state
        if state == RUNNING and self._stopping:
            state = "STOPPING"
        elif state == RUNNING and self._status.get("phase") not in (None, "running", "done"):
            state = "RECOVERING" if self._status.get("generation") else "PENDING"
        body = {
            **self._status,
            "state": state,
            "reason": self._reason or self._waiting,
            "run_id": self._config.run_id,
            "name": self._config.name,
            "owner": self._config.owner,
            "epoch": self._lease.epoch,
            "recoveries": self._incidents.count,
            "last_incident": self._incidents.last_headline,
            "supervisor_pid": os.getpid(),
            "agents": [{"node_id": node, "pid": pid} for node, pid in self._history.agents.items()],
            "updated_at_s": now,
        }
        body = self._redactor.data(body)
        self._status = body
        self._telemetry.update(body)
        self._store.put(layout.STATUS, _json(body))

    def _read_commands(self, now: float) -> None:
        """Obey each command once; a stop that a later resume has overtaken is only acknowledged.

        A stop and a resume that were sent at once have one number: neither came first, and a stop
        that is lost costs more than one that has to be followed by another resume.
        """
        found = [(n, key) for key in self._store.list("control/") if (n := _number(key))]
        resumed = max((n for n, key in found if _verb(key) == "resume"), default=0)
        for number, key in sorted(found):
            if key in self._history.acked:
                continue
            if _verb(key) == "stop" and number >= resumed:
                self.request_stop(self._reason_of(key))
            self._take(
                Fact(
                    kind="control.acked",
                    at_s=now,
                    src="supervisor",
                    data={"command": key, "verb": _verb(key)},
                )
            )

    def _reason_of(self, key: str) -> str:
        try:
            return str(json.loads(self._store.get(key)).get("reason") or "stop asked for")
        except (ValueError, AttributeError, ObjectMissingError):
            return "stop asked for"

    # ---- writing ----

    def _writer(self, epoch: int) -> EventWriter:
        return EventWriter(self._store, self._config.run_id, epoch, self._history.started_at_s)

    def _until_written(self, write: Callable[[], Any]) -> None:
        """The last words are worth waiting for: up to two minutes of a store that is away."""
        deadline_s = time.monotonic() + 120.0
        while True:
            try:
                write()
                return
            except StoreError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(1.0)


def _number(key: str) -> int:
    head = key.removeprefix("control/").split("-", 1)[0]
    return int(head) if head.isdecimal() else 0


def _verb(key: str) -> str:
    return key.rsplit("-", 1)[-1].removesuffix(".json")


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()
