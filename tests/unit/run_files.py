"""A run as a test needs it: submitted for real over a fake transport, then driven by hand.

Everything in the run directory is written by the code that writes it in production.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relit.client import Client
from relit.errors import ClusterUnreachableError
from relit.handle import JobHandle
from relit.spec.model import JobSpec
from relit_storage.run import layout
from relit_storage.run.event_log import EventWriter, RowWriter
from relit_storage.run.lease import Lease
from relit_storage.stores.protocol import ObjectStore


class FakeJobs:
    """A cluster's Jobs endpoint that only remembers. Set `down` to make it unreachable."""

    def __init__(self) -> None:
        self.jobs: dict[str, tuple[str, Mapping[str, str]]] = {}
        self.statuses: dict[str, tuple[str, str]] = {}
        self.down = False
        self.over: set[str] = set()  # ids that the cluster remembers of jobs that have ended

    def connect(self) -> None:
        if self.down:
            raise ClusterUnreachableError(address="http://nowhere:1", cause="refused")

    def submit(self, submission_id: str, entrypoint: str, metadata: Mapping[str, str]) -> bool:
        self.connect()
        if submission_id in self.over:
            return False
        self.jobs[submission_id] = (entrypoint, metadata)
        return True

    def status(self, submission_id: str) -> tuple[str, str] | None:
        known = ("RUNNING", "") if submission_id in self.jobs else None
        return self.statuses.get(submission_id, known)

    def where(self) -> str:
        return "http://fake:8265"


def write_code(folder: Path, body: str = "...") -> Path:
    """A training script; its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(f"def train(run, cfg): {body}\n")
    return folder


def make_spec(code: Path, **fields: Any) -> JobSpec:
    """A small valid specification over `write_code`'s folder."""
    base = {"name": "job", "entry": "train.py:train", "env": {"working_dir": str(code)}}
    return JobSpec.parse({**base, **fields})


def submit(client: Client, code: Path, **fields: Any) -> JobHandle:
    return client.submit(make_spec(code, **fields))


class Driver:
    """Plays the supervisor of one epoch."""

    def __init__(self, store: ObjectStore, run_id: str, now: float, ttl_s: float = 15.0) -> None:
        self.store = store
        self.lease = Lease.take(store, run_id, "driver", now, ttl_s)
        self.events = EventWriter(store, run_id, self.lease.epoch, now)
        self.rows = RowWriter(store, self.lease.epoch)

    def event(self, kind: str, now: float, **fields: Any) -> None:
        self.events.append({"kind": kind, "at_s": now, "src": "supervisor", "data": {}, **fields})
        self.events.flush(now)

    def status(self, **fields: Any) -> None:
        self.store.put(layout.STATUS, json.dumps(fields).encode())

    def result(self, now: float, **fields: Any) -> None:
        self.store.put(layout.RESULT, json.dumps(fields).encode())
        self.lease.release(now)
