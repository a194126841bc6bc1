"""A client that is opened once in each process and does not travel with its store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Thread-safe, and picklable if `make` is: another process, forked or not, opens its own."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._opened: tuple[int, T] | None = None  # and the pid that opened it

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._make = state["_make"]
        self._lock = threading.Lock()
        self._opened = None

    def get(self) -> T:
        """This process's own; opened now if there is none, so it raises what that raises."""
        pid = os.getpid()
        with self._lock:
            if self._opened is None or self._opened[0] != pid:
                self._opened = (pid, self._make())
            return self._opened[1]

    def forget(self) -> None:
        """The next `get` opens another one."""
        with self._lock:
            self._opened = None
