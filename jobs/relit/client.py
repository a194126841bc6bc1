"""Client: from specifications to runs, and from run ids back to handles.

A submit is a few writes and a call, in an order that makes each crash harmless:

    a small write and a look for the cluster   bad stores and addresses leave nothing behind
    config.yaml        created exclusively: this claims the run id
    code, config.resolved.json, run.json, index entry      repeatable
    attempts/<n>.json  created exclusively: this numbers the Ray job
    the Ray job        `<run_id>-a<n>`; the same id again is the same job

A submit that died in between is completed by the same submit again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from collections.abc import Sequence
from typing import Any

from relit import run_writer
from relit.drift import check_same_run
from relit.errors import (
    AmbiguousRunError,
    RunExistsError,
    RunNotFoundError,
    StoreUnwritableError,
)
from relit.handle import JobHandle
from relit.initial import find_initial
from relit.reading import RunReader
from relit.resuming import resume_run
from relit.spec import files
from relit.spec.model import Init, JobSpec
from relit.spec.resolve import absolute_store, resolve
from relit.transport import OVER_IN_RAY, JobTransport, RayJobs
from relit_platform.run_config import InitConfig, RunConfig
from relit_storage.errors import ObjectMissingError, StoreError, UnsupportedStoreError
from relit_storage.run import layout
from relit_storage.stores.opening import open_store, probe
from relit_storage.stores.protocol import ObjectStore

DEFAULT_STORE = "~/.relit/store"


def submit(spec: JobSpec, address: str | None = None, wait: bool = False) -> JobHandle:
    """Start the job a specification describes; with `wait`, block until it is over.

    address is a Ray dashboard (http://host:8265); without it RAY_ADDRESS decides, and without
    that a local cluster is started. The same run_id and specification again is the same run.
    """
    job = Client(address).submit(spec)
    if wait:
        job.wait()
    return job


class Client:
    """One cluster and one store. Making one touches neither."""

    def __init__(
        self,
        address: str | None = None,
        *,
        store: str | None = None,
        transport: JobTransport | None = None,
    ) -> None:
        self._given_store = store
        self.store_url = absolute_store(store or os.environ.get("RELIT_STORE") or DEFAULT_STORE)
        self.transport: JobTransport = transport or RayJobs(address)

    # ---- to a run ----

    def submit(self, spec: JobSpec) -> JobHandle:
        """See `submit`.

        A store given to the client goes before spec.store, and that before RELIT_STORE.
        """
        if self._given_store or "store" not in spec.model_fields_set:
            spec = spec.model_copy(update={"store": self.store_url})
        config, code = resolve(spec)
        spec = spec.model_copy(update={"run_id": config.run_id, "store": config.store})
        client = self._at(config.store)
        reader = client._reader(config.run_key)
        check_writable(config.store)
        client._check_id(config)
        if reader.exists():
            check_same_run(reader, spec, config, code)
        if spec.init is not None and not reader.attempts():
            config = dataclasses.replace(config, init=client._find_initial(spec.init))
        client.transport.connect()
        if not reader.store.put_if_absent(layout.CONFIG, files.to_yaml(spec).encode()):
            check_same_run(reader, spec, config, code)
        attempts = reader.attempts()
        if attempts and reader.never_started():
            last = str(attempts[-1]["submission_id"])
            if not run_writer.hand_over(config, last, client.transport):
                run_writer.start_attempt(reader.store, config, client.transport)
        elif not attempts:
            run_writer.write_run(reader.store, config, code)
            run_writer.write_index(open_store(config.store), config)
            run_writer.start_first(reader.store, config, client.transport)
        return JobHandle(reader, client)

    def resume(
        self,
        job: JobHandle,
        *,
        spec: JobSpec | None = None,
        overrides: Sequence[str] = (),
        allow: Sequence[str] = (),
    ) -> JobHandle:
        """See JobHandle.resume."""
        plan = resume_run(
            job.reader,
            spec=spec,
            overrides=overrides,
            allow=allow,
            find_initial=self._find_initial,
            connect=self.transport.connect,
            starts=self._starts,
        )
        run_writer.start_attempt(job.reader.store, plan.config, self.transport, plan.changes)
        return JobHandle(job.reader, self)

    # ---- from a run's id ----

    def get(self, run: str) -> JobHandle:
        """The run with this id, unique prefix of an id, or directory (anything with a '/')."""
        if "/" in run or run in (".", ".."):
            return self._get_directory(run)
        store = open_store(self.store_url)
        keys = [layout.index_key(run)]
        if store.size(keys[0]) is None:
            keys = store.list(layout.index_key(run).removesuffix(".json"))
        if not keys:
            raise RunNotFoundError(run=run, store=self.store_url)
        if len(keys) > 1:
            names = [key.removeprefix("index/").removesuffix(".json") for key in keys[:8]]
            raise AmbiguousRunError(prefix=run, candidates=", ".join(names))
        entry = _index_entry(store, keys[0])
        if entry is None:
            raise RunNotFoundError(run=run, store=self.store_url)
        return JobHandle(self._reader(entry["run_key"]), self)

    def list(self) -> list[dict[str, Any]]:
        """Every run of the store, newest first: its index entry and its status."""
        store = open_store(self.store_url)
        found = []
        for key in store.list("index/"):
            entry = _index_entry(store, key)
            if entry is not None:
                found.append({**entry, **self._reader(entry["run_key"]).status()})
        return sorted(found, key=lambda run: -float(run.get("created_at_s", 0)))

    # ---- inside ----

    def _at(self, store: str) -> Client:
        return Client(store=store, transport=self.transport)

    def _reader(self, run_key: str) -> RunReader:
        return RunReader(open_store(self.store_url), run_key)

    def _check_id(self, config: RunConfig) -> None:
        """Actors, jobs and disk folders go by the run's id alone: one experiment has it."""
        entry = _index_entry(open_store(self.store_url), layout.index_key(config.run_id))
        if entry is not None and entry["run_key"] != config.run_key:
            diff = f"it is {entry['run_key']}, not {config.run_key}"
            raise RunExistsError(run=config.run_id, diff=diff)

    def _starts(self, submission_id: str) -> bool:
        job = self.transport.status(submission_id)
        return job is not None and job[0] not in OVER_IN_RAY

    def _find_initial(self, init: Init) -> InitConfig:
        return find_initial(init, lambda run: self.get(run).reader)

    def _get_directory(self, path: str) -> JobHandle:
        place, mark, options = absolute_store(path).partition("?")
        root, _, run_id = place.rstrip("/").rpartition("/")
        root, _, experiment = root.rpartition("/")
        client = self._at(f"{root}{mark}{options}")
        reader = client._reader(f"{experiment}/{run_id}")
        if not root or not reader.is_there():
            raise RunNotFoundError(run=path, store=root)
        return JobHandle(reader, client)


def _index_entry(store: ObjectStore, key: str) -> dict[str, Any] | None:
    """An entry of the index; None if it was deleted while we looked, or is no entry of ours."""
    try:
        entry = json.loads(store.get(key))
    except (ObjectMissingError, ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("run_key"), str):
        return None
    named = entry["run_key"].rpartition("/")[2] == key.removeprefix("index/").removesuffix(".json")
    timed = isinstance(entry.get("created_at_s", 0), (int, float))
    return entry if named and timed and ".." not in entry["run_key"].split("/") else None


def check_writable(store_url: str) -> None:
    """Write to the store and, where it is remote, see that it keeps its promises; blocks.

    StoreUnwritableError names the store; UnsupportedStoreError what it lacks.
    """
    try:
        store = open_store(store_url)
        if "://" in store_url:
            probe(store)
        else:
            key = f"index/.written-{secrets.token_hex(8)}"
            store.put(key, b"written")  # a full disk still takes an empty file
            store.delete(key)
    except UnsupportedStoreError:
        raise
    except (StoreError, OSError) as error:
        raise StoreUnwritableError(store=store_url, cause=error) from error
