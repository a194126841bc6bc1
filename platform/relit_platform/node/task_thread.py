"""One thread with a bounded queue of named tasks: what is slow and must not overtake itself."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

Task = Callable[[], None]


class TaskThread:
    """Runs tasks in order, one at a time. A task's errors are its own business, bar none.

    began: called first of all, by the thread itself; must not raise.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        crashed: Callable[[str, Exception], None],
        began: Callable[[], object] = lambda: None,
    ) -> None:
        self._name = name
        self._capacity = capacity
        self._crashed = crashed
        self._began = began
        self._wake = threading.Condition()
        self._queue: OrderedDict[Hashable, Task] = OrderedDict()
        self._running: Hashable | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to work."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def submit(self, key: Hashable, task: Task) -> bool:
        """Queue a task; True if it is queued or already was under this key, False if full."""
        with self._wake:
            if key in self._queue or key == self._running:
                return True
            if self._closing or len(self._queue) >= self._capacity:
                return False
            self._queue[key] = task
            self._wake.notify()
            return True

    def pending(self) -> frozenset[Hashable]:
        """Keys of all that is queued or running."""
        with self._wake:
            running = () if self._running is None else (self._running,)
            return frozenset([*self._queue, *running])

    def close(self, timeout_s: float) -> bool:
        """Finish the running task, drop the queued ones; False if it is still at it after that."""
        with self._wake:
            self._closing = True
            self._queue.clear()
            self._wake.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._began()
        while True:
            with self._wake:
                self._running = None
                while not self._queue and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
                self._running, task = self._queue.popitem(last=False)
            try:
                task()
            except Exception as error:  # a bug in one task must not end persisting for good
                self._crashed(self._name, error)
            finally:
                del task  # it may hold a slot's memory: not while this thread waits
