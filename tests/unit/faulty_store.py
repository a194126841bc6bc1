"""A store whose n-th call goes wrong, to be put around any other.

Fault model, addressed by call number and never by time:

    fail   the call does nothing and raises StoreUnavailableError
    lost   the call is done, then raises StoreUnavailableError: its answer got lost
    torn   a write leaves the first half of its bytes under the key, then raises; a call that
           writes nothing fails. Worse than any store that passes the probe: what is written this
           way must be refused by the reader, not survived by the writer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal, TypeVar

from relit_storage.errors import StoreUnavailableError
from relit_storage.stores.protocol import ObjectStore

T = TypeVar("T")
Fault = Literal["fail", "lost", "torn"]
FAULTS: tuple[Fault, ...] = ("fail", "lost", "torn")


class FaultyStore:
    """`inner`, with one `fault` at call number `nth` (1, 2, ...; 0: never). Thread-safe."""

    def __init__(self, inner: ObjectStore, fault: Fault = "fail", nth: int = 0) -> None:
        self.inner = inner
        self.fault = fault
        self.nth = nth
        self.num_calls = 0
        self.calls: list[str] = []
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def fired(self) -> bool:
        """Whether the fault has happened."""
        return 0 < self.nth <= self.num_calls

    def put(self, key: str, data: bytes) -> None:
        self._call("put", key, lambda: self.inner.put(key, data), data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._call("put_if_absent", key, lambda: self.inner.put_if_absent(key, data), data)

    def put_file(self, key: str, path: str) -> None:
        with open(path, "rb") as file:
            data = file.read()
        self._call("put_file", key, lambda: self.inner.put_file(key, path), data)

    def get(self, key: str) -> bytes:
        return self._call("get", key, lambda: self.inner.get(key))

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes:
        return self._call("get_range", key, lambda: self.inner.get_range(key, start, num_bytes))

    def size(self, key: str) -> int | None:
        return self._call("size", key, lambda: self.inner.size(key))

    def list(self, prefix: str) -> list[str]:
        return self._call("list", prefix, lambda: self.inner.list(prefix))

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self.inner.delete(key))

    def _call(self, verb: str, key: str, do: Callable[[], T], data: bytes | None = None) -> T:
        with self._lock:
            self.num_calls += 1
            self.calls.append(f"{verb} {key}")
            hit = self.num_calls == self.nth
        if not hit:
            return do()
        if self.fault == "lost":
            do()
        elif self.fault == "torn" and data is not None and self._may_tear(verb, key):
            self.inner.put(key, data[: len(data) // 2])
        raise StoreUnavailableError(url=self.url, key=key, cause=f"injected: {self.fault} {verb}")

    def _may_tear(self, verb: str, key: str) -> bool:
        return verb != "put_if_absent" or self.inner.size(key) is None


def every_call(
    build: Callable[[], ObjectStore], scenario: Callable[[FaultyStore], None], fault: Fault
) -> int:
    """Run `scenario` with the fault at call 1, 2, ... until it no longer happens; the count.

    Each time on a fresh store from `build`. The scenario asserts for itself.
    """
    for nth in range(1, 500):
        store = FaultyStore(build(), fault, nth)
        scenario(store)
        if not store.fired:
            return nth - 1
    raise AssertionError("500 calls: the scenario does not end")
