"""One generation's process group, owned by us and not by torch.distributed's global state.

A group is a `ProcessGroupGloo` built directly: nothing is registered anywhere, so a survivor
drops a broken group and forms the next one in milliseconds, in the same process. Every member
opens a fresh rendezvous store before it asks to join (`open_rendezvous`); the manager announces
the lowest rank's. Life of a group: `form_group`, collectives, `close_group`.

Nothing listens beyond the host given: the store through a socket that is bound to that address
only, gloo's own connections through a device of that address.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore, Work

from relit_platform.errors import CollectiveBrokenError
from relit_platform.facts import Assignment

STORE_TIMEOUT_S = 15.0
CLOSE_TIMEOUT_S = 1.0
_GLOO_THREADS = 2


class Group:
    """The members of one generation, and the collectives that relit needs among them.

    At world 1 there is no transport and every collective is the identity. A collective that
    fails raises CollectiveBrokenError; from then on the group is broken for good and only
    `close_group` makes sense. All members must issue the same collectives in the same order,
    from one thread. Tensors must be contiguous and on the CPU.
    """

    def __init__(self, *, rank: int, world: int, generation: int, transport: Any | None) -> None:
        self.rank = rank
        self.world = world
        self.generation = generation
        self._transport = transport

    @property
    def closed(self) -> bool:
        """True after `close_group`; a group of one is closed only by that call, too."""
        return self._transport is None and self.world > 1

    def all_reduce(self, tensor: Tensor) -> Work | None:
        """Start an in-place SUM over all ranks; returns at once, None at world 1.

        The tensor must not be touched until `wait` has returned for the work.
        """
        if self.world == 1:
            return None
        try:
            return cast(Work, self._open().allreduce(tensor))
        except RuntimeError as error:
            raise self.broken("all-reduce", error) from error

    def wait(self, work: Work | None, operation: str = "all-reduce") -> None:
        """Block until the work is done; raises CollectiveBrokenError if it failed."""
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise self.broken(operation, error) from error

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, by rank; blocks. Shapes must be equal on all ranks."""
        if self.world == 1:
            return [tensor.clone()]
        gathered = [torch.empty_like(tensor) for _ in range(self.world)]
        try:
            self._open().allgather([gathered], [tensor]).wait()
        except RuntimeError as error:
            raise self.broken("all-gather", error) from error
        return gathered

    def send(self, tensor: Tensor, ranks: Sequence[int]) -> None:
        """Send a tensor to each of `ranks` at the same time; blocks until all have it."""
        try:
            works = [self._open().send([tensor], rank, 0) for rank in ranks]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.broken("send", error) from error

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill a tensor with what `rank` sends; blocks."""
        try:
            self._open().recv([tensor], rank, 0).wait()
        except RuntimeError as error:
            raise self.broken("receive", error) from error

    def broken(self, operation: str, error: BaseException) -> CollectiveBrokenError:
        """The error to raise for a failed collective of this group."""
        cause = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        return CollectiveBrokenError(
            operation=operation, generation=self.generation, rank=self.rank, cause=cause
        )

    def _open(self) -> Any:
        if self._transport is None:
            raise RuntimeError("the group is closed")
        return self._transport

    def take_transport(self) -> Any | None:
        """Give the transport away for closing; the group is closed from here on."""
        transport, self._transport = self._transport, None
        return transport


def open_rendezvous(host: str) -> tuple[TCPStore, tuple[str, int]]:
    """A fresh store that listens on `host` only, on a free port; returns it and (host, port).

    The caller keeps the store until the generation formed through it is over. Blocks for no
    one: members connect later. Raises OSError when `host` is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(128)
        port = int(listener.getsockname()[1])
        # The store owns the descriptor from here on and closes it with itself.
        store = TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=STORE_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except BaseException:
        listener.close()
        raise
    return store, (host, port)


def form_group(
    assignment: Assignment,
    store: TCPStore | None,
    timeout_s: float,
    *,
    host: str = "",
    forming_timeout_s: float = STORE_TIMEOUT_S,
) -> Group:
    """Meet the other members of a generation; blocks until all are there.

    store is the one this member opened itself, used when it is rank 0 and ignored otherwise.
    host is this member's own address (default: that of the announced store, right on one
    host). timeout_s bounds every later collective, forming_timeout_s this call. Raises
    CollectiveBrokenError when a member does not come in time or dies on the way.
    """
    rank, world = assignment.rank, assignment.world
    if world == 1:
        return Group(rank=0, world=1, generation=assignment.generation, transport=None)
    placeholder = Group(rank=rank, world=world, generation=assignment.generation, transport=None)
    forming = timedelta(seconds=forming_timeout_s)
    try:
        shared = store if rank == 0 and store is not None else _connect(assignment, forming)
        shared.set_timeout(forming)
        prefix = PrefixStore(f"generation/{assignment.generation}", shared)
        options = _options(host or assignment.endpoint[0], forming)
        transport = cast(Any, ProcessGroupGloo)(prefix, rank, world, options)
    except (RuntimeError, OSError) as error:
        raise placeholder.broken("forming", error) from error
    transport._set_default_timeout(timedelta(seconds=timeout_s))
    return Group(rank=rank, world=world, generation=assignment.generation, transport=transport)


def close_group(group: Group, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
    """Leave a group, healthy or broken; returns within `timeout_s`. Safe to repeat.

    With dead peers the transport ends at once. With a peer that hangs, gloo keeps the
    collective in flight until its own timeout: then this returns False and a daemon thread
    ends the transport later. Buffers of unfinished collectives may still be written to until
    then and must be given up, which `GradientSync.reset` does.
    """
    transport = group.take_transport()
    if transport is None:
        return True
    holder = [transport]
    del transport
    # gloo's destructor joins its threads (without the GIL), so it may block: not in our thread.
    closer = threading.Thread(target=holder.clear, name="relit-group-close", daemon=True)
    closer.start()
    closer.join(timeout_s)
    return not closer.is_alive()


def _connect(assignment: Assignment, timeout: timedelta) -> TCPStore:
    host, port = assignment.endpoint
    return TCPStore(host, port, None, False, timeout, wait_for_workers=False)


def _options(host: str, timeout: timedelta) -> Any:
    gloo: Any = ProcessGroupGloo  # torch's stubs do not know these members
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    options._threads = _GLOO_THREADS
    return options
