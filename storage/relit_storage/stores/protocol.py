"""What relit asks of an object store: seven verbs over flat keys.

Keys are relative, '/'-separated, without empty, '.' or '..' parts. Every verb is synchronous,
may be called from any thread, raises `StoreError` or a subclass, and is safe to repeat.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable


class ObjectStore(Protocol):
    """A flat key space of immutable or overwritten whole objects."""

    @property
    def url(self) -> str:
        """Where this store is, without credentials."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Create or replace an object atomically and durably; readers see old or new, whole."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create the object unless the key exists: True if ours is now there, atomically.

        Of any number of racing callers exactly one gets True. An answer that was lost in
        transit is settled by reading back, so callers put a nonce into `data`.
        """
        ...

    def put_file(self, key: str, path: str) -> None:
        """Upload a local file as one object. Blocks; never publishes a part of the file."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object; ObjectMissingError if there is none."""
        ...

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes:
        """`num_bytes` bytes from `start`; fewer only at the end of the object."""
        ...

    def size(self, key: str) -> int | None:
        """Size in bytes, or None if there is no such object."""
        ...

    def list(self, prefix: str) -> list[str]:
        """All keys that begin with `prefix`, sorted, never from a cache."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; no error if it is absent."""
        ...


@runtime_checkable
class AbandonsUploads(Protocol):
    """A store that sends large objects in parts, so that a killed process may leave some."""

    def abandon_uploads(self, prefix: str, older_than_s: float) -> int:
        """End unfinished uploads below `prefix` that began so long ago; how many.

        Blocks; raises StoreError. The age must exceed any upload that may still be under way.
        """
        ...
