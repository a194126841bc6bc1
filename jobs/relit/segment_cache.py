"""A store view that keeps what never changes, so that following a run costs one listing a poll.

Closed segments of events, metrics and logs, incidents and old attempts are written once. Without
this, each poll of `events(follow=True)` would fetch the whole history again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from relit_storage.stores.protocol import ObjectStore

_WRITTEN_ONCE = ("events/", "metrics/", "incidents/", "logs/", "attempts/", "tables/")
_MAX_BYTES = 64 << 20


class SegmentCache:
    """An `ObjectStore` that answers `get` of write-once keys from memory. Thread-safe."""

    def __init__(self, store: ObjectStore, max_bytes: int = _MAX_BYTES) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The store's own URL."""
        return self._store.url

    def get(self, key: str) -> bytes:
        """From memory if the key is written once and was read before."""
        if not key.startswith(_WRITTEN_ONCE):
            return self._store.get(key)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        data = self._store.get(key)
        self._keep(key, data)
        return data

    def _keep(self, key: str, data: bytes) -> None:
        with self._lock:
            if key in self._kept or len(data) > self._max_bytes:
                return
            self._kept[key] = data
            self._num_bytes += len(data)
            while self._num_bytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._num_bytes -= len(dropped)

    def put(self, key: str, data: bytes) -> None:
        """Straight to the store."""
        self._store.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Straight to the store."""
        return self._store.put_if_absent(key, data)

    def put_file(self, key: str, path: str) -> None:
        """Straight to the store."""
        self._store.put_file(key, path)

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes:
        """Straight to the store."""
        return self._store.get_range(key, start, num_bytes)

    def size(self, key: str) -> int | None:
        """Straight to the store."""
        return self._store.size(key)

    def list(self, prefix: str) -> list[str]:
        """Straight to the store: new segments must be seen."""
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        """Straight to the store; the copy in memory goes too."""
        self._store.delete(key)
        with self._lock:
            dropped = self._kept.pop(key, b"")
            self._num_bytes -= len(dropped)
