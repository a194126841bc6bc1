"""The checkpoint machine, pure: each step's way from the first shard to the object tier and out.

`advance(book, event, now) -> (book, actions)`, one entry per (step, generation).

    from                event (guard)                          to         actions
    -                   Persisting, ShardPersisted (on line)   OPEN       too many: abandon one
    OPEN                ShardPersisted (all ranks in)          PERSISTED  Publish
    PERSISTED           Published                              COMMITTED  ReadPins; Upload;
                                                                          older OPEN ones: Discard
    COMMITTED           (due, no upload is running)            UPLOADING  Upload
    the newest          Finishing                              unchanged  due from now on
    UPLOADING           ShardUploaded (all ranks in)           UPLOADING  LogCommit
    UPLOADING           Logged                                 DURABLE    ReadPins; next Upload
    UPLOADING           ShardFailed(object), LogFailed,        COMMITTED  next Upload, this one
                        deadline                                          stays on disk
    OPEN, PERSISTED     ShardFailed(disk), PublishFailed,      ABANDONED  Discard
                        deadline, a newer step over the limit
    OPEN, PERSISTED     GenerationFormed below this step       ABANDONED  Discard on every tier
    UPLOADING           GenerationFormed below this step       COMMITTED  (goes no further)
    COMMITTED, DURABLE  GenerationFormed below this step       unchanged  (off the line from now on)
    COMMITTED           Measured, better than all before       unchanged  due from now on
    COMMITTED, DURABLE  Pins: retention, on its last tier      EXPIRED    Discard
    off the line        Pins, and a commit of a newer          EXPIRED    Discard on that tier
                        generation on that tier
    any                 Restoring, until the new generation    unchanged  Discards are withheld
                        shows a step of its own                           (see holding.py)
    any                 event of a step that is off the line,  unchanged  count it
                        terminal, or in another phase

A step that an older generation began stays valid while it is on the surviving line: its shards are
complete cuts of history, whoever lives. What is off the line never commits; what had committed
before stays on its tier until the line that cut it off has a commit there, for until then it may
be the only copy. Retention asks for the pins first, so that none is overlooked.

Only one step uploads at a time; of those that wait the newest goes next and the others are skipped,
so a slow store costs checkpoints there, never memory here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relit_platform.facts import ShardFailed, ShardPersisted, ShardUploaded
from relit_platform.machines.checkpoint_state import (
    TERMINAL,
    Adopted,
    Checkpoint,
    CheckpointBook,
    CheckpointEvent,
    CheckpointPhase,
    Deadline,
    Finishing,
    GenerationFormed,
    Key,
    LogCommit,
    LogFailed,
    Logged,
    Measured,
    NotDeleted,
    Note,
    Outcome,
    Persisting,
    Pins,
    Publish,
    Published,
    PublishFailed,
    ReadPins,
    Restoring,
    Upload,
)
from relit_platform.machines.expiry import discard, discards, retained
from relit_platform.machines.holding import restoring, settled, withholding
from relit_platform.machines.object_cadence import measured, object_due, outward

OPEN, PERSISTED = CheckpointPhase.OPEN, CheckpointPhase.PERSISTED
COMMITTED, UPLOADING = CheckpointPhase.COMMITTED, CheckpointPhase.UPLOADING
DURABLE = CheckpointPhase.DURABLE


def advance(book: CheckpointBook, event: CheckpointEvent, now: float) -> Outcome:
    """The next book and what has to be done; see the table above. Pure and total."""
    book, first = settled(book, event)
    match event:
        case Persisting():
            book, actions = _persisting(book, event, now)
        case ShardPersisted():
            book, actions = _shard_persisted(book, event, now)
        case Published():
            book, actions = _published(book, event, now)
        case Pins():
            book, actions = retained(book, event.steps)
        case Measured():
            book, actions = measured(book, event, now), []
        case ShardUploaded():
            book, actions = _shard_uploaded(book, event)
        case Logged():
            book, actions = _logged(book, event, now)
        case PublishFailed() | LogFailed() | ShardFailed():
            book, actions = _failed(book, event)
        case GenerationFormed():
            book, actions = _generation_formed(book, event, now)
        case Restoring():
            book, actions = restoring(book, event.steps), []
        case NotDeleted():
            actions = [event.discard]
        case Adopted():
            book, actions = _adopted(book, event.checkpoint, now)
        case Finishing():
            book, actions = _finishing(book)
        case Deadline():
            book, actions = _deadline(book, now)
    book, more = _next_upload(book, now)
    return withholding(_forget_oldest(book), [*first, *actions, *more])


def _persisting(book: CheckpointBook, event: Persisting, now: float) -> Outcome:
    key = event.step, event.generation
    book, actions = _opened(book, key, event.world, now, final=event.final)
    known = book.steps.get(key)
    if known is None or not event.final or known.final or known.phase in TERMINAL:
        return book, actions
    known = replace(known, final=True)
    if book.limits.object.on and not known.on_object:
        known = outward(known, now)
    return book.having(known), actions


def _shard_persisted(book: CheckpointBook, shard: ShardPersisted, now: float) -> Outcome:
    key = shard.step, shard.generation
    book, actions = _opened(book, key, shard.world, now)
    book, more = _passed_over(book, shard)
    actions = [*actions, *more]
    known = book.steps.get(key)
    if known is None or known.phase in TERMINAL:
        late = discard(key, "disk", (shard.node_id,), "arrived after its step was given up")
        return _ignore(book, "late shard"), [*actions, late]
    if known.phase is not OPEN or shard.world != known.world or shard.rank in known.shards:
        return _ignore(book, "shard again"), actions
    known = replace(known, shards={**known.shards, shard.rank: shard})
    if set(known.shards) != set(range(known.world)):
        return book.having(known), actions
    known = replace(known, phase=PERSISTED, since_s=now)
    return book.having(known), [*actions, Publish(checkpoint=known)]


def _passed_over(book: CheckpointBook, shard: ShardPersisted) -> Outcome:
    """Give up older steps of the generation that lack a shard of this rank: it persists in order,
    so it had no slot for them, and theirs will not come.
    """
    actions = []
    for known in list(book.steps.values()):
        older = known.generation == shard.generation and known.step < shard.step
        waits = known.phase is OPEN and not known.waits_for_nodes
        if older and waits and shard.rank not in known.shards:
            book, more = _abandon(book, known, f"rank {shard.rank} has not saved it")
            actions.extend(more)
    return book, actions


def _opened(
    book: CheckpointBook, key: Key, world: int, now: float, *, final: bool = False
) -> Outcome:
    """The book with this step open, if it may be.

    Over the limit it is given up itself, for the slowest rank is at the oldest: were that given up,
    and then the next, a disk that is slower than the cadence would never get a step done. The
    oldest gives way to what is final, and to another generation: its ranks may be gone.
    """
    step, generation = key
    if key in book.steps:
        return book, []
    if not book.lineage.on_line(generation, step):
        return _ignore(book, "off the line"), []
    opened = Checkpoint(step=step, generation=generation, world=world, since_s=now)
    book = book.having(opened)
    found = (c for c in book.steps.values() if c.phase is OPEN and not c.waits_for_nodes)
    is_open = sorted(found, key=_age)
    if len(is_open) <= book.limits.max_open:
        return book, []
    if final or is_open[0].generation != generation:
        return _abandon(book, is_open[0], "superseded by a newer step")
    return _abandon(book, opened, "skipped: the steps before it are still being persisted")


def _published(book: CheckpointBook, event: Published, now: float) -> Outcome:
    known = book.steps.get((event.step, event.generation))
    if known is not None and known.phase in TERMINAL:
        late = discard(known.key, "disk", known.nodes, "published after it was given up")
        return _ignore(book, "late manifest"), [late]
    if known is None or known.phase is not PERSISTED:
        return _ignore(book, "late manifest"), []
    shown_s = known.since_s
    known = replace(known, phase=COMMITTED, on_disk=True)
    if not known.wants_object and object_due(book, known.step, now):
        known = outward(known, now)
    seconds = max((shard.seconds for shard in known.shards.values()), default=0.0)
    data = {
        "tier": "disk",
        "bytes": sum(shard.num_bytes for shard in known.shards.values()),
        "seconds": round(seconds + now - shown_s, 6),
    }
    book, actions = _superseded(book.having(known), known)
    return book, [_note("ckpt.committed", known, data), *actions, ReadPins()]


def _superseded(book: CheckpointBook, by: Checkpoint) -> Outcome:
    """Give up older steps that lack a shard: each rank persists in order, so it will not come."""
    actions = []
    for known in list(book.steps.values()):
        if known.phase is OPEN and not known.waits_for_nodes and _age(known) < _age(by):
            book, more = _abandon(book, known, "superseded by a newer step")
            actions.extend(more)
    return book, actions


def _shard_uploaded(book: CheckpointBook, event: ShardUploaded) -> Outcome:
    known = book.steps.get((event.step, event.generation))
    if known is None or known.phase is not UPLOADING or event.rank in known.uploaded:
        return _ignore(book, "late upload"), []
    known = replace(known, uploaded=known.uploaded | {event.rank})
    whole = known.uploaded >= set(range(known.world))
    return book.having(known), [LogCommit(checkpoint=known)] if whole else []


def _logged(book: CheckpointBook, event: Logged, now: float) -> Outcome:
    known = book.steps.get((event.step, event.generation))
    if known is not None and known.phase is COMMITTED and not _on_line(book, known):
        return book.having(replace(known, on_object=True)), []  # it was cut off in that moment
    if known is None or known.phase is not UPLOADING:
        return _ignore(book, "late commit"), []
    known = replace(known, phase=DURABLE, on_object=True, wants_object=False)
    seconds = round(now - known.since_s, 6)
    data = {"tier": "object", "bytes": known.num_bytes, "seconds": seconds}
    return book.having(known), [_note("ckpt.committed", known, data), ReadPins()]


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
    return book.having(known), [note, ReadPins()]


def _generation_formed(book: CheckpointBook, event: GenerationFormed, now: float) -> Outcome:
    start = event.start_step
    book = replace(
        book,
        lineage=book.lineage.started(event.generation, start),
        protected=event.protected,
        restoring=bool(event.protected),
        finishing=False,
        metrics={step: value for step, value in book.metrics.items() if step <= start},
        began_s=book.began_s or now,
    )
    actions: list[Any] = []
    for known in list(book.steps.values()):
        if known.phase in TERMINAL or _on_line(book, known):
            continue
        reason = f"generation {event.generation} went back to step {start}"
        if known.phase in (OPEN, PERSISTED):
            book, more = _abandon(book, known, reason)
            actions.extend(more)
        elif known.reason != reason:
            book = book.having(_cut_off(known, reason))
            actions.append(_note("ckpt.cut_off", known, {"reason": reason}, "warning"))
    return book, actions


def _cut_off(known: Checkpoint, reason: str) -> Checkpoint:
    """It goes no further, but stays where it is until the new line has a commit there."""
    phase = COMMITTED if known.phase is UPLOADING else known.phase
    return replace(known, phase=phase, wants_object=False, uploaded=frozenset(), reason=reason)


def _adopted(book: CheckpointBook, found: Checkpoint, now: float) -> Outcome:
    known = book.steps.get(found.key)
    if known is not None and known.phase in TERMINAL:
        return book, discards(found, "found after it was given up")
    on_line = _on_line(book, found)
    if known is not None:
        found = _merged(known, found)
        if found.phase is not OPEN and not found.on_object:
            return book.having(found), []  # it is on its way already
    if not on_line:
        return _adopted_off_line(book, found)
    found = replace(found, since_s=now, outward_s=found.outward_s or now)
    if found.on_object:
        return book.having(replace(found, phase=DURABLE, wants_object=False)), []
    wants = found.wants_object or object_due(book, found.step, now)
    if found.on_disk:
        return book.having(replace(found, phase=COMMITTED, wants_object=wants)), []
    if set(found.shards) == set(range(found.world)):
        found = replace(found, phase=PERSISTED)
        return book.having(found), [Publish(checkpoint=found)]
    return book.having(found), []


def _adopted_off_line(book: CheckpointBook, found: Checkpoint) -> Outcome:
    if not found.on_disk and not found.on_object:
        return _ignore(book, "off the line"), discards(found, "its step was rolled back")
    phase = DURABLE if found.on_object else COMMITTED
    found = replace(found, phase=phase, wants_object=False, reason="its step was rolled back")
    return book.having(found), [ReadPins()]


def _merged(known: Checkpoint, found: Checkpoint) -> Checkpoint:
    return replace(
        known,
        shards={**found.shards, **known.shards},
        on_disk=known.on_disk or found.on_disk,
        on_object=known.on_object or found.on_object,
        published=known.published or found.published,
        size=known.size or found.size,
    )


def _finishing(book: CheckpointBook) -> Outcome:
    """Whoever said that a step is the last one may not have been heard."""
    book = replace(book, finishing=True)
    alive = [c for c in book.on_line() if c.phase not in TERMINAL]
    newest = max(alive, key=_age, default=None)
    if newest is None or newest.on_object or newest.phase is UPLOADING:
        return book, []
    wants = book.limits.object.on
    return book.having(replace(newest, final=True, wants_object=wants)), []


def _deadline(book: CheckpointBook, now: float) -> Outcome:
    actions = []
    for known in list(book.steps.values()):
        age_s = now - known.since_s
        more: list[Any] = []
        late = age_s > book.limits.persist_deadline_s and not known.waits_for_nodes
        if known.phase in (OPEN, PERSISTED) and late:
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
        book = book.having(replace(skipped, wants_object=False, reason="a newer step goes first"))
        data = {"tier": "object", "reason": "a newer step goes first"}
        actions.append(_note("ckpt.skipped", skipped, data, "warning"))
    if not waiting or any(c.phase is UPLOADING for c in book.steps.values()):
        return book, actions
    chosen = replace(waiting[-1], phase=UPLOADING, since_s=now, uploaded=frozenset())
    return book.having(chosen), [*actions, Upload(checkpoint=chosen)]


def _abandon(book: CheckpointBook, known: Checkpoint, reason: str) -> Outcome:
    actions = discards(known, reason)
    gone = replace(
        known,
        phase=CheckpointPhase.ABANDONED,
        wants_object=False,
        on_disk=False,
        on_object=False,
        reason=reason,
    )
    note = _note("ckpt.failed", known, {"tier": "disk", "reason": reason}, "warning")
    book = book.having(gone)
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


def _on_line(book: CheckpointBook, known: Checkpoint) -> bool:
    return book.lineage.on_line(known.generation, known.step)


def _ignore(book: CheckpointBook, why: str) -> CheckpointBook:
    return replace(book, ignored={**book.ignored, why: book.ignored.get(why, 0) + 1})


def _note(kind: str, known: Checkpoint, data: dict[str, Any], level: str = "info") -> Note:
    return Note(kind=kind, step=known.step, generation=known.generation, data=data, level=level)
