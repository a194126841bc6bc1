"""A lease that a thread renews, so that no work of its holder outlasts it.

A supervisor may wait for an agent, a tool for the upload of one file, longer than a lease lasts.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from relit_storage.errors import FencedError, StoreError
from relit_storage.run.lease import Lease

THREAD = "relit-lease"
STOP_S = 10.0  # for a renewal that the store keeps waiting


class HeldLease:
    """For any thread; renewed each `every_s` seconds from `start` until `stop` or `release`.

    lost: a newer epoch was found, and the lease is renewed no more; whoever looks first sets it.
    """

    def __init__(self, lease: Lease, every_s: float) -> None:
        self._lease = lease
        self._every_s = every_s
        self._lock = threading.Lock()  # a Lease is for one thread at a time
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=THREAD, daemon=True)
        self.lost: FencedError | None = None

    @property
    def epoch(self) -> int:
        """The epoch that is held now."""
        return self._lease.epoch

    def start(self) -> None:
        """Begin to renew."""
        self._thread.start()

    def check(self) -> None:
        """FencedError if the lease is known to be lost; asks nobody."""
        if self.lost is not None:
            raise self.lost

    def renew(self) -> None:
        """Renew if it is time, which else the thread does; may block on the store. StoreError;
        FencedError if another holder has taken over since.
        """
        self._renew(2 * self._every_s)

    def confirm(self) -> None:
        """Renew now: what comes next can be done once only. Raises as `renew`."""
        self._renew(float("inf"))

    def replace(self, take: Callable[[], Lease]) -> Lease:
        """Hold the next epoch that `take` takes for the same holder. Nobody looks at the old one
        meanwhile: the new one is no rival of it.
        """
        with self._lock:
            self._lease = take()
            return self._lease

    def stop(self) -> None:
        """End the thread; the lease runs out by itself. Safe to repeat, and from any thread."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def release(self) -> None:
        """End the thread and let others in. Where the store fails, they wait for the expiry."""
        self.stop()
        with contextlib.suppress(StoreError):  # what was done stays done
            self._lease.release(time.time())

    def _renew(self, due_s: float) -> None:
        with self._lock:
            self.check()
            now = time.time()
            if self._lease.record.expires_at_s - now >= due_s:
                return
            try:
                self._lease.renew(now)
            except FencedError as error:
                self.lost = error
                raise

    def _keep(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self.confirm()
            except FencedError:
                return  # the holder hears of it when it looks
            except Exception as error:  # an expired lease is still ours if nobody took it
                print(f"relit: the lease was not renewed, trying again: {error}", flush=True)
