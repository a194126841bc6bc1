"""The object tier as the coordinator sees it: manifests and the commit log over a store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from relit_platform.machines.restore import ObjectCommit
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.checkpoint.log_records import LogRecord
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.checkpoint.pins import read_pins
from relit_storage.errors import (
    CommitConflictError,
    ManifestError,
    ObjectMissingError,
    StoreError,
    StoreUnavailableError,
)
from relit_storage.run.layout import manifest_key, step_prefix
from relit_storage.stores.protocol import ObjectStore

MAX_COMMITS_READ = 8
FIRST_SLOT = 1  # of the log; always an epoch, never a commit


class ObjectTier:
    """An ObjectPort over a store that is prefixed at the run. Thread-safe as far as both are."""

    def __init__(self, store: ObjectStore, log: CommitLog, clock: Callable[[], float]) -> None:
        self._store = store
        self._log = log
        self._clock = clock

    def open_epoch(self, epoch: int) -> int:
        """See ObjectPort.open_epoch."""
        self._log.append_epoch(epoch, at_s=self._clock())
        return self._log.replay().generation

    def commit(self, epoch: int, step: int, generation: int, manifest: bytes) -> None:
        """See ObjectPort.commit. Raises CommitConflictError, FencedError, StoreError.

        A step older than the newest commit comes too late: the newest durable step never goes back.
        """
        key = manifest_key(step, generation)
        commits = self._log.replay().commits
        known = {record.identity for record in commits}
        if commits and (step, generation) not in known:
            newest = commits[0]
            if (newest.generation, newest.step) > (generation, step):
                raise CommitConflictError(step=step, key=newest.manifest_key)
        if not self._store.put_if_absent(key, manifest) and self._store.get(key) != manifest:
            raise CommitConflictError(step=step, key=key)
        self._log.append_commit(
            epoch=epoch,
            generation=generation,
            step=step,
            manifest_key=key,
            manifest_sha256=hashlib.sha256(manifest).hexdigest(),
            manifest_bytes=len(manifest),
            at_s=self._clock(),
        )

    def commits(self) -> Sequence[ObjectCommit]:
        """See ObjectPort.commits. Manifests are read of the newest MAX_COMMITS_READ only: a
        restore never looks further, and retention needs no more than that the others are there.
        """
        view = self._log.replay()
        commits = view.commits
        older = [
            ObjectCommit(
                step=record.step,
                generation=record.generation,
                manifest=None,
                problem=f"older than the newest {MAX_COMMITS_READ} commits",
            )
            for record in commits[MAX_COMMITS_READ:]
        ]
        lost = [
            ObjectCommit(
                step=0, generation=0, manifest=None, problem=f"slot {seq} of the log: {reason}"
            )
            for seq, reason in view.refused[-MAX_COMMITS_READ:]
            if seq > FIRST_SLOT
        ]
        return [*(self._read(record) for record in commits[:MAX_COMMITS_READ]), *older, *lost]

    def pins(self) -> frozenset[int]:
        """See ObjectPort.pins."""
        return read_pins(self._store)

    def retire(self, epoch: int, step: int, generation: int) -> None:
        """See ObjectPort.retire. The log says so first: a reader never finds half a step."""
        self._log.append_retire(epoch=epoch, generation=generation, step=step, at_s=self._clock())
        self._store.delete(manifest_key(step, generation))
        for key in self._store.list(step_prefix(step, generation)):
            self._store.delete(key)

    def _read(self, record: LogRecord) -> ObjectCommit:
        problem = ""
        manifest = None
        try:
            raw = self._store.get_range(record.manifest_key, 0, record.manifest_bytes)
            if hashlib.sha256(raw).hexdigest() != record.manifest_sha256:
                problem = "the manifest is not the one that was committed"
            else:
                manifest = Manifest.from_bytes(raw, record.manifest_key)
        except ObjectMissingError:
            problem = "the manifest is missing"
        except ManifestError as error:
            problem = str(error.fields.get("reason"))
        except StoreUnavailableError:
            raise
        except StoreError as error:  # of this object alone: the other steps may be whole
            problem = str(error)
        return ObjectCommit(
            step=record.step, generation=record.generation, manifest=manifest, problem=problem
        )
