"""A tool takes a run's lease while it changes what the run owns, as a supervisor does.

A supervisor that is alive refuses it that way, and a resume meanwhile is refused. A thread renews
the lease while the work goes on: the upload of one file may take longer than a lease lasts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator

from relit.errors import RunAliveError
from relit.reading import RunReader
from relit.run_state import OVER, TOOL
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.run.held_lease import HeldLease
from relit_storage.run.lease import Lease

LEASE_S = 20.0  # a supervisor outwaits a tool that was killed
OnBytes = Callable[[int], None]


@contextlib.contextmanager
def driving(reader: RunReader, verb: str) -> Iterator[HeldLease]:
    """Hold the lease of a run that is not alive; older epochs cannot append to its log any more.

    Blocks for the store. RunAliveError, LeaseHeldError.
    """
    state = reader.status()["state"]
    if state not in OVER:
        raise RunAliveError(run=reader.run_id, state=state, verb=verb)
    holder = f"{TOOL} {verb} on {socket.gethostname()}, pid {os.getpid()}"
    lease = Lease.take(reader.store, reader.run_id, holder, time.time(), LEASE_S)
    held = HeldLease(lease, LEASE_S / 4)
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
