"""The register of a node's worker processes, kept in a file so that it outlives the agent."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from relit_platform.facts import Heartbeat
from relit_platform.node.heartbeat import HeartbeatPage
from relit_platform.node.processes import ProcessKey
from relit_storage.checkpoint.durable import write_file


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEntry:
    """A worker process that said hello and has not ended yet."""

    worker_id: str
    pid: int
    start_ticks: int
    epoch: int

    @property
    def process(self) -> ProcessKey:
        """Its process, safe against reuse of the pid."""
        return ProcessKey(self.pid, self.start_ticks)


class WorkerRegister:
    """Thread-safe. Every change is in the file before the call returns."""

    def __init__(self, path: str, heartbeats: str) -> None:
        self._path = path
        self._heartbeats = heartbeats
        self._lock = threading.Lock()
        self._entries: dict[str, WorkerEntry] = {}
        self._pages: dict[str, HeartbeatPage] = {}

    def load(self) -> list[WorkerEntry]:
        """Read the file of an earlier life; the entries may be of processes that are gone."""
        if os.path.exists(self._path):
            with open(self._path, "rb") as file:
                entries = [WorkerEntry(**fields) for fields in json.loads(file.read())]
            with self._lock:
                for entry in entries:
                    self._admit(entry)
        return self.entries()

    def add(self, entry: WorkerEntry) -> None:
        """Register a worker and create its heartbeat page; repeatable."""
        with self._lock:
            if self._entries.get(entry.worker_id) != entry:
                self._admit(entry)
            self._save()  # also if it is known: the memory may have been full the last time

    def remove(self, process: ProcessKey) -> list[tuple[WorkerEntry, Heartbeat]]:
        """Take out a process that has ended: its workers and their last signs of life."""
        found = []
        with self._lock:
            for entry in [e for e in self._entries.values() if e.process == process]:
                del self._entries[entry.worker_id]
                page = self._pages.pop(entry.worker_id)
                found.append((entry, page.read(entry.worker_id)))
                page.close()
                _unlink_if_there(page.path)
            if found:
                with contextlib.suppress(OSError):  # memory is full: no reason to lose an exit
                    self._save()  # the file names who is gone; the next life finds that out again
        return found

    def entries(self) -> list[WorkerEntry]:
        """All that are registered now."""
        with self._lock:
            return list(self._entries.values())

    def alive(self) -> frozenset[str]:
        """Ids of workers whose end was not noticed yet."""
        return frozenset(entry.worker_id for entry in self.entries())

    def heartbeats(self) -> list[Heartbeat]:
        """The newest sign of life of every registered worker."""
        with self._lock:
            return [page.read(worker_id) for worker_id, page in sorted(self._pages.items())]

    def close(self) -> None:
        """Unmap the pages; the files stay."""
        with self._lock:
            for page in self._pages.values():
                page.close()
            self._pages.clear()

    def _admit(self, entry: WorkerEntry) -> None:
        path = os.path.join(self._heartbeats, entry.worker_id)
        self._pages[entry.worker_id] = HeartbeatPage.create(path, entry.pid)
        self._entries[entry.worker_id] = entry

    def _save(self) -> None:
        write_file(self._path, [_dump(self._entries.values())])


def _dump(entries: Iterable[WorkerEntry]) -> bytes:
    fields = WorkerEntry.__slots__
    return json.dumps([{name: getattr(e, name) for name in fields} for e in entries]).encode()


def _unlink_if_there(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # removed with the folder
