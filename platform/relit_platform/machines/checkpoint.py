"""The checkpoint machine, pure: each step's way from the first shard to the object tier and out.

`advance(book, event, now) -> (book, actions)`, one entry per (step, generation).

    from                event (guard)                          to         actions
    -                   Persisting, ShardPersisted (on line)   OPEN       too many: abandon one
    OPEN                ShardPersisted (all ranks in)          PERSISTED  Publish
    PERSISTED           Published                              COMMITTED  retain disk; Upload;
                                                                          older OPEN ones: Discard
    COMMITTED           (due, no upload is running)            UPLOADING  Upload
    the newest          Finishing                              unchanged  due from now on
    UPLOADING           ShardUploaded (all ranks in)           UPLOADING  LogCommit
    UPLOADING           Logged                                 DURABLE    retain object; next Upload
    UPLOADING           ShardFailed(object), LogFailed,        COMMITTED  next Upload, this one
                        deadline                                          stays on disk
    OPEN, PERSISTED     ShardFailed(disk), PublishFailed,      ABANDONED  Discard
                        deadline, a newer step over the limit
    any but terminal    GenerationFormed below this step       ABANDONED  Discard on every tier
    COMMITTED, DURABLE  retention, on its last tier            EXPIRED    Discard
    any                 event of a step that is off the line,  unchanged  count it
                        terminal, or in another phase

A step that an older generation began stays valid while it is on the surviving line: its shards are
complete cuts of history, whoever lives. What is off the line never commits.

Only one step uploads at a time; of those that wait the newest goes next and the others are skipped,
so a slow store costs checkpoints there, never memory here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relit_platform.facts import ShardFailed, ShardPersisted, ShardUploaded, Tier
from relit_platform.machines.checkpoint_state import (
    TERMINAL,
    Adopted,
    Checkpoint,
    CheckpointAction,
    CheckpointBook,
    CheckpointEvent,
    CheckpointPhase,
    Deadline,
    Discard,
    Finishing,
    GenerationFormed,
    Key,
    LogCommit,
    LogFailed,
    Logged,
    Note,
    Outcome,
    Persisting,
    Publish,
    Published,
    PublishFailed,
    Upload,
)
from relit_storage.checkpoint.retention import StepOnTier, plan_expiry

OPEN, PERSISTED = CheckpointPhase.OPEN, CheckpointPhase.PERSISTED
COMMITTED, UPLOADING = CheckpointPhase.COMMITTED, CheckpointPhase.UPLOADING
DURABLE = CheckpointPhase.DURABLE


def advance(book: CheckpointBook, event: CheckpointEvent, now: float) -> Outcome:
    """The next book and what has to be done; see the table above. Pure and total."""
    match event:
        case Persisting():
            book, actions = _persisting(book, event, now)
        case ShardPersisted():
            book, actions = _shard_persisted(book, event, now)
        case Published():
            book, actions = _published(book, event, now)
        case ShardUploaded():
            book, actions = _shard_uploaded(book, event)
        case Logged():
            book, actions = _logged(book, event)
        case PublishFailed() | LogFailed() | ShardFailed():
            book, actions = _failed(book, event)
        case GenerationFormed():
            book, actions = _generation_formed(book, event)
        case Adopted():
            book, actions = _adopted(book, event.checkpoint, now)
        case Finishing():
            book, actions = _finishing(book)
        case Deadline():
            book, actions = _deadline(book, now)
    book, more = _next_upload(book, now)
    return _forget_oldest(book), actions + more


def _persisting(book: CheckpointBook, event: Persisting, now: float) -> Outcome:
    key = event.step, event.generation
    book, actions = _opened(book, key, event.world, now)
    known = book.steps.get(key)
    if known is None or not event.final or known.final or known.phase in TERMINAL:
        return book, actions
    wants = book.limits.object_every_steps > 0 and not known.on_object
    return _put(book, replace(known, final=True, wants_object=wants)), actions


def _shard_persisted(book: CheckpointBook, shard: ShardPersisted, now: float) -> Outcome:
    key = shard.step, shard.generation
    book, actions = _opened(book, key, shard.world, now)
    known = book.steps.get(key)
    if known is None or known.phase in TERMINAL:
        late = _discard(key, "disk", (shard.node_id,), "arrived after its step was given up")
        return _ignore(book, "late shard"), [*actions, late]
    if known.phase is not OPEN or shard.world != known.world or shard.rank in known.shards:
        return _ignore(book, "shard again"), actions
    known = replace(known, shards={**known.shards, shard.rank: shard})
    if set(known.shards) != set(range(known.world)):
        return _put(book, known), actions
    known = replace(known, phase=PERSISTED, since_s=now)
    return _put(book, known), [*actions, Publish(checkpoint=known)]


def _opened(book: CheckpointBook, key: Key, world: int, now: float) -> Outcome:
    """The book with this step open, if it may be; abandons the oldest open one over the limit."""
    step, generation = key
    if key in book.steps:
        return book, []
    if not book.lineage.on_line(generation, step):
        return _ignore(book, "off the line"), []
    opened = Checkpoint(
        step=step,
        generation=generation,
        world=world,
        since_s=now,
        wants_object=_object_due(book, step),
    )
    book = _put(book, opened)
    is_open = sorted((c for c in book.steps.values() if c.phase is OPEN), key=_age)
    if len(is_open) <= book.limits.max_open:
        return book, []
    return _abandon(book, is_open[0], "superseded by a newer step")


def _object_due(book: CheckpointBook, step: int) -> bool:
    every = book.limits.object_every_steps
    if every <= 0 or book.finishing:
        return every > 0
    ahead = [c.step for c in book.steps.values() if c.wants_object or c.on_object]
    return step // every > max((s // every for s in ahead if s < step), default=0)


def _published(book: CheckpointBook, event: Published, now: float) -> Outcome:
    known = book.steps.get((event.step, event.generation))
    if known is not None and known.phase in TERMINAL:
        late = _discard(known.key, "disk", known.nodes, "published after it was given up")
        return _ignore(book, "late manifest"), [late]
    if known is None or known.phase is not PERSISTED:
        return _ignore(book, "late manifest"), []
    known = replace(known, phase=COMMITTED, on_disk=True)
    seconds = max((shard.seconds for shard in known.shards.values()), default=0.0)
    data = {
        "tier": "disk",
        "bytes": sum(shard.num_bytes for shard in known.shards.values()),
        "seconds": round(seconds + now - known.since_s, 6),
    }
    book, actions = _superseded(_put(book, known), known)
    book, more = _retain(book, "disk")
    return book, [_note("ckpt.committed", known, data), *actions, *more]


def _superseded(book: CheckpointBook, by: Checkpoint) -> Outcome:
    """Give up older steps that lack a shard: each rank persists in order, so it will not come."""
    actions = []
    for known in list(book.steps.values()):
        if known.phase is OPEN and _age(known) < _age(by):
            book, more = _abandon(book, known, "superseded by a newer step")
            actions.extend(more)
    return book, actions


def _shard_uploaded(book: CheckpointBook, event: ShardUploaded) -> Outcome:
    known = book.steps.get((event.step, event.generation))
    if known is None or known.phase is not UPLOADING or event.rank in known.uploaded:
        return _ignore(book, "late upload"), []
    known = replace(known, uploaded=known.uploaded | {event.rank})
    whole = known.uploaded >= set(range(known.world))
    return _put(book, known), [LogCommit(checkpoint=known)] if whole else []


def _logged(book: CheckpointBook, event: Logged) -> Outcome:
    known = book.steps.get((event.step, event.generation))
    if known is None or known.phase is not UPLOADING:
        return _ignore(book, "late commit"), []
    known = replace(known, phase=DURABLE, on_object=True, wants_object=False)
    book, actions = _retain(_put(book, known), "object")
    return book, [_note("ckpt.committed", known, {"tier": "object"}), *actions]


def _failed(book: CheckpointBook, event: PublishFailed | LogFailed | ShardFailed) -> Outcome:
    known = book.steps.get((event.step, event.generation))
    if known is None:
        return _ignore(book, "late failure"), []
    of_upload = isinstance(event, LogFailed) or (
        isinstance(event, ShardFailed) and event.tier == "object"
    )
    if of_upload and known.phase is UPLOADING:
        return _upload_failed(book, known, event.reason)
    if not of_upload and known.phase in (OPEN, PERSISTED):
        return _abandon(book, known, event.reason)
    return _ignore(book, "late failure"), []


def _upload_failed(book: CheckpointBook, known: Checkpoint, reason: str) -> Outcome:
    known = replace(known, phase=COMMITTED, wants_object=False, uploaded=frozenset(), reason=reason)
    note = _note("ckpt.failed", known, {"tier": "object", "reason": reason}, "warning")
    book, actions = _retain(_put(book, known), "disk")
    return book, [note, *actions]


def _generation_formed(book: CheckpointBook, event: GenerationFormed) -> Outcome:
    lineage = book.lineage.started(event.generation, event.start_step)
    book = replace(book, lineage=lineage, protected=event.protected, finishing=False)
    actions = []
    for known in list(book.steps.values()):
        if known.phase not in TERMINAL and not lineage.on_line(known.generation, known.step):
            reason = f"generation {event.generation} went back to step {event.start_step}"
            book, more = _abandon(book, known, reason)
            actions.extend(more)
    return book, actions


def _adopted(book: CheckpointBook, found: Checkpoint, now: float) -> Outcome:
    known = book.steps.get(found.key)
    if known is not None and known.phase in TERMINAL:
        return book, _discards(found, "found after it was given up")
    if known is not None:
        found = _merged(known, found)
        if found.phase is not OPEN and not found.on_object:
            return _put(book, found), []  # it is on its way already
    elif not book.lineage.on_line(found.generation, found.step):
        return _ignore(book, "off the line"), _discards(found, "its step was rolled back")
    wants = found.wants_object or _object_due(book, found.step)
    found = replace(found, since_s=now)
    if found.on_object:
        return _put(book, replace(found, phase=DURABLE, wants_object=False)), []
    if found.on_disk:
        return _put(book, replace(found, phase=COMMITTED, wants_object=wants)), []
    if set(found.shards) == set(range(found.world)):
        found = replace(found, phase=PERSISTED, wants_object=wants)
        return _put(book, found), [Publish(checkpoint=found)]
    return _put(book, found), []


def _merged(known: Checkpoint, found: Checkpoint) -> Checkpoint:
    return replace(
        known,
        shards={**found.shards, **known.shards},
        on_disk=known.on_disk or found.on_disk,
        on_object=known.on_object or found.on_object,
    )


def _finishing(book: CheckpointBook) -> Outcome:
    """Whoever said that a step is the last one may not have been heard."""
    book = replace(book, finishing=True)
    alive = [c for c in book.steps.values() if c.phase not in TERMINAL]
    newest = max(alive, key=_age, default=None)
    if newest is None or newest.on_object or newest.phase is UPLOADING:
        return book, []
    wants = book.limits.object_every_steps > 0
    return _put(book, replace(newest, final=True, wants_object=wants)), []


def _deadline(book: CheckpointBook, now: float) -> Outcome:
    actions = []
    for known in list(book.steps.values()):
        age_s = now - known.since_s
        more: list[Any] = []
        if known.phase in (OPEN, PERSISTED) and age_s > book.limits.persist_deadline_s:
            book, more = _abandon(book, known, f"not whole after {age_s:.0f} s")
        elif known.phase is UPLOADING and age_s > book.limits.upload_deadline_s:
            book, more = _upload_failed(book, known, f"not uploaded after {age_s:.0f} s")
        actions.extend(more)
    return book, actions


def _next_upload(book: CheckpointBook, now: float) -> Outcome:
    """Start the newest step that waits if none is on its way; older ones are skipped at once."""
    waiting = sorted(
        (c for c in book.steps.values() if c.phase is COMMITTED and c.wants_object), key=_age
    )
    actions: list[Any] = []
    for skipped in waiting[:-1]:
        book = _put(book, replace(skipped, wants_object=False, reason="a newer step goes first"))
        data = {"tier": "object", "reason": "a newer step goes first"}
        actions.append(_note("ckpt.skipped", skipped, data, "warning"))
    if not waiting or any(c.phase is UPLOADING for c in book.steps.values()):
        return book, actions
    chosen = replace(waiting[-1], phase=UPLOADING, since_s=now, uploaded=frozenset())
    return _put(book, chosen), [*actions, Upload(checkpoint=chosen)]


def _retain(book: CheckpointBook, tier: Tier) -> Outcome:
    """Let go of what retention no longer wants; what still has to be uploaded stays on disk."""
    on_disk = tier == "disk"
    here = [c for c in book.steps.values() if (c.on_disk if on_disk else c.on_object)]
    keep = book.limits.keep_disk if on_disk else book.limits.keep_object
    busy = {c.key for c in here if c.wants_object or c.phase is UPLOADING}
    drop, reasons = plan_expiry(
        [StepOnTier(c.step, c.generation, True) for c in here],
        keep,
        book.protected | (busy if on_disk else frozenset()),
    )
    actions: list[Any] = []
    for gone, reason in zip(drop, reasons, strict=True):
        known = book.steps[gone.step, gone.generation]
        left = replace(known, on_disk=False) if on_disk else replace(known, on_object=False)
        if not left.on_disk and not left.on_object:
            left = replace(left, phase=CheckpointPhase.EXPIRED, reason=reason)
        book = _put(book, left)
        actions.append(_discard(known.key, tier, known.nodes, reason))
    return book, actions


def _discards(known: Checkpoint, reason: str) -> list[CheckpointAction]:
    """Delete it from every tier that holds something of it."""
    actions: list[CheckpointAction] = []
    if known.shards:
        actions.append(_discard(known.key, "disk", known.nodes, reason))
    if known.on_object:
        actions.append(_discard(known.key, "object", (), reason))
    return actions


def _abandon(book: CheckpointBook, known: Checkpoint, reason: str) -> Outcome:
    actions = _discards(known, reason)
    gone = replace(
        known,
        phase=CheckpointPhase.ABANDONED,
        wants_object=False,
        on_disk=False,
        on_object=False,
        reason=reason,
    )
    note = _note("ckpt.failed", known, {"tier": "disk", "reason": reason}, "warning")
    book = _put(book, gone)
    if book.finishing:
        book, _ = _finishing(book)  # then the one before it is the last
    return book, [note, *actions]


def _forget_oldest(book: CheckpointBook) -> CheckpointBook:
    over = len(book.steps) - book.limits.max_remembered
    if over <= 0:
        return book
    ended = sorted((c for c in book.steps.values() if c.phase in TERMINAL), key=_age)
    forget = {c.key for c in ended[:over]}
    return replace(book, steps={k: c for k, c in book.steps.items() if k not in forget})


def _age(known: Checkpoint) -> Key:
    """Sorts oldest first, as retention does: a later generation is newer whatever its step."""
    return known.generation, known.step


def _put(book: CheckpointBook, known: Checkpoint) -> CheckpointBook:
    return replace(book, steps={**book.steps, known.key: known})


def _ignore(book: CheckpointBook, why: str) -> CheckpointBook:
    return replace(book, ignored={**book.ignored, why: book.ignored.get(why, 0) + 1})


def _discard(key: Key, tier: Tier, nodes: tuple[str, ...], reason: str) -> Discard:
    return Discard(step=key[0], generation=key[1], tier=tier, nodes=nodes, reason=reason)


def _note(kind: str, known: Checkpoint, data: dict[str, Any], level: str = "info") -> Note:
    return Note(kind=kind, step=known.step, generation=known.generation, data=data, level=level)
