"""Performs what the checkpoint machine decides: manifests, uploads, commits, deletions.

`feed` is called under the coordinator's lock and never blocks; every call to an agent or a store
runs in the background and comes back through `reenter`, which takes the lock.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from relit_platform.control.ports import AgentError, AgentPort, BackgroundPort, ObjectPort
from relit_platform.errors import PlatformError
from relit_platform.facts import ShardPersisted
from relit_platform.machines.checkpoint import advance
from relit_platform.machines.checkpoint_state import (
    Checkpoint,
    CheckpointBook,
    CheckpointEvent,
    CheckpointPhase,
    Deadline,
    Discard,
    Key,
    Limits,
    LogCommit,
    LogFailed,
    Logged,
    Measured,
    NotDeleted,
    Note,
    Pins,
    Publish,
    Published,
    PublishFailed,
    ReadPins,
    Upload,
)
from relit_platform.machines.holding import in_use
from relit_platform.machines.lineage import Lineage
from relit_platform.machines.policies import disk_keep, object_cadence, object_keep
from relit_platform.run_config import CheckpointConfig, RunConfig
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.errors import (
    CommitConflictError,
    ManifestError,
    StorageError,
    StoreError,
    StoreUnavailableError,
)

MAX_TRIES = 8
RETRY_S = 1.0
UPLOAD_AGAIN_S = 120.0
MAX_MANIFESTS = 64
PINS_AGAIN_S = 120.0  # a question that has had no answer for so long was lost

Reenter = Callable[[CheckpointEvent], None]
Say = Callable[[Note], None]


class CheckpointDesk:
    """The shell of the checkpoint machine. Not thread-safe: the coordinator's lock guards it."""

    def __init__(
        self,
        *,
        config: RunConfig,
        agents: AgentPort,
        objects: ObjectPort,
        background: BackgroundPort,
        reenter: Reenter,
        say: Say,
        steady: Callable[[], float],
    ) -> None:
        limits = Limits(
            persist_deadline_s=_persist_deadline_s(config.checkpoint),
            object=object_cadence(config.checkpoint),
            keep_disk=disk_keep(config.checkpoint),
            keep_object=object_keep(config.checkpoint),
        )
        self.book = CheckpointBook(limits=limits)
        self.epoch = 0
        self.data_id = ""
        self._config = config
        self._agents = agents
        self._objects = objects
        self._background = background
        self._reenter = reenter
        self._say = say
        self._steady = steady
        self._manifests: dict[Key, bytes] = {}
        self._manifests_lock = threading.Lock()
        self._upload_asked_s: dict[Key, float] = {}
        self._pins: frozenset[int] | None = None  # as last read; None: never yet
        self._pins_asked_s = float("-inf")

    def begin_epoch(self, epoch: int, lineage: Lineage) -> None:
        """Later commits carry this epoch; nothing is being restored any more."""
        self.epoch = epoch
        merged = self.book.lineage.merged(lineage.entries)
        self.book = replace(self.book, lineage=merged, protected=frozenset())

    def feed(self, event: CheckpointEvent) -> None:
        """Advance the machine and start what it asks for. Under the coordinator's lock."""
        self.book, actions = advance(self.book, event, self._steady())
        for action in actions:
            match action:
                case Publish():
                    self._later(self._publish, action.checkpoint)
                case Upload():
                    self._upload_asked_s = {action.checkpoint.key: self._steady()}
                    self._later(self._upload, action.checkpoint)
                case LogCommit():
                    self._later(self._commit, action.checkpoint)
                case ReadPins():
                    self._ask_pins()
                case Discard():
                    self._later(self._discard, action)
                case Note():
                    self._say(action)

    def tick(self) -> None:
        """Deadlines, and uploads that an agent may have forgotten. A few times a second at most."""
        self.feed(Deadline())
        now = self._steady()
        for checkpoint in self.book.steps.values():
            asked_s = self._upload_asked_s.get(checkpoint.key)
            stalled = asked_s is not None and now - asked_s > UPLOAD_AGAIN_S
            if checkpoint.phase is CheckpointPhase.UPLOADING and stalled:
                self._upload_asked_s[checkpoint.key] = now
                self._later(self._upload, checkpoint)

    def agent_started(self) -> None:
        """An agent lost its queue with its process: the next tick asks for uploads again."""
        self._upload_asked_s = dict.fromkeys(self._upload_asked_s, float("-inf"))

    def measured(self, values: Iterable[tuple[int, float]]) -> None:
        """How good steps are, by their number, as metric rows say it."""
        for step, value in values:
            self.feed(Measured(step=step, value=value))

    def space_object(self, every_s: float) -> None:
        """From now on so many seconds lie between two steps that go on to the object tier; what a
        metric asks for goes besides.
        """
        limits = self.book.limits
        cadence = replace(limits.object, every_steps=0, first_steps=0, every_s=every_s)
        self.book = replace(self.book, limits=replace(limits, object=cadence))

    def know_manifest(self, key: Key, manifest: bytes) -> None:
        """Remember the bytes that are published already: the object tier gets the same."""
        with self._manifests_lock:
            self._manifests[key] = manifest
            while len(self._manifests) > MAX_MANIFESTS:
                del self._manifests[next(iter(self._manifests))]

    # ---- in the background ----

    def _later(self, work: Callable[..., None], *args: Any, delay_s: float = 0.0) -> None:
        self._background.submit(lambda: work(*args), delay_s)

    def _publish(self, checkpoint: Checkpoint, tries: int = 1) -> None:
        step, generation = checkpoint.key
        try:
            manifest = self._manifest(checkpoint)
            for node in checkpoint.nodes:
                manifest = self._publish_on(node, checkpoint, manifest)
        except AgentError as error:
            if tries < MAX_TRIES:
                self._later(self._publish, checkpoint, tries + 1, delay_s=RETRY_S)
                return
            self._reenter(PublishFailed(step=step, generation=generation, reason=str(error)))
        except (StorageError, PlatformError) as error:
            self._reenter(PublishFailed(step=step, generation=generation, reason=str(error)))
        else:
            self.know_manifest(checkpoint.key, manifest)
            self._reenter(Published(step=step, generation=generation))

    def _publish_on(self, node: str, checkpoint: Checkpoint, manifest: bytes) -> bytes:
        """Publish; a manifest of the same shards that is there already is as good, and returned."""
        step, generation = checkpoint.key
        try:
            self._agents.publish(node, step, generation, manifest)
        except CommitConflictError:
            there = {(s, g): raw for s, g, raw in self._agents.inventory(node).manifests}
            raw = there.get(checkpoint.key)
            if raw is None or not _same_shards(raw, checkpoint):
                raise
            return raw
        return manifest

    def _manifest(self, checkpoint: Checkpoint) -> bytes:
        known = self._manifests.get(checkpoint.key)
        if known is not None:
            return known
        # Where the data stands follows from the step; the full position is in each rank's extras.
        manifest = Manifest.from_shards(
            [asdict(shard) for shard in checkpoint.shards.values()],
            run_id=self._config.run_id,
            epoch=self.epoch,
            cursor={"step": checkpoint.step},
            ids={
                "config": self._config.config_sha,
                "code": self._config.code_sha,
                "data": self.data_id,
            },
            created_at_s=max(shard.at_s for shard in checkpoint.shards.values()),
        )
        return manifest.to_bytes()

    def _upload(self, checkpoint: Checkpoint, tries: int = 1) -> None:
        step, generation = checkpoint.key
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, shard in sorted(checkpoint.shards.items()):
            if rank not in checkpoint.uploaded:
                ranks[shard.node_id].append(rank)
        try:
            for node, its in ranks.items():
                self._agents.upload(node, step, generation, its)
        except AgentError as error:
            if tries < MAX_TRIES:
                self._later(self._upload, checkpoint, tries + 1, delay_s=RETRY_S)
                return
            self._reenter(LogFailed(step=step, generation=generation, reason=str(error)))
        except (StorageError, PlatformError) as error:
            self._reenter(LogFailed(step=step, generation=generation, reason=str(error)))

    def _commit(self, checkpoint: Checkpoint, tries: int = 1) -> None:
        step, generation = checkpoint.key
        try:
            self._objects.commit(self.epoch, step, generation, self._manifest(checkpoint))
        except StoreError as error:
            if tries < MAX_TRIES:
                self._later(self._commit, checkpoint, tries + 1, delay_s=RETRY_S * 2**tries)
                return
            self._reenter(LogFailed(step=step, generation=generation, reason=str(error)))
        except StorageError as error:
            self._reenter(LogFailed(step=step, generation=generation, reason=str(error)))
        else:
            self._reenter(Logged(step=step, generation=generation))

    def _ask_pins(self) -> None:
        """One question at a time: its answer serves all that has committed until then."""
        now = self._steady()
        if now - self._pins_asked_s > PINS_AGAIN_S:
            self._pins_asked_s = now
            self._later(self._read_pins)

    def _read_pins(self, tries: int = 1) -> None:
        """Nothing is let go of before the pins were read once. A store that stays away must not
        fill the disks: what was read last counts after some tries.
        """
        try:
            self._pins = self._objects.pins()
        except StorageError:
            if tries < MAX_TRIES:
                self._later(self._read_pins, tries + 1, delay_s=RETRY_S)
                return
        self._pins_asked_s = float("-inf")  # what commits from now on asks again
        if self._pins is not None:
            self._reenter(Pins(steps=self._pins))

    def _discard(self, action: Discard, tries: int = 1) -> None:
        """Deleting is best effort: what stays behind is found again at the next start.

        A restore may have begun to use the step since this was asked for.
        """
        if in_use(self.book, action):
            self._reenter(NotDeleted(discard=action))
            return
        away: dict[str, Exception] = {}  # by node; "" is the object tier
        for node in ("",) if action.tier == "object" else action.nodes:
            try:
                self._delete(action, node)
            except (AgentError, StoreUnavailableError) as error:
                away[node] = error  # the others' files go all the same
            except (StorageError, PlatformError) as error:
                self._not_deleted(action, error)
        if away and tries < MAX_TRIES:
            left = action if "" in away else replace(action, nodes=tuple(away))
            self._later(self._discard, left, tries + 1, delay_s=RETRY_S)
        elif away:
            self._not_deleted(action, next(iter(away.values())))

    def _delete(self, action: Discard, node: str) -> None:
        if action.tier == "object":
            self._objects.retire(self.epoch, action.step, action.generation)
        else:
            self._agents.drop(node, [(action.step, action.generation)], action.tier)

    def _not_deleted(self, action: Discard, error: Exception) -> None:
        data = {"tier": action.tier, "reason": action.reason, "error": str(error)}
        self._say(
            Note(kind="ckpt.not_deleted", step=action.step, generation=action.generation, data=data)
        )


def _persist_deadline_s(config: CheckpointConfig) -> float:
    """A node that may write only so fast has as much longer as all that it may hold takes."""
    capped = config.disk_bytes_per_s
    more_s = config.memory_budget_bytes / capped if capped else 0.0
    return Limits().persist_deadline_s + more_s


def _same_shards(raw: bytes, checkpoint: Checkpoint) -> bool:
    try:
        manifest = Manifest.from_bytes(raw)
    except ManifestError:
        return False

    def sums(shard: ShardPersisted | Any) -> tuple[Any, ...]:
        return (shard.rank, shard.file, tuple(shard.checksums), shard.extras_checksum)

    return {sums(s) for s in manifest.shards} == {sums(s) for s in checkpoint.shards.values()}
