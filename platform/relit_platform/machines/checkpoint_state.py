"""The checkpoint machine's vocabulary: what a step on its way out looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from relit_platform.facts import ShardFailed, ShardPersisted, ShardUploaded, Tier
from relit_platform.machines.cadence import Cadence
from relit_platform.machines.lineage import Lineage
from relit_storage.checkpoint.retention import Keep

Key = tuple[int, int]  # (step, generation)


class CheckpointPhase(StrEnum):
    """How far a step has come; see the table in checkpoint.py."""

    OPEN = "open"
    PERSISTED = "persisted"
    COMMITTED = "committed"
    UPLOADING = "uploading"
    DURABLE = "durable"
    EXPIRED = "expired"
    ABANDONED = "abandoned"


TERMINAL = (CheckpointPhase.EXPIRED, CheckpointPhase.ABANDONED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the machine. object: which steps of the disk tier go on to the object tier."""

    max_open: int = 2
    persist_deadline_s: float = 300.0
    upload_deadline_s: float = 3600.0
    object: Cadence = field(default_factory=lambda: Cadence(every_steps=200))
    keep_disk: Keep = field(default_factory=lambda: Keep(newest=2))
    keep_object: Keep = field(default_factory=lambda: Keep(newest=3))
    max_remembered: int = 256
    max_metrics: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One step of one generation. shards: by rank, as acknowledged by the agents.

    published: a manifest of it was seen, though not all shards: it may be whole on nodes that are
    away. outward_s: when it was chosen for the object tier, or found there. size: bytes of its
    shards where those are not known one by one; 0: not known either.
    """

    step: int
    generation: int
    world: int
    phase: CheckpointPhase = CheckpointPhase.OPEN
    since_s: float = 0.0
    final: bool = False
    wants_object: bool = False
    outward_s: float = 0.0
    shards: Mapping[int, ShardPersisted] = field(default_factory=dict)
    uploaded: frozenset[int] = frozenset()
    on_disk: bool = False
    on_object: bool = False
    published: bool = False
    reason: str = ""
    size: int = 0

    @property
    def key(self) -> Key:
        """(step, generation)."""
        return self.step, self.generation

    @property
    def num_bytes(self) -> int:
        """What it takes on a tier, tensors and extras; 0 if unknown."""
        return sum(s.num_bytes + s.extras_bytes for s in self.shards.values()) or self.size

    def on_tier(self, tier: Tier) -> bool:
        """True if it is committed there."""
        return self.on_disk if tier == "disk" else self.on_object

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes that hold a shard of it on disk."""
        return tuple(sorted({shard.node_id for shard in self.shards.values()}))

    @property
    def waits_for_nodes(self) -> bool:
        """True if what is missing can only be on nodes that are away: nobody gives it up."""
        return self.published and self.phase in (CheckpointPhase.OPEN, CheckpointPhase.PERSISTED)

    @property
    def saving(self) -> bool:
        """True while something about it is still to be done."""
        if self.waits_for_nodes:
            return False
        busy = (CheckpointPhase.OPEN, CheckpointPhase.PERSISTED, CheckpointPhase.UPLOADING)
        waits = self.phase is CheckpointPhase.COMMITTED and self.wants_object
        return self.phase in busy or waits


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointBook:
    """All steps that some tier may hold, and what was ignored, by reason. finishing: no step
    comes after those that are under way. metrics: by step of the line, as far as rows told.
    began_s: when the first generation was formed. restoring: a restore is under way, for a
    generation after `restoring_after`; protected: steps that it uses, or the one before it used;
    withheld: deletions that wait for that.
    """

    limits: Limits = Limits()
    lineage: Lineage = field(default_factory=Lineage)
    steps: Mapping[Key, Checkpoint] = field(default_factory=dict)
    protected: frozenset[Key] = frozenset()
    finishing: bool = False
    ignored: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[int, float] = field(default_factory=dict)
    began_s: float = 0.0
    restoring: bool = False
    restoring_after: int = 0
    withheld: tuple[Discard, ...] = ()

    def having(self, known: Checkpoint) -> CheckpointBook:
        """The book with this step as it is now."""
        return replace(self, steps={**self.steps, known.key: known})

    def on_line(self) -> list[Checkpoint]:
        """The steps of the surviving line, oldest first."""
        found = (c for c in self.steps.values() if self.lineage.on_line(c.generation, c.step))
        return sorted(found, key=lambda c: (c.generation, c.step))

    @property
    def saving(self) -> bool:
        """True while a step is on its way to a tier."""
        return any(c.saving for c in self.steps.values())

    def newest(self, tier: Tier) -> int | None:
        """The newest step on disk or object that is on the line, or None."""
        return max((c.step for c in self.on_line() if c.on_tier(tier)), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisting:
    """A rank has asked its agent to persist this step. final: it goes to every tier."""

    step: int
    generation: int
    rank: int
    world: int
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The manifest is on every node that holds a shard."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFailed:
    """The manifest was refused, or could not be written for good."""

    step: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """The object tier's commit log names this step."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFailed:
    """The commit log refused this step, or the store stayed away."""

    step: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFormed:
    """The line of history goes on from here; protected is what is being restored, if anything."""

    generation: int
    start_step: int
    protected: frozenset[Key] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoring:
    """A restore is being planned, or its plan has taken these steps."""

    steps: frozenset[Key] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class NotDeleted:
    """A deletion that was on its way found its step in use by a restore, and left it."""

    discard: Discard


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A re-created manager found this step: with a manifest on disk, or in the commit log."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A metric row gives this value to a step; the newest word counts."""

    step: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """The answer to ReadPins: these steps are pinned. Retention happens now."""

    steps: frozenset[int]


@dataclass(frozen=True, slots=True)
class Finishing:
    """Every rank has returned: the newest step is the last one and goes to every tier."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time has passed."""


CheckpointEvent = (
    Persisting
    | ShardPersisted
    | ShardUploaded
    | ShardFailed
    | Published
    | PublishFailed
    | Logged
    | LogFailed
    | GenerationFormed
    | Restoring
    | NotDeleted
    | Adopted
    | Measured
    | Pins
    | Finishing
    | Deadline
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Write the manifest of these shards to their nodes; answer Published or PublishFailed."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """Have the agents copy these shards outward; they answer for each shard."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCommit:
    """Write manifest and log entry to the object tier; answer Logged or LogFailed."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class ReadPins:
    """Something was committed, so something may go: read the pins and answer Pins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """Delete a step's files from a tier. nodes: where (disk only)."""

    step: int
    generation: int
    tier: Tier
    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something for the event log."""

    kind: str
    step: int
    generation: int
    data: dict[str, Any] = field(default_factory=dict)
    level: str = "info"


CheckpointAction = Publish | Upload | LogCommit | ReadPins | Discard | Note
Outcome = tuple[CheckpointBook, list[CheckpointAction]]
