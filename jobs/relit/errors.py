"""The errors of relit's face, each with the exit code that the command line gives it.

    RelitError                      1 unless said otherwise
    └── JobError
        ├── BadInputError           2   the caller can fix it: names field, value and way out
        │   ├── SpecError           the specification does not validate
        │   ├── SecretInSpecError   a secret would have been stored with the run
        │   ├── EntryError          the module or function to run cannot be found
        │   ├── SnapshotError       the code does not fit into a snapshot
        │   ├── RunExistsError      the run id is taken by another specification
        │   ├── AmbiguousRunError   a prefix that fits several runs
        │   ├── RunFinishedError    a finished run cannot be resumed or stopped
        │   ├── RunAliveError       checkpoints of a run that is not over are its supervisor's
        │   ├── SourceRefusedError  what is to be imported is damaged, hostile or unknown
        │   │   └── PickleRefusedError  only unpickling could read it, which may run code
        │   ├── ClusterUnreachableError   nothing answers at the given address
        │   └── StoreUnwritableError      the store refuses to be written
        ├── ClusterStartError       1   a local Ray cluster did not come up
        ├── NotFinishedError      101   the time to wait is over, or the run was lost
        ├── ImportCommitError     101   the commit of an import failed, and may have gone through
        ├── RunNotFoundError      102   no such run in this store
        ├── CheckpointNotFoundError 102 the run has no such step
        └── CheckpointBrokenError 100   no copy of the step is whole

Errors of the floors below that a caller can fix (drift, lease held, unsupported store, a step that
must stay) also exit with 2, and files of a checkpoint that are refused with 100: `exit_code` knows
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relit_platform.errors import DriftError, PlatformError
from relit_storage.errors import (
    CorruptShardError,
    LeaseHeldError,
    ManifestError,
    RelitError,
    RetentionError,
    StorageError,
    StoreAddressError,
    StoreUnavailableError,
    UnsupportedStoreError,
)

__all__ = [
    "RelitError",
    "PlatformError",
    "StorageError",
    "DriftError",
    "JobError",
    "BadInputError",
    "SpecError",
    "SecretInSpecError",
    "EntryError",
    "SnapshotError",
    "RunExistsError",
    "AmbiguousRunError",
    "RunFinishedError",
    "RunAliveError",
    "SourceRefusedError",
    "PickleRefusedError",
    "ClusterUnreachableError",
    "StoreUnwritableError",
    "ClusterStartError",
    "NotFinishedError",
    "ImportCommitError",
    "RunNotFoundError",
    "CheckpointNotFoundError",
    "CheckpointBrokenError",
    "exit_code",
]

OK, INTERNAL, USAGE = 0, 1, 2
FAILED, NOT_FINISHED, NOT_FOUND, STOPPED = 100, 101, 102, 103


class JobError(RelitError):
    """Anything between a user's wish and a run."""

    exit_code = INTERNAL


class BadInputError(JobError):
    """The caller can fix it. Fields: message."""

    exit_code = USAGE


class SpecError(BadInputError):
    """Fields: source (file or "JobSpec"), problems (a list of "field: what, and what to do")."""

    template = "{source} is not a valid job specification: {problems}."


class SecretInSpecError(BadInputError):
    """Fields: field, why. The value itself is in no field of this error."""

    template = "{field} {why}; a specification is stored with the run and must hold no secret."
    fix = (
        "Set it as an environment variable on the cluster and list its name under env.secrets; "
        "the training function reads os.environ."
    )


class EntryError(BadInputError):
    """Fields: entry, why, fix."""

    template = "entry {entry!r}: {why}."


class SnapshotError(BadInputError):
    """Fields: root, why."""

    template = "cannot keep the code under {root}: {why}."
    fix = "Point env.working_dir at the folder of the code alone, or list patterns in env.exclude."


class RunExistsError(BadInputError):
    """Fields: run, diff."""

    template = "run {run} exists with another specification: {diff}."
    fix = "Choose another run_id, or use resume with the named allow flag."


class AmbiguousRunError(BadInputError):
    """Fields: prefix, candidates."""

    template = "{prefix!r} fits several runs: {candidates}."
    fix = "Give more letters."


class RunFinishedError(BadInputError):
    """Fields: run, state, verb."""

    template = "run {run} is {state}: there is nothing to {verb}."


class RunAliveError(BadInputError):
    """Fields: run, state, verb."""

    template = "run {run} is {state}: its supervisor owns its checkpoints, so {verb} is refused."
    fix = "Wait until it is over, or `relit stop` it first; `relit ckpt pin` works at any time."


class SourceRefusedError(BadInputError):
    """Fields: file, reason."""

    template = "{file} is not imported: {reason}."


class PickleRefusedError(SourceRefusedError):
    """Fields: file, name (of the global that the file asks for)."""

    template = "{file} is not imported: it asks for {name!r}, which only unpickling could give."
    fix = (
        "Unpickling may run any code, so relit never does; where you trust the file, load it with "
        "the program that made it and save its state_dict alone."
    )


class ClusterUnreachableError(BadInputError):
    """Fields: address, cause."""

    template = "no Ray dashboard answers at {address}: {cause}."
    fix = (
        "Check --address (the dashboard's, as http://host:8265) and RAY_ADDRESS; leave both out "
        "to use a local cluster."
    )


class StoreUnwritableError(BadInputError):
    """Fields: store, cause."""

    template = "store {store} cannot be written: {cause}."
    fix = "Set store in the specification (or --store) to a directory or bucket you may write."


class ClusterStartError(JobError):
    """Fields: cause, log."""

    template = "the local Ray cluster did not start: {cause}. Its log: {log}"


class NotFinishedError(JobError):
    """Fields: run, state, why."""

    exit_code = NOT_FINISHED
    template = "run {run} is not finished ({state}): {why}."


class ImportCommitError(JobError):
    """Fields: run, step, cause."""

    exit_code = NOT_FINISHED
    template = "the commit of step {step} of run {run} failed: {cause}."
    fix = (
        "It may have gone through all the same: `relit ckpt ls RUN` shows the step then. If not, "
        "repeat the import; after it `relit ckpt gc RUN --yes` takes away the files that are left."
    )


class RunNotFoundError(JobError):
    """Fields: run, store."""

    exit_code = NOT_FOUND
    template = "no run {run!r} in store {store}."
    fix = "relit ls shows the runs of a store; --store or RELIT_STORE chooses it."


class CheckpointNotFoundError(JobError):
    """Fields: run, what ("step 7", "checkpoint"), there (a sentence about what is)."""

    exit_code = NOT_FOUND
    template = "run {run} has no {what}; {there}."


class CheckpointBrokenError(JobError):
    """Fields: run, what ("step 7"), refusals (a list of "tier step: file: reason")."""

    exit_code = FAILED
    template = "run {run}: no copy of {what} is whole: {refusals}."
    fix = "relit ckpt verify RUN --deep names every file that is refused."


class EventRefusedError(JobError):
    """Fields: number, kind (of an event), why."""

    exit_code = FAILED
    template = "event {number} of the run ({kind}) is not what relit writes: {why}."
    fix = "which steps were cut off is not known so; a command that takes a step takes it by name."


_CALLERS = (
    DriftError,
    LeaseHeldError,
    RetentionError,
    StoreAddressError,
    StoreUnavailableError,
    UnsupportedStoreError,
)

_BROKEN = (CorruptShardError, ManifestError)


def exit_code(error: BaseException) -> int:
    """The exit code the command line ends with for this error."""
    if isinstance(error, JobError):
        return error.exit_code
    if isinstance(error, _BROKEN):
        return FAILED
    return USAGE if isinstance(error, _CALLERS) else INTERNAL


def state_exit_code(state: str, verdict_code: str = "") -> int:
    """The exit code of a run in this state: 0, 100 failed, 103 stopped, 101 anything else.

    verdict_code "bad_input": it failed because of what it was given, which is 2 everywhere.
    """
    if state == "SUCCEEDED":
        return OK
    if state == "STOPPED":
        return STOPPED
    if state.startswith("FAILED"):
        return USAGE if verdict_code == "bad_input" else FAILED
    return NOT_FINISHED


def run_exit_code(found: Mapping[str, Any]) -> int:
    """The exit code for a status or result of a run."""
    return state_exit_code(str(found.get("state")), str(found.get("verdict_code") or ""))
