"""The errors of relit's ground floor, and the root of every error relit raises.

    RelitError
    ├── StorageError
    │   ├── StoreError                 a store's call failed; the caller may retry
    │   │   ├── StoreUnavailableError  unreachable, timed out, throttled
    │   │   ├── ObjectMissingError     no such key
    │   │   ├── StoreAddressError      a store URL that names no store or carries a credential
    │   │   └── UnsupportedStoreError  the store cannot give a guarantee that relit needs
    │   ├── CorruptShardError          bytes read are not the bytes written
    │   ├── ManifestError              a manifest that does not parse, cover or agree
    │   ├── CommitConflictError        another writer published this step
    │   ├── RetentionError         a step that may not be given up
    │   ├── FencedError                a newer epoch or generation has taken over
    │   ├── LeaseHeldError             another supervisor runs this run
    │   └── NotRestorableError         no checkpoint is whole; carries every refusal
    └── DataError
        ├── DatasetChangedError        fingerprint differs from the one the run is bound to
        └── LoaderStateError           a position that does not fit this order

Every error carries named fields and survives pickling: `RelitError.__reduce__` rebuilds it from
its keyword arguments, because actors send errors to each other.
"""

from __future__ import annotations

from typing import Any, Self


class RelitError(Exception):
    """Root of all errors that relit raises on purpose.

    Subclasses set `template`, a format string over their keyword fields. `fix` says the way out
    in one sentence and is shown by the command line under the message.
    """

    template = "{message}"
    fix = ""

    def __init__(self, message: str = "", **fields: Any) -> None:
        if message:
            fields["message"] = message
        self.fields = fields
        text = type(self).template.format_map(_Lenient(fields))
        super().__init__(f"{text} {type(self).fix}".strip())

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.fields))

    @classmethod
    def rebuild(cls, fields: dict[str, Any]) -> Self:
        """The same error from its fields; used by pickle."""
        return cls(**fields)


class _Lenient(dict[str, Any]):
    """A missing field must not hide the error that was being raised."""

    def __missing__(self, key: str) -> str:
        return f"<{key}?>"


def _rebuild(cls: type[RelitError], fields: dict[str, Any]) -> RelitError:
    return cls.rebuild(fields)


class StorageError(RelitError):
    """Anything that goes wrong with bytes at rest."""


class StoreError(StorageError):
    """A store's call failed. Fields: url, key, cause."""

    template = "store {url}: {key}: {cause}."


class StoreUnavailableError(StoreError):
    """The store did not answer in time, or answered that it is busy. Retrying may help."""

    template = "store {url} is not available ({key}: {cause})."


class ObjectMissingError(StoreError):
    """No object under this key. Fields: url, key."""

    template = "store {url} has no object {key!r}."


class StoreAddressError(StoreError):
    """A URL that names no store. Fields: url (redacted), reason."""

    template = "store address {url} is refused: {reason}."


class UnsupportedStoreError(StoreError):
    """The store lacks a guarantee. Fields: url, guarantee."""

    template = "store {url} does not give {guarantee}, which relit needs."


class CorruptShardError(StorageError):
    """Fields: file, reason."""

    template = "shard {file} refused: {reason}."


class ManifestError(StorageError):
    """Fields: file, reason."""

    template = "manifest {file} refused: {reason}."


class CommitConflictError(StorageError):
    """Fields: step, key."""

    template = "step {step} was already published by another writer ({key})."


class RetentionError(StorageError):
    """A step was to be given up that is none, or must stay. Fields: step, reason."""

    template = "step {step} is not retired: {reason}."


class FencedError(StorageError):
    """Fields: what, ours, newest."""

    template = "{what} {ours} is over: {newest} has taken over."


class LeaseHeldError(StorageError):
    """Fields: run, holder, epoch, expires_in_s."""

    template = "run {run} is held by {holder} (epoch {epoch}) for another {expires_in_s:.0f} s."
    fix = "Stop that driver, or wait until its lease expires."


class NotRestorableError(StorageError):
    """Fields: run, refusals (a list of 'tier/step/file: reason')."""

    template = "run {run} has checkpoints, but none is whole: {refusals}."
    fix = "relit never starts from scratch silently; use a new run id to begin anew."


class DataError(RelitError):
    """Anything wrong with a data set or a position in it."""


class DatasetChangedError(DataError):
    """Fields: expected, found, diff (list of strings)."""

    template = "the data set changed: fingerprint {found} is not {expected}; {diff}."


class LoaderStateError(DataError):
    """Fields: field, expected, found."""

    template = "the saved data position does not fit: {field} was {expected!r} and is {found!r}."
