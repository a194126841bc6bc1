"""A tool takes a run's lease while it changes what the run owns, as a supervisor does.

A supervisor that is alive refuses it that way, and one that starts meanwhile waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator

from relit.errors import RunAliveError
from relit.reading import RunReader
from relit.run_state import OVER
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.run.lease import Lease

LEASE_S = 20.0  # renewed while the work goes on; a supervisor outwaits a tool that was killed
OnBytes = Callable[[int], None]


@contextlib.contextmanager
def driving(reader: RunReader, verb: str) -> Iterator[Lease]:
    """Hold the lease of a run that is not alive; older epochs cannot append to its log any more.

    Blocks for the store. RunAliveError, LeaseHeldError.
    """
    state = reader.status()["state"]
    if state not in OVER:
        raise RunAliveError(run=reader.run_id, state=state, verb=verb)
    holder = f"relit ckpt {verb} on {socket.gethostname()}, pid {os.getpid()}"
    lease = Lease.take(reader.store, reader.run_id, holder, time.time(), LEASE_S)
    try:
        CommitLog(reader.store).append_epoch(lease.epoch, at_s=time.time(), holder=holder)
        yield lease
    finally:
        lease.release(time.time())


def renewing(lease: Lease, on_bytes: OnBytes) -> OnBytes:
    """`on_bytes` that renews the lease, too: reading or writing gigabytes may outlast it."""

    def heard(count: int) -> None:
        renew(lease)
        on_bytes(count)

    return heard


def renew(lease: Lease) -> None:
    """Renew if it is time; FencedError if a supervisor has taken over since."""
    now = time.time()
    if lease.record.expires_at_s - now < LEASE_S / 2:
        lease.renew(now)
