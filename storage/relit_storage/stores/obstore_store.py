"""S3 and what speaks it, by obstore: the fast backend, a third of s3fs's processor time.

obstore's engine belongs to a process: in a child that was forked after its first use every call
would hang. There the portable backend (FsspecStore) stands in, with the same promises.
"""

from __future__ import annotations

import os

from relit_storage.stores.backoff import Backoff
from relit_storage.stores.fsspec_store import FsspecStore
from relit_storage.stores.obstore_verbs import ObstoreVerbs
from relit_storage.stores.pace import Pace
from relit_storage.stores.per_process import PerProcess

_started_in: set[int] = set()  # pid of the process that started obstore's engine; forks inherit it


class ObstoreStore:
    """Objects below an s3:// URL. Thread-safe, picklable, usable again after a fork.

    Credentials come from the environment or the provider chain and are renewed while it lives.
    `upload_bytes_per_s` caps what this object sends in a process; None sends as fast as it can.
    """

    def __init__(
        self,
        url: str,
        *,
        backoff: Backoff | None = None,
        upload_bytes_per_s: float | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._backoff = backoff or Backoff()
        self._upload_bytes_per_s = upload_bytes_per_s
        self._client: PerProcess[ObstoreVerbs | FsspecStore] = PerProcess(self._open)

    @property
    def url(self) -> str:
        """The URL as given, with the endpoint but without credentials."""
        return self._url

    @property
    def backend(self) -> str:
        """`obstore`, or `fsspec` in a forked child; opens nothing."""
        return "obstore" if _started_in <= {os.getpid()} else "fsspec"

    def put(self, key: str, data: bytes) -> None:
        """See ObjectStore.put."""
        self._verbs().put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See ObjectStore.put_if_absent."""
        return self._verbs().put_if_absent(key, data)

    def put_file(self, key: str, path: str) -> None:
        """See ObjectStore.put_file; goes on with the parts that a killed upload left."""
        self._verbs().put_file(key, path)

    def get(self, key: str) -> bytes:
        """See ObjectStore.get."""
        return self._verbs().get(key)

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes:
        """See ObjectStore.get_range; never a mixture of two versions."""
        return self._verbs().get_range(key, start, num_bytes)

    def size(self, key: str) -> int | None:
        """See ObjectStore.size."""
        return self._verbs().size(key)

    def list(self, prefix: str) -> list[str]:
        """See ObjectStore.list."""
        return self._verbs().list(prefix)

    def delete(self, key: str) -> None:
        """See ObjectStore.delete."""
        self._verbs().delete(key)

    def abandon_uploads(self, prefix: str, older_than_s: float) -> int:
        """See AbandonsUploads.abandon_uploads; in a forked child nothing is ended."""
        verbs = self._verbs()
        return verbs.abandon_uploads(prefix, older_than_s) if isinstance(verbs, ObstoreVerbs) else 0

    def _verbs(self) -> ObstoreVerbs | FsspecStore:
        return self._client.get()

    def _open(self) -> ObstoreVerbs | FsspecStore:
        if self.backend == "fsspec":
            return FsspecStore(self._url, backoff=self._backoff)
        _started_in.add(os.getpid())
        return ObstoreVerbs(self._url, self._backoff, Pace(self._upload_bytes_per_s))
