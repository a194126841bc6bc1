"""Make a run that is over, or lost, ready to go on under its own id."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from relit import drift, run_writer
from relit.commands import send_command
from relit.errors import BadInputError, RunFinishedError
from relit.initial import FindInitial
from relit.reading import RunReader
from relit.run_state import LOST, PENDING, TOOL
from relit.spec import files
from relit.spec.model import JobSpec
from relit.spec.resolve import build_config, resolve
from relit_platform.run_config import RunConfig
from relit_storage.errors import LeaseHeldError
from relit_storage.run import layout
from relit_storage.run.lease import read_lease

_DRIFT_NAMES = ("config", "code", "data")
_HAND_OVER_S = 15.0  # somebody who numbers an attempt may be about to hand it over
_RESUMABLE = frozenset({"STOPPED", "FAILED", LOST})


@dataclasses.dataclass(frozen=True, slots=True)
class Continuation:
    """What the next attempt runs, and how it differs from what ran before; spec: if it is new."""

    config: RunConfig
    changes: drift.Changes
    spec: JobSpec | None = None


def resume_run(
    reader: RunReader,
    *,
    spec: JobSpec | None = None,
    overrides: Sequence[str] = (),
    allow: Sequence[str] = (),
    find_initial: FindInitial,
    connect: Callable[[], None],
    starts: Callable[[str], bool],
) -> Continuation:
    """Check, write the configuration of the next attempt, and make the run live again.

    The "resume" command overtakes every earlier stop; the old result.json moves aside last, since
    from then on a supervisor may start. find_initial is asked if `init` is another one now. connect
    finds the cluster, before anything is changed. starts says whether a Ray job is there and not
    over: a resume whose job never got to the cluster may be repeated. Raises RunFinishedError,
    DriftError, SpecError, LeaseHeldError while checkpoints of the run are being deleted, and what
    connect raises.
    """
    for name in allow:
        if name not in _DRIFT_NAMES:
            raise BadInputError(f"allow {name!r} is none of {', '.join(_DRIFT_NAMES)}.")
    status = reader.status()
    if status["state"] not in _RESUMABLE and not _was_cut_off(reader, status["state"], starts):
        raise RunFinishedError(run=reader.run_id, state=status["state"], verb="resume")
    _check_no_tool_works(reader)
    old = reader.config()
    if old is None:
        raise BadInputError(f"run {reader.run_id} was never wholly submitted; submit it again.")
    plan = _plan(reader, old, spec, overrides, allow, find_initial)
    # A changed config or code that was allowed once is in the newest checkpoint or about to be.
    allowed = set(allow) | (set(old.allow_drift) & {"config", "code"})
    config = dataclasses.replace(plan.config, allow_drift=tuple(sorted(allowed)))
    connect()
    if plan.spec is not None:
        reader.store.put(layout.CONFIG, files.to_yaml(plan.spec).encode())
    reader.store.put(layout.RESOLVED, run_writer.to_json(config.to_json()))
    send_command(reader.store, "resume", "resume asked for", time.time())
    result = reader.result()
    if result is not None:
        run_writer.archive_result(reader.store, result, len(reader.attempts()))
    return Continuation(config, plan.changes)


def _was_cut_off(reader: RunReader, state: str, starts: Callable[[str], bool]) -> bool:
    """The newest attempt waits for a supervisor that nobody has been asked to start."""
    attempts = reader.attempts()
    if state != PENDING or len(attempts) < 2 or reader.is_driven():
        return False  # the first one is completed by the same submit again
    age_s = time.time() - float(attempts[-1].get("at_s") or 0.0)
    return age_s > _HAND_OVER_S and not starts(str(attempts[-1]["submission_id"]))


def _check_no_tool_works(reader: RunReader) -> None:
    """`relit ckpt` holds the run's lease while it deletes or imports, and a supervisor does not
    wait for it. The lease of a supervisor that has just ended is no obstacle.
    """
    lease, now = read_lease(reader.store), time.time()
    if lease is not None and lease.holder.startswith(TOOL) and lease.in_force(now):
        raise LeaseHeldError(
            run=reader.run_id,
            holder=lease.holder,
            epoch=lease.epoch,
            expires_in_s=lease.expires_in_s(now),
        )


def _plan(
    reader: RunReader,
    old: RunConfig,
    spec: JobSpec | None,
    overrides: Sequence[str],
    allow: Sequence[str],
    find_initial: FindInitial,
) -> Continuation:
    if spec is None and not overrides:
        return Continuation(old, {})
    stored = drift.stored_spec(reader)
    fixed = {"run_id": old.run_id, "experiment": old.experiment, "store": old.store}
    wanted = files.override(spec or stored, overrides).model_copy(update=fixed)
    changes = stored.diff(wanted)
    drift.check_config(changes, allowed="config" in allow)
    if spec is None and wanted.entry == stored.entry:
        # The run's own code, whatever the working tree looks like now.
        config = build_config(
            wanted,
            run_id=old.run_id,
            entry=old.entry,
            code_key=old.code_key,
            code_sha=old.code_sha,
        )
    else:
        config, code = resolve(wanted)
        drift.check_code(reader, old, code, allowed="code" in allow)
        reader.store.put_if_absent(config.code_key, code.data)
    if wanted.init == stored.init:
        initial = old.init  # the very commit, though a newer one may be there
    else:
        initial = None if wanted.init is None else find_initial(wanted.init)
    config = dataclasses.replace(config, init=initial)
    return Continuation(config, changes, wanted)
