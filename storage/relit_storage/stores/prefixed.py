"""A view of a store below a prefix: what a run sees of the store it lives in."""

from __future__ import annotations

from relit_storage.stores.keys import check_key, check_prefix
from relit_storage.stores.protocol import AbandonsUploads, ObjectStore


class PrefixedStore:
    """The same verbs with `<prefix>/` before every key. Holds no state and no lock of its own."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = check_key(store.url, prefix.strip("/")) + "/"

    @property
    def url(self) -> str:
        """The URL that `open_store` turns into an equal view."""
        base, mark, query = self._store.url.partition("?")
        return f"{base.rstrip('/')}/{self._prefix.rstrip('/')}{mark}{query}"

    def put(self, key: str, data: bytes) -> None:
        """See ObjectStore.put."""
        self._store.put(self._full(key), data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See ObjectStore.put_if_absent."""
        return self._store.put_if_absent(self._full(key), data)

    def put_file(self, key: str, path: str) -> None:
        """See ObjectStore.put_file."""
        self._store.put_file(self._full(key), path)

    def get(self, key: str) -> bytes:
        """See ObjectStore.get."""
        return self._store.get(self._full(key))

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes:
        """See ObjectStore.get_range."""
        return self._store.get_range(self._full(key), start, num_bytes)

    def size(self, key: str) -> int | None:
        """See ObjectStore.size."""
        return self._store.size(self._full(key))

    def list(self, prefix: str) -> list[str]:
        """Keys relative to this view."""
        check_prefix(self.url, prefix)
        return [key[len(self._prefix) :] for key in self._store.list(self._prefix + prefix)]

    def delete(self, key: str) -> None:
        """See ObjectStore.delete."""
        self._store.delete(self._full(key))

    def abandon_uploads(self, prefix: str, older_than_s: float) -> int:
        """See AbandonsUploads.abandon_uploads; 0 where the store leaves no parts behind."""
        check_prefix(self.url, prefix)
        if not isinstance(self._store, AbandonsUploads):
            return 0
        return self._store.abandon_uploads(self._prefix + prefix, older_than_s)

    def _full(self, key: str) -> str:
        return self._prefix + check_key(self.url, key)
