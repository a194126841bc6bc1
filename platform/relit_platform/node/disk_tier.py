"""A node's disk tier: shard records and published manifests.

The directory is the truth; nothing is remembered in memory. Files of a step lie together below
`checkpoints/steps/`, with the names they get in the object tier.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from typing import Any

from relit_platform.errors import UsageError
from relit_platform.facts import ShardPersisted
from relit_platform.node.persist import RECORD_SUFFIX, load_record, read_record
from relit_storage.checkpoint.durable import (
    create_file,
    is_temporary,
    make_dirs,
    read_file,
    sync_dir,
)
from relit_storage.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from relit_storage.checkpoint.manifest_entries import ShardEntry
from relit_storage.errors import (
    CommitConflictError,
    CorruptShardError,
    FencedError,
    ManifestError,
)
from relit_storage.run.layout import (
    STEPS_PREFIX,
    manifest_key,
    parse_step_prefix,
    step_prefix,
)


class DiskTier:
    """Checkpoints below one root. Thread-safe, because files are only created and removed whole."""

    def __init__(self, root: str, node_id: str) -> None:
        self.root = root
        self._node_id = node_id

    def clean(self) -> None:
        """Remove what interrupted writes left behind; before anything else writes."""
        for folder, _, names in os.walk(os.path.join(self.root, STEPS_PREFIX)):
            for name in names:
                if is_temporary(name):
                    os.unlink(os.path.join(folder, name))

    def steps(self) -> list[tuple[int, int]]:
        """(step, generation) of every step of which anything is here, in order of generation."""
        found = []
        top = os.path.join(self.root, STEPS_PREFIX)
        for step in _listed(top):
            for generation in _listed(os.path.join(top, step)):
                place = parse_step_prefix(f"{STEPS_PREFIX}{step}/{generation}/")
                if place is not None:
                    found.append(place)
        return sorted(found, key=lambda place: (place[1], place[0]))

    def records(self) -> tuple[list[ShardPersisted], list[dict[str, Any]]]:
        """Every whole shard (sizes are looked at, bytes are not), and refusals with reasons."""
        records, refusals = [], []
        for step, generation in self.steps():
            for name in _listed(self._folder(step, generation)):
                if not name.endswith(RECORD_SUFFIX):
                    continue
                path = os.path.join(self._folder(step, generation), name)
                try:
                    records.append(self._ours(load_record(self.root, path)))
                except FileNotFoundError:
                    continue  # dropped since it was listed
                except OSError as error:
                    file = os.path.relpath(path, self.root)
                    refusals.append(_refusal(step, generation, file, _words(error)))
                except CorruptShardError as error:
                    file = os.path.relpath(str(error.fields["file"]), self.root)
                    reason = str(error.fields["reason"])
                    refusals.append(_refusal(step, generation, file, reason))
        return records, refusals

    def record(self, step: int, generation: int, rank: int) -> ShardPersisted | None:
        """One whole shard, or None."""
        found = read_record(self.root, step, generation, rank)
        return None if found is None else self._ours(found)

    def manifests(self) -> tuple[list[tuple[int, int, bytes]], list[dict[str, Any]]]:
        """(step, generation, bytes) of every published step, parsed and checked, and refusals."""
        manifests, refusals = [], self._unlisted()
        for step, generation in self.steps():
            key = manifest_key(step, generation)
            try:
                data = read_file(os.path.join(self.root, key), MAX_MANIFEST_BYTES)
                _parse(data, step, generation)
            except FileNotFoundError:
                continue
            except OSError as error:
                refusals.append(_refusal(step, generation, key, _words(error)))
                continue
            except ManifestError as error:
                refusals.append(_refusal(step, generation, key, str(error.fields["reason"])))
                continue
            manifests.append((step, generation, data))
        return manifests, refusals

    def newest_published(self) -> tuple[int, int] | None:
        """(generation, step) of the newest step with a manifest."""
        published = [
            (generation, step)
            for step, generation in self.steps()
            if os.path.exists(os.path.join(self.root, manifest_key(step, generation)))
        ]
        return max(published, default=None)

    def publish(self, step: int, generation: int, data: bytes) -> None:
        """Create the manifest, exclusively; durable on return, and repeatable.

        Raises ManifestError if it does not fit the step or this node's shards, FencedError if a
        newer generation has published here, CommitConflictError if other bytes are there.
        """
        manifest = _parse(data, step, generation)
        for shard in manifest.shards:
            if shard.node_id == self._node_id:
                self._check_held(manifest, shard)
        newest = self.newest_published()
        if newest is not None and newest[0] > generation:
            raise FencedError(what="generation", ours=generation, newest=newest[0])
        key = manifest_key(step, generation)
        self._make_folder(step, generation)
        if not create_file(os.path.join(self.root, key), data):
            raise CommitConflictError(step=step, key=key)

    def _make_folder(self, step: int, generation: int) -> None:
        """The step's folder, its name and those above it durable, whoever has made them."""
        path = self._folder(step, generation).rstrip("/")
        make_dirs(path)
        for _ in step_prefix(step, generation).strip("/").split("/"):
            # Who was killed between a mkdir and its sync has left a name that a power cut takes.
            path = os.path.dirname(path)
            sync_dir(path)

    def drop(self, step: int, generation: int) -> None:
        """Delete a step, its manifest first; repeatable.

        Raises UsageError for the newest published step: no retention policy may take it.
        """
        if self.newest_published() == (generation, step):
            raise UsageError(message=f"step {step} is the newest on disk and is never dropped.")
        folder = self._folder(step, generation)
        try:
            os.unlink(os.path.join(self.root, manifest_key(step, generation)))
            sync_dir(folder)
        except FileNotFoundError:
            pass  # never published, or half dropped before
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.rmdir(os.path.dirname(folder.rstrip("/")))
        except OSError:
            pass  # another generation of the same step is there

    def _unlisted(self) -> list[dict[str, Any]]:
        """Folders that are there but cannot be read: what lies in them is not nothing."""
        top = os.path.join(self.root, STEPS_PREFIX)
        refusals = []
        for folder in (top, *(os.path.join(top, step) for step in _listed(top))):
            try:
                os.listdir(folder)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                name = os.path.basename(folder)
                step = int(name) if name.isdecimal() else 0
                key = os.path.relpath(folder, self.root)
                refusals.append(_refusal(step, 0, key, _words(error)))
        return refusals

    def _check_held(self, manifest: Manifest, shard: ShardEntry) -> None:
        held = self.record(manifest.step, manifest.generation, shard.rank)
        if held is None or held.checksums != shard.checksums:
            reason = "is not on this node" if held is None else "has other bytes on this node"
            raise ManifestError(file="manifest", reason=f"{shard.file} {reason}")

    def _ours(self, record: ShardPersisted) -> ShardPersisted:
        """Records of an adopted folder name the node that wrote them; the files are here now."""
        return dataclasses.replace(record, node_id=self._node_id)

    def _folder(self, step: int, generation: int) -> str:
        return os.path.join(self.root, step_prefix(step, generation))


def _parse(data: bytes, step: int, generation: int) -> Manifest:
    manifest = Manifest.from_bytes(data, manifest_key(step, generation))
    if (manifest.step, manifest.generation) != (step, generation):
        reason = f"is of step {manifest.step}, generation {manifest.generation}"
        raise ManifestError(file=manifest_key(step, generation), reason=reason)
    return manifest


def _listed(folder: str) -> Iterator[str]:
    try:
        yield from sorted(os.listdir(folder))
    except OSError:
        return  # no folder, or one that `manifests` refuses with the reason


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _refusal(step: int, generation: int, file: str, reason: str) -> dict[str, Any]:
    return {
        "tier": "disk",
        "step": step,
        "generation": generation,
        "file": file,
        "reason": reason,
    }
