"""One background thread that prepares the chunk after the one in use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Pending(Generic[T]):
    """A chunk on its way; `ahead` if it was asked for while the chunk before was in use."""

    future: Future[T]
    ahead: bool


class Prefetcher(Generic[T]):
    """Prepares chunks 0, 1, 2, ... of a stream by `prepare(stream, chunk)`.

    Holds two chunks at most: the one in use and the next. Asking for another stream or a distant
    chunk drops both. The thread starts on the first call and is idle between chunks.
    """

    def __init__(self, prepare: Callable[[tuple[int, int], int], T]) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._stream: tuple[int, int] = (0, 0)
        self._pending: dict[int, _Pending[T]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def get(self, stream: tuple[int, int], chunk: int, *, has_next: bool) -> T | None:
        """The chunk, or None while it is being prepared after a seek.

        Waits for a chunk that was asked for ahead of time: it is nearly there. Raises what
        `prepare` raised; a later call tries again.
        """
        with self._lock:
            self._drop_others(stream, chunk)
            pending = self._request(chunk, ahead=False)
            if has_next:
                self._request(chunk + 1, ahead=True)
        if not pending.ahead and not pending.future.done():
            return None
        try:
            return pending.future.result()
        except BaseException:
            with self._lock:
                if self._pending.get(chunk) is pending:
                    del self._pending[chunk]
            raise

    def close(self) -> None:
        """Drop everything and end the thread, waiting for the chunk it works on."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._pending.clear()
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)

    def _drop_others(self, stream: tuple[int, int], chunk: int) -> None:
        keep = {chunk, chunk + 1} if stream == self._stream else set()
        self._stream = stream
        for other in [other for other in self._pending if other not in keep]:
            self._pending.pop(other).future.cancel()

    def _request(self, chunk: int, *, ahead: bool) -> _Pending[T]:
        pending = self._pending.get(chunk)
        if pending is None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="relit-data")
            future = self._thread.submit(self._prepare, self._stream, chunk)
            pending = self._pending[chunk] = _Pending(future, ahead)
        return pending
