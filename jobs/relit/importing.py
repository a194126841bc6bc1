"""A checkpoint of another tool becomes a committed step of a run: the mirror of `exporting`.

    lease -> run.json, index entry -> shard by shard: scratch file, upload, size read back
          -> manifest, created exclusively -> commit log

Without the commit at the end there is no step: an import that was killed leaves files that `relit
ckpt gc` takes away, and may be repeated. One that fails deletes them itself, but not once it has
begun to commit: what may be committed is never deleted. The run is new, or one that no supervisor
has started yet; it may be a home of checkpoints alone, which others begin with by `init`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from relit import run_writer
from relit.client import Client, check_writable
from relit.driving import driving, renewing
from relit.errors import BadInputError, ImportCommitError, RelitError
from relit.import_source import Source
from relit.reading import RunReader
from relit.spec.model import NAME_PATTERN
from relit.spec.resolve import login_name, run_directory
from relit_platform.control.object_tier import ObjectTier
from relit_storage.checkpoint.checksum import checksum
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.checkpoint.image import ImageLayout, TensorSpec
from relit_storage.checkpoint.image_writing import write_image
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.errors import StoreError
from relit_storage.run import layout
from relit_storage.run.held_lease import HeldLease
from relit_storage.stores.opening import open_store
from relit_storage.stores.protocol import ObjectStore

CHUNK_BYTES = 16 << 20
SHARD_BYTES = 4 << 30  # of scratch space at a time
OnBytes = Callable[[int], None]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import has committed. directory: of the run, a path or a URL."""

    run_id: str
    step: int
    generation: int
    directory: str
    tensors: int
    num_bytes: int
    shards: int

    def to_json(self) -> Json:
        """Plain JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where an import goes. name and experiment describe a run that is new."""

    run_id: str
    step: int = 0
    name: str = ""
    experiment: str = "default"


def import_checkpoint(
    source: Source,
    target: Target,
    client: Client,
    *,
    scratch: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: OnBytes = lambda count: None,
) -> Imported:
    """Commit a source as a step of a run in the client's store; blocks for all of it.

    scratch: a folder for one shard at a time, the system's own by default. on_bytes hears of
    tensors' bytes. BadInputError for a run that has started or has this step or a newer one;
    SourceRefusedError; RunAliveError, LeaseHeldError; FencedError; StoreError. After these nothing
    is committed, and what was uploaded is deleted as far as that is possible. After
    ImportCommitError, or an interrupt at the end, the step may be committed.
    """
    reader = _find(target, client)
    check_writable(client.store_url)
    with driving(reader, "import") as lease:
        _check_free(reader, target)
        _describe(source, target, reader, client)
        work = _Import(source, target, reader, lease, shard_bytes, renewing(lease, on_bytes))
        try:
            with _scratch_folder(scratch) as folder:
                manifest = work.write(folder)
            lease.confirm()
        except BaseException:
            work.abandon()
            raise
        _commit(reader, lease, manifest)
    return Imported(
        run_id=target.run_id,
        step=target.step,
        generation=work.generation,
        directory=run_directory(client.store_url, reader.run_key),
        tensors=len(source.specs),
        num_bytes=source.num_bytes,
        shards=manifest.world,
    )


def _scratch_folder(scratch: str | None) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(
            prefix="relit-import-", dir=scratch, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise BadInputError(
            f"no shard can be laid out in {scratch or 'the temporary folder'}: "
            f"{error.strerror or error}; choose another folder by --scratch."
        ) from error


def _commit(reader: RunReader, lease: HeldLease, manifest: Manifest) -> None:
    """Whatever goes wrong from here on, the step may be in the log: nothing of it is deleted."""
    tier = ObjectTier(reader.store, CommitLog(reader.store), time.time)
    try:
        tier.commit(lease.epoch, manifest.step, manifest.generation, manifest.to_bytes())
    except RelitError as error:
        cause = str(error).rstrip(".")
        raise ImportCommitError(run=reader.run_id, step=manifest.step, cause=cause) from error


def _find(target: Target, client: Client) -> RunReader:
    for what, value in (("--run", target.run_id), ("--experiment", target.experiment)):
        if not re.match(NAME_PATTERN, value):
            raise BadInputError(f"{what} {value!r} does not match {NAME_PATTERN}.")
    root = open_store(client.store_url)
    if root.size(layout.index_key(target.run_id)) is not None:
        return client.get(target.run_id).reader
    return RunReader(root, f"{target.experiment}/{target.run_id}")


def _check_free(reader: RunReader, target: Target) -> None:
    if not reader.never_started():
        raise BadInputError(
            f"run {target.run_id} has started already; import into a new run, and begin another "
            "one with it by `init`."
        )
    commits = CommitLog(reader.store).replay().commits
    newest = max((record.step for record in commits), default=-1)
    if newest >= target.step:
        raise BadInputError(
            f"run {target.run_id} has step {newest} already; choose a --step above it."
        )


def _describe(source: Source, target: Target, reader: RunReader, client: Client) -> None:
    """What makes the run findable; a submit under the same id writes its own over it."""
    now = time.time()
    about = {
        "v": 1,
        "run_id": target.run_id,
        "name": target.name or target.run_id,
        "experiment": target.experiment,
        "owner": login_name(),
        "created_at_s": now,
        "submitted_from": socket.gethostname(),
        "imported": {"format": source.format, **source.origin},
    }
    reader.store.put_if_absent(layout.RUN, run_writer.to_json(about))
    named = ("run_id", "name", "experiment", "owner", "created_at_s")
    entry = {"run_key": reader.run_key, **{key: about[key] for key in named}}
    root = open_store(client.store_url)
    root.put_if_absent(layout.index_key(target.run_id), run_writer.to_json(entry))


class _Import:
    """The files of one import; its generation is a number that no commit of the run has yet."""

    def __init__(
        self,
        source: Source,
        target: Target,
        reader: RunReader,
        lease: HeldLease,
        shard_bytes: int,
        on_bytes: OnBytes,
    ) -> None:
        self._source = source
        self._target = target
        self._reader = reader
        self._store: ObjectStore = reader.store
        self._lease = lease
        self._layouts = _planned(source.specs, shard_bytes)
        self._on_bytes = on_bytes
        # The lease's number is new in each try: files of one that was killed are not mixed in.
        newest = CommitLog(reader.store).replay().generation
        self.generation = max(newest + 1, lease.epoch)

    def write(self, scratch: str) -> Manifest:
        """Shards and their JSON, each with its size read back; the manifest, not yet published."""
        shards = [self._shard(scratch, rank) for rank in range(len(self._layouts))]
        return Manifest.from_shards(
            shards,
            run_id=self._target.run_id,
            epoch=self._lease.epoch,
            cursor={},
            ids={},
            created_at_s=time.time(),
        )

    def abandon(self) -> None:
        """Delete what was uploaded; what is left after a failure of the store is gc's."""
        try:
            for key in self._store.list(layout.step_prefix(self._target.step, self.generation)):
                self._store.delete(key)
        except StoreError:
            pass  # the first error is the one to report

    def _shard(self, scratch: str, rank: int) -> Json:
        planned, place = self._layouts[rank], (self._target.step, self.generation, rank)
        path = os.path.join(scratch, "shard")
        try:
            ref = write_image(path, planned, self._source.blocks, CHUNK_BYTES, self._on_bytes)
        except OSError as error:
            raise BadInputError(
                f"a shard of {planned.total_bytes} bytes cannot be laid out: {error}; choose "
                "another folder by --scratch."
            ) from error
        file, extras_file = layout.shard_key(*place), layout.extras_key(*place)
        extras = self._extras(rank)
        self._store.put_file(file, path)
        os.unlink(path)
        self._store.put(extras_file, extras)
        self._check_size(file, ref.num_bytes)
        self._check_size(extras_file, len(extras))
        return {
            "step": self._target.step,
            "generation": self.generation,
            "rank": rank,
            "world": len(self._layouts),
            "node_id": socket.gethostname(),
            "file": file,
            "num_bytes": ref.num_bytes,
            "chunk_bytes": ref.chunk_bytes,
            "checksums": ref.checksums,
            "extras_file": extras_file,
            "extras_bytes": len(extras),
            "extras_checksum": checksum(extras),
            "tensors": planned.index(),
        }

    def _extras(self, rank: int) -> bytes:
        """What a rank leaves beside its shard; `imported` says that no rank was it."""
        return json.dumps(
            {
                "v": 1,
                "step": self._target.step,
                "generation": self.generation,
                "rank": rank,
                "world": len(self._layouts),
                "cursor": {},
                "ids": {},
                "rows": [],
                "imported": {"format": self._source.format, **self._source.origin},
                "objects": self._source.objects,
            }
        ).encode()

    def _check_size(self, key: str, num_bytes: int) -> None:
        found = self._store.size(key)
        if found != num_bytes:
            cause = f"has {found} bytes after the upload of {num_bytes}"
            raise StoreError(url=self._store.url, key=key, cause=cause)


def _planned(specs: Iterable[TensorSpec], shard_bytes: int) -> list[ImageLayout]:
    """Tensors in order of name, in as few images as hold them; at least one, however empty."""
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in sorted(specs, key=lambda spec: spec.name):
        if groups[-1] and size + spec.num_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.num_bytes
    try:
        return [ImageLayout.plan(group, {"relit": "1"}) for group in groups]
    except (ValueError, UnicodeEncodeError) as error:
        raise BadInputError(f"the source cannot be laid out: {error}.") from error
