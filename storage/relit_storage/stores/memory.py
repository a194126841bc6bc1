"""A store inside one process: for tests, the simulator, and trying things out."""

from __future__ import annotations

import threading

from relit_storage.errors import ObjectMissingError, StoreError
from relit_storage.stores.keys import check_key, check_prefix, check_range


class MemoryStore:
    """Objects in a dict. Thread-safe; gone with the process; every verb is atomic."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """`memory://<name>`; only a named store can be opened again by its URL."""
        return f"memory://{self._name}"

    def put(self, key: str, data: bytes) -> None:
        """Create or replace."""
        check_key(self.url, key)
        with self._lock:
            self._objects[key] = bytes(data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create unless the key exists; True also if it exists with exactly these bytes."""
        check_key(self.url, key)
        with self._lock:
            return self._objects.setdefault(key, bytes(data)) == data

    def put_file(self, key: str, path: str) -> None:
        """Read a local file into memory as one object."""
        check_key(self.url, key)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise StoreError(url=self.url, key=key, cause=str(error)) from error
        self.put(key, data)

    def get(self, key: str) -> bytes:
        """The object; ObjectMissingError if there is none."""
        check_key(self.url, key)
        with self._lock:
            data = self._objects.get(key)
        if data is None:
            raise ObjectMissingError(url=self.url, key=key)
        return data

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes:
        """A slice; shorter only at the end of the object."""
        check_range(self.url, key, start, num_bytes)
        return self.get(key)[start : start + num_bytes]

    def size(self, key: str) -> int | None:
        """Size in bytes, or None."""
        check_key(self.url, key)
        with self._lock:
            data = self._objects.get(key)
        return None if data is None else len(data)

    def list(self, prefix: str) -> list[str]:
        """Sorted keys that begin with `prefix`."""
        check_prefix(self.url, prefix)
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """Remove; no error if absent."""
        check_key(self.url, key)
        with self._lock:
            self._objects.pop(key, None)
