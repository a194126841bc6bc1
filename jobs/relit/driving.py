"""A tool takes a run's lease while it changes what the run owns, as a supervisor does.

A supervisor that is alive refuses it that way, and a resume meanwhile is refused. A thread renews
the lease while the work goes on: the upload of one file may take longer than a lease lasts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

from relit.errors import RunAliveError
from relit.reading import RunReader
from relit.run_state import OVER, TOOL
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.errors import FencedError, StoreError
from relit_storage.run.lease import Lease

LEASE_S = 20.0  # a supervisor outwaits a tool that was killed
THREAD = "relit-lease"
OnBytes = Callable[[int], None]


class HeldLease:
    """A lease under renewal, for any thread. `driving` makes it and ends it."""

    def __init__(self, lease: Lease) -> None:
        self.epoch = lease.epoch
        self._lease = lease
        self._lock = threading.Lock()  # a Lease is for one thread at a time
        self._over = threading.Event()
        self._lost: FencedError | None = None
        self._thread = threading.Thread(target=self._keep, name=THREAD, daemon=True)

    def start(self) -> None:
        """Begin to renew from a thread."""
        self._thread.start()

    def renew(self) -> None:
        """Renew if it is time; may block on the store. StoreError; FencedError if a supervisor has
        taken over since.
        """
        self._renew(LEASE_S / 2)

    def confirm(self) -> None:
        """Renew now: what comes next can be done once only. Raises as `renew`."""
        self._renew(float("inf"))

    def release(self) -> None:
        """End the thread and let others in. Where the store fails, they wait for the expiry."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(StoreError):  # what was done stays done
            self._lease.release(time.time())

    def _renew(self, due_s: float) -> None:
        with self._lock:
            if self._lost is not None:
                raise self._lost
            now = time.time()
            if self._lease.record.expires_at_s - now >= due_s:
                return
            try:
                self._lease.renew(now)
            except FencedError as error:
                self._lost = error
                raise

    def _keep(self) -> None:
        while not self._over.wait(LEASE_S / 4):
            try:
                self.renew()
            except FencedError:
                return  # the work hears of it when it renews or confirms
            except StoreError:
                pass  # again in a while; an expired lease is still ours if nobody took it


@contextlib.contextmanager
def driving(reader: RunReader, verb: str) -> Iterator[HeldLease]:
    """Hold the lease of a run that is not alive; older epochs cannot append to its log any more.

    Blocks for the store. RunAliveError, LeaseHeldError.
    """
    state = reader.status()["state"]
    if state not in OVER:
        raise RunAliveError(run=reader.run_id, state=state, verb=verb)
    holder = f"{TOOL} {verb} on {socket.gethostname()}, pid {os.getpid()}"
    held = HeldLease(Lease.take(reader.store, reader.run_id, holder, time.time(), LEASE_S))
    try:
        CommitLog(reader.store).append_epoch(held.epoch, at_s=time.time(), holder=holder)
        held.start()
        yield held
    finally:
        held.release()


def renewing(lease: HeldLease, on_bytes: OnBytes) -> OnBytes:
    """`on_bytes` that hears of a lost lease: long work ends with FencedError, not at its end."""

    def heard(count: int) -> None:
        lease.renew()
        on_bytes(count)

    return heard
