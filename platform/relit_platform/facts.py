"""The vocabulary of the control plane: frozen facts that actors send each other.

References, sizes and checksums only; no tensor ever travels in one of these. Nothing here imports
ray, torch or time. A wall time is `at_s` (Unix seconds), taken by the sender.

Who sends what:

    rank      -> manager   JoinRequest, RowBatch, Finished
    manager   -> rank      Waiting | Assignment | Dismissed | Refused   (answers to join)
    agent     -> manager   ShardPersisted, ShardUploaded, ShardFailed, WorkerExited
    manager   -> agent     plain calls (persisting, publishing, uploading, dropping)
    both      -> log       Fact(kind, data): the source of every event in the run directory
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Tier = Literal["memory", "peer", "disk", "object"]
Endpoint = tuple[str, int]  # host and port
Json = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that happened, before it gets a sequence number in the event log.

    kind is dotted past tense ("worker.exited", "generation.formed", "ckpt.committed", ...); src
    is "rank:<n>", "manager", "agent:<node>", "supervisor" or "client". number: the manager's, given
    as it hands the fact out; 0 for the supervisor's own.
    """

    kind: str
    at_s: float
    src: str
    generation: int = 0
    step: int | None = None
    level: Literal["info", "warning", "error"] = "info"
    data: dict[str, Json] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    """Why a member left its generation. kind: "collective" (a peer's connection broke),
    "restore_refused" (a checkpoint file failed its checks), "user" (the loop raised).
    """

    kind: Literal["collective", "restore_refused", "user", "timeout"]
    message: str
    at_s: float
    step: int | None = None
    # tier, step, generation, file, reason; of one shard also rank, of one holder also node
    refused: dict[str, Json] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A member asks for a place in the next generation; repeated until it is answered.

    worker_id is unique for one process life. rank is the place it holds (None: newcomer or
    spare). generation is the last one it was in (0: none). step is the newest boundary whose
    state this process holds in its own memory (None: it holds nothing). endpoint is a fresh
    rendezvous store that this member has opened, used if it becomes the lowest rank.
    """

    worker_id: str
    epoch: int
    node_id: str
    pid: int
    rank: int | None
    generation: int
    step: int | None
    endpoint: tuple[str, int]
    at_s: float
    fault: FaultReport | None = None
    lineage: tuple[tuple[int, int], ...] = ()  # that of its last assignment, handed back


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSource:
    """Where one saved rank's shard of a step can be read.

    location is a slot path (memory, peer), a file path (disk) or a store key (object).
    extras_location is its JSON beside it ("" for a slot, which holds both and says how long they
    are). endpoint: where the agent of node_id answers those of other nodes; None: nowhere.
    """

    rank: int
    tier: Tier
    node_id: str
    location: str
    extras_location: str
    num_bytes: int
    chunk_bytes: int
    checksums: tuple[str, ...]
    extras_bytes: int
    extras_checksum: str
    endpoint: Endpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """The newest whole step and where each of its shards lies; world is the world it was saved at.

    tier is the farthest that a shard comes from: each is taken from the nearest that has it.
    refusals says what was passed over and why, newest first: each {tier, step, generation, file,
    reason}.
    """

    step: int
    generation: int
    world: int
    tier: Tier
    shards: tuple[ShardSource, ...]
    refusals: tuple[dict[str, Json], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSource:
    """Where a new generation takes its state from.

    kind "member": rank `rank` holds boundary `step` in its process and broadcasts it.
    kind "checkpoint": every rank loads `plan`. kind "fresh": rank 0's initial state, step 0.
    """

    kind: Literal["member", "checkpoint", "fresh"]
    step: int
    rank: int | None = None
    plan: RestorePlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A place in a generation. members are worker ids by rank; endpoint is rank 0's store.

    last_row_step is the newest metric row the manager has; the rank that writes rows sends later
    ones again. epilogue: every step is done, only code after the loop remains to run.
    """

    generation: int
    epoch: int
    rank: int
    world: int
    members: tuple[str, ...]
    endpoint: tuple[str, int]
    source: StateSource
    last_row_step: int = 0
    epilogue: bool = False
    reason: str = ""
    lineage: tuple[tuple[int, int], ...] = ()  # see relit_platform.machines.lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Ask again: the generation is not complete. spare: you are waiting as a hot spare."""

    spare: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismissed:
    """Nothing left to do: the run has finished or stopped; leave the loop."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """You are fenced off; end this worker."""

    reason: str
    newest_generation: int


JoinReply = Waiting | Assignment | Dismissed | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInfo:
    """One COMPLETE slot as an agent sees it in shared memory.

    chunk_bytes to extras_checksum are known of copies of another node's snapshot only.
    """

    path: str
    worker_id: str
    node_id: str
    generation: int
    step: int
    rank: int
    world: int
    image_bytes: int
    pinned: bool
    chunk_bytes: int = 0
    checksums: tuple[str, ...] = ()
    extras_bytes: int = 0
    extras_checksum: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPersisted:
    """A rank's image and extras of a step are synced on a node's disk. Paths are relative to the
    disk tier's root of that node and equal to the object keys they get later.
    """

    step: int
    generation: int
    rank: int
    world: int
    node_id: str
    file: str
    num_bytes: int
    chunk_bytes: int
    checksums: tuple[str, ...]
    extras_file: str
    extras_bytes: int
    extras_checksum: str
    tensors: tuple[dict[str, Json], ...]  # parsed image header, see relit_storage.checkpoint.image
    seconds: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUploaded:
    """A persisted shard (image and extras) is in the object tier and its size was read back."""

    step: int
    generation: int
    rank: int
    node_id: str
    seconds: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFailed:
    """Persisting or uploading one shard failed for good; the step is abandoned on that tier."""

    step: int
    generation: int
    rank: int
    node_id: str
    tier: Tier
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """An agent saw a worker's process end (pidfd), or found it gone; node_lost: the manager heard
    that its node is no more, and the agent with it.
    """

    worker_id: str
    node_id: str
    pid: int
    at_s: float
    last_step: int
    last_phase: str
    rank: int = -1  # by its last heartbeat; -1: it never had one
    generation: int = 0
    node_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInventory:
    """All that one node could contribute to a restore.

    disk: the ShardPersisted of every shard found on this node's disk; manifests: canonical
    manifest bytes of every step published on it, as (step, generation, bytes).
    fence: highest generation this node has sealed or served. peers: copies of snapshots of other
    nodes' ranks. endpoint: where its agent answers other agents; None: nowhere.
    """

    node_id: str
    memory: tuple[SlotInfo, ...]
    disk: tuple[ShardPersisted, ...]
    manifests: tuple[tuple[int, int, bytes], ...]
    fence: int
    refusals: tuple[dict[str, Json], ...] = ()
    disk_root: str = ""  # what `file` of a ShardPersisted is relative to, on this node
    peers: tuple[SlotInfo, ...] = ()
    endpoint: Endpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A rank's last sign of life, read from shared memory without a call."""

    worker_id: str
    pid: int
    rank: int
    generation: int
    step: int
    phase: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Metric or ledger rows of completed steps, sent by a rank as often as it likes.

    Every row has an int "step" and should have "at_s" (when the step ended; a row without one
    counts from its arrival). Sending a row again is harmless: the first value wins. memory_step
    is the newest step this rank has COMPLETE in shared memory. oldest_kept is the step of the
    oldest row that this rank could still send, 0 if it has none, or sends none.
    """

    generation: int
    rank: int
    rows: tuple[dict[str, Json], ...]
    worker_id: str = ""
    memory_step: int | None = None
    oldest_kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """What the manager has to tell since `after`; pass `next` as `after` once it is written.

    Facts and rows passed as `after` are forgotten by the manager; all others are handed out
    again, so a supervisor that dies in between loses nothing. overflow counts what was
    dropped because nobody drained. more: ask again at once.
    """

    facts: tuple[Fact, ...]
    rows: tuple[dict[str, Json], ...]
    next: int
    status: dict[str, Json]
    overflow: int = 0
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the run goes on. code: "" when it does, else bad_input, poison_step, no_progress,
    max_recoveries or not_restorable. backoff_s: wait that long before the next try.
    """

    go_on: bool
    code: str = ""
    reason: str = ""
    backoff_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRank:
    """The data of a "rank.finished" event: what a rank's function returned, in which epoch."""

    epoch: int
    rank: int
    worker_id: str
    value_json: str
    stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """What a supervisor knows from the run directory and tells a manager that may not.

    last_row_step: the newest step of which there is a row. rows_whole_to: every row up to this
    step is there; after it one is missing, or the next has not been written yet. rows_again_at:
    the first step after those that are missing, 0 if there are none after them.
    lineage: (generation, start step) of every "generation.formed" event, oldest first.
    saved_step: the newest step that was ever committed to disk or object tier. loop: data
    of the newest "loop.begun" event. finished: the data of every "rank.finished" event; only
    those of the epoch that begins count. told: the highest number of a fact in the event log.
    metrics: the number by which checkpoints are judged, by step, where the run has one. failures:
    closed incidents, by the tier that the state came from. trained_s: the steps of all rows
    together. spacing: data of the newest "ckpt.respaced" event.
    """

    generation: int = 0
    last_row_step: int = 0
    rows_whole_to: int = 0
    rows_again_at: int = 0
    recoveries: int = 0
    lineage: tuple[tuple[int, int], ...] = ()
    saved_step: int = 0
    loop: dict[str, Json] = field(default_factory=dict)
    finished: tuple[FinishedRank, ...] = ()
    told: int = 0
    metrics: dict[int, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    trained_s: float = 0.0
    spacing: dict[str, Json] = field(default_factory=dict)
