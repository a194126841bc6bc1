"""RunReader: everything about a run, from its directory alone.

Works with the Ray cluster gone and on a copy of the directory; needs neither ray nor torch. A
file that does not parse is passed over (the event log reports its own refusals).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from relit.run_state import LOST, TOOL, RunFiles, derive_state
from relit_platform.run_config import RunConfig
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.errors import ObjectMissingError
from relit_storage.run import layout
from relit_storage.run.event_log import EventReader, read_events, read_rows
from relit_storage.run.lease import read_lease
from relit_storage.stores.prefixed import PrefixedStore
from relit_storage.stores.protocol import ObjectStore

Json = dict[str, Any]


class RunReader:
    """Reads one run. Every method goes to the store (StoreError) and returns plain data."""

    def __init__(
        self, store: ObjectStore, run_key: str, clock: Callable[[], float] = time.time
    ) -> None:
        self.run_key = run_key
        self.store: ObjectStore = PrefixedStore(store, run_key)
        self._clock = clock

    @property
    def run_id(self) -> str:
        """The run's id: the last part of its key."""
        return self.run_key.rpartition("/")[2]

    def exists(self) -> bool:
        """True once a submit has claimed this run id."""
        return self.store.size(layout.CONFIG) is not None

    def is_there(self) -> bool:
        """True for a run that was submitted, or that checkpoints were imported into."""
        return self.exists() or self.store.size(layout.RUN) is not None

    def never_started(self) -> bool:
        """True if no supervisor has left anything here: events, a status or a result."""
        keys = (layout.STATUS, layout.RESULT)
        if any(self.store.size(key) is not None for key in keys):
            return False
        return not self.store.list("events/")

    def is_driven(self) -> bool:
        """True while a supervisor's lease is in force."""
        lease = read_lease(self.store)
        return lease is not None and lease.in_force(self._clock())

    def config(self) -> RunConfig | None:
        """The resolved configuration of the newest attempt; None before it is written."""
        data = self.json(layout.RESOLVED)
        try:
            return None if data is None else RunConfig.from_json(data)
        except TypeError:
            return None  # fields missing or unknown

    def about(self) -> Json:
        """run.json: owner, time of submit, versions, git commit."""
        return self.json(layout.RUN) or {}

    def attempts(self) -> list[Json]:
        """Every submit and resume of this run, oldest first."""
        found = (self.json(key) for key in self.store.list(layout.ATTEMPT_PREFIX))
        return [attempt for attempt in found if attempt is not None]

    def result(self) -> Json | None:
        """result.json, or None while the run is not over."""
        found = self.json(layout.RESULT)
        return found if found and isinstance(found.get("state"), str) else None

    def status(self) -> Json:
        """The newest live status with `state` and `reason` judged anew; a few small reads."""
        result = self.result()
        status = self._live()
        files = RunFiles(result=result, status=status) if result else self._files(status)
        state, reason = derive_state(files, self.run_id, self._clock())
        if state == LOST and (result := self.result()):  # written since the first look
            state, reason = derive_state(RunFiles(result=result), self.run_id, self._clock())
        merged = {**status, **_settled(result)}
        return {**merged, "run_id": self.run_id, "state": state, "reason": reason}

    def _files(self, status: Json) -> RunFiles:
        lease = read_lease(self.store)
        attempts = self.store.list(layout.ATTEMPT_PREFIX)
        until_s: float | None = None
        if lease is not None:
            until_s = 0.0 if lease.released else lease.expires_at_s
        attempt = _well_typed(self.json(attempts[-1]) or {}) if attempts else None
        epoch = lease.epoch if lease else 0
        holder = lease.holder if lease else ""
        return RunFiles(
            status=status,
            attempt=attempt,
            lease_until_s=until_s,
            epoch=epoch,
            tool=holder if holder.startswith(TOOL) else "",
            submitted=bool(attempts) or self.exists(),
        )

    def events(self, since: int = 0) -> list[Json]:
        """Events with a sequence number above `since`, in order."""
        return read_events(self.store, since)

    def follower(self) -> EventReader:
        """Each `poll()` of it returns the events that are new; for following a live run."""
        return EventReader(self.store)

    def rows(self) -> list[Json]:
        """Committed metric rows, one for each step, in order."""
        return read_rows(self.store)

    def incidents(self) -> list[Json]:
        """One record for each recovery, oldest first; `headline` says it in a sentence."""
        found = (self.json(key) for key in self.store.list("incidents/"))
        return [incident for incident in found if incident is not None]

    def checkpoints(self) -> list[Json]:
        """Steps committed in the object tier and not retired, newest first."""
        view = CommitLog(self.store).replay()
        return [
            {"step": commit.step, "generation": commit.generation, "key": commit.manifest_key}
            for commit in view.commits
        ]

    def workers(self) -> list[str]:
        """Worker ids that left logs, in order of name."""
        keys = self.store.list("logs/")
        return sorted({key.split("/")[1] for key in keys if key.count("/") >= 2})

    def log_segments(self, worker_id: str | None = None) -> list[str]:
        """Keys of log segments of one worker, or of all."""
        prefix = f"logs/{worker_id}/" if worker_id else "logs/"
        return self.store.list(prefix)

    def worker_of_rank(self, rank: int) -> str | None:
        """Who holds a rank by the newest status; None if nobody is known to."""
        for worker in self._live().get("workers") or []:
            if isinstance(worker, dict) and worker.get("rank") == rank:
                return str(worker.get("worker_id"))
        return None

    def _live(self) -> Json:
        return _well_typed(self.json(layout.STATUS) or {})

    def json(self, key: str) -> Json | None:
        """A JSON object of the run directory; None if it is missing or does not parse."""
        try:
            data = json.loads(self.store.get(key))
        except (ObjectMissingError, ValueError, RecursionError):
            return None
        return data if isinstance(data, dict) else None


_NUMBERS = ("step", "total_steps", "loss", "world", "generation", "recoveries", "epoch", "at_s")
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_NUMBERS, (int, float)),
    "committed": (dict,),
    "spacing": (dict,),
    "workers": (list,),
}


def _well_typed(data: Json) -> Json:
    """Without the fields that readers compute with and that hold something else."""
    return {k: v for k, v in data.items() if k not in _TYPES or isinstance(v, _TYPES[k])}


def _settled(result: Json | None) -> Json:
    """Fields in which a finished run's result is newer than its last status."""
    if not result:
        return {}
    names = ["step", "loss", "committed", "total_steps", "value", "finished_at_s", "verdict_code"]
    known = _well_typed(result)
    return {name: known[name] for name in names if known.get(name) is not None}
