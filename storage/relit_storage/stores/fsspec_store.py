"""Any fsspec URL as a store; S3 and what speaks S3 with care.

Never writes through `open(..., "wb")`: s3fs publishes a truncated object when such a block
raises. Never lists from a cache. Each verb has a deadline that it owns, above the client's own
quick retries; a call cut off by it may still reach the store, so writers carry a nonce.
A multipart upload cut off by a killed process leaves parts behind: give the bucket a lifecycle
rule AbortIncompleteMultipartUpload.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from relit_storage.errors import (
    ObjectMissingError,
    StoreError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from relit_storage.stores.answers import Answer, BeyondError, classify, to_error
from relit_storage.stores.backoff import Backoff
from relit_storage.stores.creating import create_once
from relit_storage.stores.keys import check_key, check_prefix, check_range
from relit_storage.stores.per_process import PerProcess
from relit_storage.stores.s3_options import S3_PROTOCOLS, TRANSFER, s3_options

T = TypeVar("T")
# File systems whose mode="create" is one conditional request. fsspec's generic fallback looks
# first and writes then, which two racing supervisors both win.
CREATE_PROTOCOLS = S3_PROTOCOLS | {"gs", "gcs", "abfs", "abfss", "az"}
WHOLE_PUT_BYTES = 5 << 30  # a conditional create must be one request: some ignore it at Complete
SLOW_LINK_BYTES_PER_S = 1 << 20  # below this a file upload counts as stuck


class FsspecStore:
    """Objects below an fsspec URL. Thread-safe, picklable, usable again after a fork.

    `options` go to the file system; credentials come from the environment or the provider chain,
    never from here, because frozen ones do not refresh.
    """

    def __init__(self, url: str, *, backoff: Backoff | None = None, **options: Any) -> None:
        self._url = url.rstrip("/")
        self._options = options
        self._backoff = backoff or Backoff()
        self._protocol = url.partition("://")[0]
        self._is_s3 = self._protocol in S3_PROTOCOLS
        self._client = PerProcess(self._open)

    @property
    def url(self) -> str:
        """The URL as given, with the endpoint but without credentials."""
        return self._url

    def put(self, key: str, data: bytes) -> None:
        """Create or replace; large objects in parts that become visible together."""
        options = TRANSFER if self._is_s3 else {}
        self._ask(key, "pipe_file", data, more_bytes=len(data), **options)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create by one conditional request; a refusal is settled by reading back."""
        if self._protocol not in CREATE_PROTOCOLS:
            raise UnsupportedStoreError(url=self._url, guarantee="an atomic create-if-absent")
        options = {"chunksize": WHOLE_PUT_BYTES} if self._is_s3 else {}

        def create() -> None:
            self._ask(key, "pipe_file", data, more_bytes=len(data), mode="create", **options)

        return create_once(self, key, data, create)

    def put_file(self, key: str, path: str) -> None:
        """Upload a local file in 16 MiB parts; the object appears when the last one is in."""
        try:
            num_bytes = os.stat(path).st_size
        except OSError as error:
            raise StoreError(url=self._url, key=key, cause=str(error)) from error
        full = self._full(key)
        options = TRANSFER if self._is_s3 else {}
        self._call(
            key,
            lambda fs, s: _run(fs, "put_file", s, path, full, **options),
            more_bytes=num_bytes,
        )

    def get(self, key: str) -> bytes:
        """The whole object; ObjectMissingError if there is none."""
        options = {"max_concurrency": 1} if self._is_s3 else {}  # else a HEAD before every GET
        return bytes(self._ask(key, "cat_file", **options))

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes:
        """`num_bytes` from `start`; a shorter answer is checked to be the object's end."""
        check_range(self._url, key, start, num_bytes)
        data = b""
        if num_bytes:
            try:
                data = bytes(self._ask(key, "cat_file", start=start, end=start + num_bytes))
            except BeyondError:
                pass
        if len(data) < num_bytes or not num_bytes:
            self._check_end(key, start, num_bytes, len(data))
        return data

    def size(self, key: str) -> int | None:
        """Size in bytes, or None."""
        full = self._full(key)
        try:
            return int(self._call(key, lambda fs, s: self._size(fs, full, s)))
        except ObjectMissingError:
            return None

    def list(self, prefix: str) -> list[str]:
        """Sorted keys that begin with `prefix`, straight from the store."""
        check_prefix(self._url, prefix)
        try:
            names = self._call(f"{prefix}*", lambda fs, s: self._find(fs, prefix, s))
        except ObjectMissingError:
            return []  # a file system without such a folder; a missing bucket is an error
        start = len(self._root) + 1
        return sorted(n[start:] for n in names if n[start:].startswith(prefix))

    def delete(self, key: str) -> None:
        """Remove; no error if absent."""
        try:
            self._ask(key, "rm_file")
        except ObjectMissingError:
            pass

    @property
    def _root(self) -> str:
        address = self._url.partition("?")[0]
        return address.partition("://")[2].strip("/") if self._is_s3 else address

    def _full(self, key: str) -> str:
        return f"{self._root}/{check_key(self._url, key)}"

    def _size(self, fs: Any, full: str, timeout_s: float) -> int:
        if self._is_s3:  # info() would list on a 404, at the price of a PUT
            bucket, _, name = full.partition("/")
            head = _run(fs, "call_s3", timeout_s, "head_object", Bucket=bucket, Key=name)
            return int(head["ContentLength"])
        found = _run(fs, "info", timeout_s, full)
        if found["type"] != "file":
            raise FileNotFoundError(full)
        return int(found["size"])

    def _find(self, fs: Any, prefix: str, timeout_s: float) -> Sequence[str]:
        fs.invalidate_cache()
        if self._is_s3:
            found: Sequence[str] = _run(fs, "find", timeout_s, self._root, prefix=prefix)
            return found
        folder = f"{self._root}/{prefix.rpartition('/')[0]}".rstrip("/")
        names = _run(fs, "find", timeout_s, folder)
        scheme = "" if not names or "://" in names[0] else f"{self._protocol}://"
        return [scheme + name.lstrip("/") for name in names]

    def _check_end(self, key: str, start: int, asked: int, got: int) -> None:
        size = self.size(key)
        if size is None:
            raise ObjectMissingError(url=self._url, key=key)
        if got != max(0, min(asked, size - start)):
            cause = f"{got} of {asked} bytes at {start} of {size}"
            raise StoreUnavailableError(url=self._url, key=key, cause=cause)

    def _ask(self, key: str, verb: str, *args: Any, more_bytes: int = 0, **options: Any) -> Any:
        full = self._full(key)
        return self._call(
            key, lambda fs, s: _run(fs, verb, s, full, *args, **options), more_bytes=more_bytes
        )

    def _call(self, key: str, call: Callable[[Any, float], T], more_bytes: int = 0) -> T:
        tries = self._backoff.start(extra_s=more_bytes / SLOW_LINK_BYTES_PER_S)
        while True:
            try:
                return call(self._client.get(), tries.left_s)
            # A third party's boundary: what a file system raises is not a closed set.
            except Exception as error:
                answer = classify(error)
                if answer is Answer.RENEW:
                    self._client.forget()
                if answer not in (Answer.BUSY, Answer.RENEW) or not tries.again():
                    raise to_error(self._url, key, answer, error) from error

    def _open(self) -> Any:
        import fsspec  # here, because most processes of a run never open a remote store

        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if self._is_s3:
            options |= s3_options(self._url)
        fs = fsspec.filesystem(self._protocol, **(options | self._options))
        if self._is_s3:
            fs.retries = 2  # its own layer has no jitter; the patience is ours
        return fs


def _run(fs: Any, verb: str, timeout_s: float, *args: Any, **options: Any) -> Any:
    if not fs.async_impl:
        return getattr(fs, verb)(*args, **options)
    from fsspec.asyn import sync

    return sync(fs.loop, getattr(fs, f"_{verb}"), *args, timeout=timeout_s, **options)
