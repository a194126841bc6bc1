"""The errors of relit's machine.

RelitError
└── PlatformError
├── StaleMemberError     a member of an older generation or epoch asked for something
├── StateError
│   ├── NotSavableError      a registered object's state cannot be saved without pickle
│   │   └── ShardingError    what ranks hold of a DTensor is not known to be boxes of it
│   ├── StateMismatchError   names saved and names registered differ
│   └── InitialStateError    the checkpoint that a run is to begin with is gone or does not fit
├── CollectiveBrokenError    a peer's connection broke; the step is to be done again
├── ReplicasDivergedError    ranks disagree on step, cursor, ids or state
├── BudgetError              a memory or disk budget in bytes would be exceeded
├── PeerError                an agent on another node, spoken to over TCP
│   ├── PeerRefusedError         it said no; asking again says the same
│   └── PeerAwayError            it cannot be reached, or the connection broke
├── RecoveryExhaustedError   failures used up their budget; carries the verdict
├── UsageError               the training loop calls relit in an order that loses data
└── DriftError               config, code or data set differ from the run's; carries a diff
"""

from __future__ import annotations

from relit_storage.errors import RelitError


class PlatformError(RelitError):
    """Anything that goes wrong in the machine."""


class StaleMemberError(PlatformError):
    """Fields: worker_id, generation, newest, reason."""

    template = (
        "worker {worker_id} of generation {generation} is fenced off ({reason}); "
        "newest is {newest}."
    )


class StateError(PlatformError):
    """Anything wrong with the state of a registered object."""


class NotSavableError(StateError):
    """Fields: path, type_name."""

    template = "the state at {path} is a {type_name}, which cannot be saved without pickle."
    fix = (
        "Give the object a state_dict() of tensors, numbers, strings, lists and dicts, "
        "or register it as run.register(name=(get, set))."
    )


class ShardingError(NotSavableError):
    """Fields: path, reason."""

    template = "the tensor {path} {reason}, so it cannot be saved in pieces."
    fix = "Redistribute it to Shard and Replicate placements on a mesh of the run's ranks."


class StateMismatchError(StateError):
    """Fields: missing (saved, not registered), unexpected (registered, not saved), detail."""

    template = (
        "registered state does not match the checkpoint: saved but not registered {missing}; "
        "registered but not saved {unexpected}. {detail}"
    )


class InitialStateError(StateError):
    """Fields: run, step (of the source), reason."""

    template = "the run cannot begin with step {step} of run {run}: {reason}."
    fix = (
        "init.rename gives saved names the registered ones, init.strict=false takes what fits by "
        "name; `relit resume` with --allow-config-change goes on with a changed init."
    )


class CollectiveBrokenError(PlatformError):
    """A collective could not finish: a peer died, hangs, or left the group.

    Collateral evidence only: whose fault it was is for the manager to say. Fields: operation,
    generation, rank, cause.
    """

    template = "{operation} of generation {generation} broke at rank {rank}: {cause}."


class ReplicasDivergedError(PlatformError):
    """Fields: what, values (by rank)."""

    template = "ranks disagree on {what}: {values}."


class BudgetError(PlatformError):
    """Fields: what, needed_bytes, budget_bytes, field."""

    template = "{what} needs {needed_bytes} bytes, the budget is {budget_bytes}."
    fix = "Raise the budget named in the spec (checkpoint.memory_budget_bytes) or save less."


class PeerError(PlatformError):
    """What came over the connection is not the protocol. Fields: peer, reason."""

    template = "peer {peer}: {reason}."


class PeerRefusedError(PeerError):
    """It said no. Fields: peer, reason."""

    template = "peer {peer} refused: {reason}."


class PeerAwayError(PeerError):
    """No answer within the deadline, or a broken connection. Fields: peer, reason."""

    template = "peer {peer} cannot be reached: {reason}."


class RecoveryExhaustedError(PlatformError):
    """Fields: code, reason, count."""

    template = "gave up after {count} recoveries ({code}): {reason}"


class UsageError(PlatformError):
    """The loop used relit in a way that would lose data. Fields: message."""


class DriftError(PlatformError):
    """Fields: what, diff, flag."""

    template = "{what} differs from what this run was started with: {diff}."
    fix = (
        "Pass the flag named after it (--allow-config-change, --allow-code-change, "
        "--allow-data-change) to go on."
    )
