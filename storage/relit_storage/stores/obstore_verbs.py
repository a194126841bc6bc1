"""The verbs of a store on S3, done with obstore: one process's half of ObstoreStore.

Each try is one request that ends within `timeout_s`; the tries, their jittered pauses and the
deadline are ours. What is large goes in parts (multipart) and comes in pieces, each asked for with
the ETag of the first, so that an object that is replaced meanwhile is never read as a mixture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from relit_storage.errors import ObjectMissingError, StoreError, StoreUnavailableError
from relit_storage.stores.answers import Answer, BeyondError, classify, to_error
from relit_storage.stores.backoff import Backoff, Tries
from relit_storage.stores.byte_source import BufferSource, ByteSource, FileSource
from relit_storage.stores.creating import create_once
from relit_storage.stores.keys import check_key, check_prefix, check_range
from relit_storage.stores.multipart import PartUploader, abandon
from relit_storage.stores.pace import Pace
from relit_storage.stores.s3_access import S3Access, open_access
from relit_storage.stores.s3_options import bucket_and_prefix

T = TypeVar("T")
SLOW_LINK_BYTES_PER_S = 1 << 20  # below this an upload counts as stuck
NUM_STREAMS = 4  # requests that carry the parts of large objects, of one store and process
# What one request carries at least within its time on a slow link.
WHOLE_BYTES = 8 << 20
PIECE_BYTES = 8 << 20


class ObstoreVerbs:
    """See ObjectStore for the verbs. Thread-safe; of no use after a fork."""

    def __init__(self, url: str, backoff: Backoff, pace: Pace) -> None:
        self._url = url
        self._backoff = backoff
        self._pace = pace
        # A part of the deadline, so that the last try that begins also ends within it.
        self._timeout_s = min(30.0, backoff.deadline_s / 4)
        self._prefix = bucket_and_prefix(url)[1]
        self._lock = threading.Lock()
        self._access: S3Access | None = None
        self._pool = ThreadPoolExecutor(NUM_STREAMS, "relit-s3")
        self._parts = PartUploader(self._opened, self._reopen, self._pool, pace)

    @property
    def url(self) -> str:
        """The URL as given."""
        return self._url

    def put(self, key: str, data: bytes) -> None:
        """One request, or parts that become visible together."""
        full = self._full(key)
        if len(data) > WHOLE_BYTES:
            self._put_parts(key, full, BufferSource(data))
        else:
            self._call(key, lambda access: self._send(access, full, data, "overwrite"), len(data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """One conditional request; a refusal is settled by reading back."""
        full = self._full(key)

        def create() -> None:
            tries = self._tries(len(data), num_last=2)
            try:
                self._try(key, lambda access: self._send(access, full, data, "create"), tries)
            except StoreUnavailableError:
                # The last answer may have got lost on the way: one look, within the deadline.
                if self._look(full) != data:
                    raise

        return create_once(self, key, data, create)

    def put_file(self, key: str, path: str) -> None:
        """The file, read piece by piece; goes on with what a killed upload left."""
        full = self._full(key)
        try:
            with open(path, "rb", buffering=0) as file:
                source = FileSource(file.fileno(), path)
                if source.num_bytes > WHOLE_BYTES:
                    self._put_parts(key, full, source)
                else:
                    self.put(key, _whole(source))
        except (OSError, ValueError) as error:  # of the file: the store's are StoreErrors by now
            raise StoreError(url=self._url, key=key, cause=str(error)) from error

    def get(self, key: str) -> bytes:
        """The whole object."""
        full = self._full(key)
        return self._call(key, lambda access: self._get(access, full))

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes:
        """`num_bytes` from `start`, all of one version of the object."""
        check_range(self._url, key, start, num_bytes)
        full = self._full(key)
        if num_bytes == 0:
            if self.size(key) is None:
                raise ObjectMissingError(url=self._url, key=key)
            return b""
        try:
            return self._call(key, lambda access: self._get(access, full, start, num_bytes))
        except BeyondError:
            return b""

    def size(self, key: str) -> int | None:
        """Size in bytes, or None."""
        full = self._full(key)
        try:
            return self._call(key, lambda access: _size(access, full))
        except ObjectMissingError:
            return None

    def list(self, prefix: str) -> list[str]:
        """Sorted keys. botocore's call: obstore takes whole folders only, and an error for none."""
        check_prefix(self._url, prefix)
        root = f"{self._prefix}/" if self._prefix else ""

        def names(access: S3Access) -> list[str]:
            pages = access.calls.get_paginator("list_objects_v2").paginate(
                Bucket=access.bucket, Prefix=root + prefix
            )
            return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

        found = self._call(f"{prefix}*", names)
        return sorted(name.removeprefix(root) for name in found if not name.endswith("/"))

    def delete(self, key: str) -> None:
        """Remove; no error if absent."""
        full = self._full(key)
        try:
            self._call(
                key, lambda access: access.calls.delete_object(Bucket=access.bucket, Key=full)
            )
        except ObjectMissingError:
            pass

    def abandon_uploads(self, prefix: str, older_than_s: float) -> int:
        """End multipart uploads below `prefix` that began so long ago; how many."""
        check_prefix(self._url, prefix)
        below = f"{self._prefix}/{prefix}".lstrip("/")
        return self._call(f"{prefix}*", lambda access: abandon(access, below, older_than_s))

    def _full(self, key: str) -> str:
        check_key(self._url, key)
        return f"{self._prefix}/{key}" if self._prefix else key

    def _send(self, access: S3Access, full: str, data: bytes, mode: Any) -> None:
        import obstore

        self._pace.take(len(data))
        answer = obstore.put(access.objects, full, data, mode=mode, use_multipart=False)
        if not answer["e_tag"]:
            raise ConnectionError("the answer to a write carries no ETag")

    def _put_parts(self, key: str, full: str, source: ByteSource) -> None:
        tries = self._tries(source.num_bytes)
        try:
            self._parts.upload(full, source, tries)
        except Exception as error:
            raise to_error(self._url, key, classify(error), error) from None

    def _get(
        self, access: S3Access, full: str, start: int = 0, num_bytes: int | None = None
    ) -> bytes:
        """Bytes of one version of the object; a first piece, then the others side by side."""
        import obstore

        first = PIECE_BYTES if num_bytes is None else min(num_bytes, PIECE_BYTES)
        options: Any = {} if num_bytes is None else {"range": (start, start + first)}
        answer = obstore.get(access.objects, full, options=options)
        meta = answer.meta
        if not meta["e_tag"]:
            raise ConnectionError("the answer to a read carries no ETag")
        end = meta["size"] if num_bytes is None else min(start + num_bytes, meta["size"])
        if num_bytes is None and end > PIECE_BYTES:
            del answer  # unread: too much for one request's time
            pieces, at = [], 0
        else:
            pieces, at = [answer.bytes()], min(start + first, end)

        def piece(at: int) -> Any:
            span = (at, min(at + PIECE_BYTES, end))
            pinned: Any = {"range": span, "if_match": meta["e_tag"]}
            return obstore.get(access.objects, full, options=pinned).bytes()

        try:
            pieces += self._pool.map(piece, range(at, end, PIECE_BYTES))
        except Exception as error:
            if classify(error) is Answer.CONFLICT:
                raise ConnectionError("the object was replaced while it was read") from None
            raise
        data = bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
        if len(data) != end - start:
            raise ConnectionError(f"{len(data)} bytes came instead of {end - start}")
        return data

    def _look(self, full: str) -> bytes | None:
        try:
            return self._get(self._opened(), full)
        except Exception:
            return None

    def _tries(self, more_bytes: int, num_last: int = 1) -> Tries:
        """Tries that end so early that `num_last` more requests fit before the deadline."""
        rate = min(SLOW_LINK_BYTES_PER_S, self._pace.bytes_per_s or SLOW_LINK_BYTES_PER_S)
        return self._backoff.start(extra_s=more_bytes / rate - num_last * self._timeout_s)

    def _call(self, key: str, call: Callable[[S3Access], T], more_bytes: int = 0) -> T:
        return self._try(key, call, self._tries(more_bytes))

    def _try(self, key: str, call: Callable[[S3Access], T], tries: Tries) -> T:
        while True:
            try:
                return call(self._opened())
            except Exception as error:
                answer = classify(error)
                if answer is Answer.RENEW:
                    self._reopen()
                if answer not in (Answer.BUSY, Answer.RENEW) or not tries.again():
                    # Without its cause: an answer in XML may repeat what was signed.
                    raise to_error(self._url, key, answer, error) from None

    def _opened(self) -> S3Access:
        with self._lock:
            if self._access is None:
                self._access = open_access(self._url, self._timeout_s)
            return self._access

    def _reopen(self) -> None:
        with self._lock:
            self._access = None


def _size(access: S3Access, full: str) -> int:
    import obstore

    head = obstore.head(access.objects, full)
    if not head["e_tag"]:
        raise ConnectionError("the answer to HEAD carries no ETag")
    return int(head["size"])


def _whole(source: ByteSource) -> bytes:
    return b"".join(bytes(piece) for piece in source.pieces(0, source.num_bytes))
