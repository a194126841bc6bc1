"""Sum of gradients over the ranks of a generation, overlapped with the backward pass.

Gradients are views of flat buckets. A bucket's all-reduce starts from the post-accumulate hook
of its last parameter, always in the same bucket order on every rank; the last bucket, which
cannot overlap with anything, starts in `finish` and needs no hooks. So a small model, whose
gradients fit one bucket, pays no Python call per parameter. The group can be changed at any
boundary; that is what DistributedDataParallel cannot do.

    sync.attach(group)                      at every new generation
    for each micro-batch:
        sync.begin(sync=is_last)            sync.control is sent from here
        loss.backward()
    sync.finish()                           gradients and control are sums over all ranks
    optimizer.step(); sync.zero()

The sum is not divided: ranks weight their losses by samples before the backward pass. For one
world size the order of additions is fixed, so results are bit-identical from run to run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils.hooks import RemovableHandle

from relit_platform.errors import CollectiveBrokenError, UsageError
from relit_platform.worker.process_group import Group

BUCKET_BYTES = 4 << 20
CONTROL_VALUES = 8


class _Bucket:
    """Parameters of one dtype and device whose gradients lie in one flat tensor."""

    __slots__ = ("flat", "missing", "pairs", "params", "started")

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.flat: Tensor = torch.empty(0)
        self.pairs: list[tuple[Tensor, Tensor]] = []  # parameter, its view of `flat`
        self.missing = len(params)
        self.started = False

    def allocate(self) -> None:
        """A new flat tensor of zeros, and the gradients as its views."""
        first = self.params[0]
        count = sum(param.numel() for param in self.params)
        self.flat = torch.zeros(count, dtype=first.dtype, device=first.device)
        self.pairs, start = [], 0
        for param in self.params:
            view = self.flat[start : start + param.numel()].view_as(param)
            self.pairs.append((param, view))
            param.grad = view
            start += param.numel()

    def adopt(self) -> None:
        """Make each gradient a view again that the user's loop set to None or replaced."""
        for param, view in self.pairs:
            grad = param.grad
            if grad is view:
                continue
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad.detach())
            param.grad = view


class GradientSync:
    """Bucketed all-reduce of the gradients of `params`; see the module for the order of calls.

    params that need no gradient at construction are left alone; a parameter given twice counts
    once. Parameters without a gradient in a step count as zeros, at every world size alike.
    Not thread-safe: one training thread drives it.
    """

    def __init__(self, params: Iterable[Tensor], bucket_bytes: int = BUCKET_BYTES) -> None:
        self._params = list(dict.fromkeys(p for p in params if p.requires_grad))
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._group: Group | None = None
        self._control = torch.zeros(CONTROL_VALUES, dtype=torch.float64)
        self._works: list[Work | None] = []
        self._next = 0  # index of the next bucket to start
        self._armed = False
        self._error: CollectiveBrokenError | None = None

    @property
    def control(self) -> Tensor:
        """A float64 vector of CONTROL_VALUES that travels with the gradients.

        Written before `begin(sync=True)`, the sum over all ranks after `finish`. Fetch it anew
        each step: `reset` replaces it.
        """
        return self._control

    @property
    def num_buckets(self) -> int:
        """All-reduces a step, the control vector's aside; 0 before the first `attach`."""
        return len(self._buckets)

    def attach(self, group: Group) -> None:
        """Use this group from now on.

        The first call lays out the buckets and takes over the gradients (zeros). Call at a
        boundary, after `reset` if the last step was abandoned.
        """
        if not self._buckets:
            self._buckets = _plan(self._params, self._bucket_bytes)
            for bucket in self._buckets:
                bucket.allocate()
            for bucket in self._buckets[:-1]:
                self._hook(bucket)
        self._group = group
        self._rearm(sync=False)

    def detach(self) -> None:
        """Remove the hooks and forget the group; gradients stay as they are."""
        for handle in self._hooks:
            handle.remove()
        self._hooks, self._buckets, self._group = [], [], None
        self._rearm(sync=False)

    def begin(self, sync: bool) -> None:
        """Call before each backward pass; sync is True for the last micro-batch of a step only.

        Sends `control` then. Costs a few microseconds, and tolerates gradients that the user's
        loop set to None.
        """
        for bucket in self._buckets:
            bucket.adopt()
        self._rearm(sync)
        if sync:
            self._send_control()

    def finish(self) -> None:
        """Start what is left, wait for all; gradients and `control` are then sums over ranks.

        Raises CollectiveBrokenError if any collective failed: gradients and control are then
        garbage, and `reset`, `attach` and a retry of the whole step are due.
        """
        group = self._attached()
        self._armed = False
        if group.world == 1:
            for bucket in self._buckets:
                bucket.adopt()
            return
        if not self._works and self._error is None:
            self._send_control()
        while self._next < len(self._buckets) and self._error is None:
            self._start_next(group)
        for work in self._works:
            if self._error is not None:
                break  # the others may take their whole timeout; reset deals with them
            try:
                group.wait(work)
            except CollectiveBrokenError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        self._works.clear()

    def zero(self) -> None:
        """All gradients to zero, one fill per bucket; in place of optimizer.zero_grad()."""
        for bucket in self._buckets:
            bucket.flat.zero_()

    def reset(self) -> None:
        """Abandon the step: nothing in flight counts any more, gradients are zero.

        Call after `close_group`. Buffers that an unfinished collective may still write to are
        given up and replaced. Never blocks.
        """
        unfinished = any(work is not None and not work.is_completed() for work in self._works)
        for bucket in self._buckets:
            if unfinished:
                bucket.allocate()
            else:
                bucket.adopt()
                bucket.flat.zero_()
        self._control = torch.zeros(CONTROL_VALUES, dtype=torch.float64)
        self._group = None
        self._rearm(sync=False)

    def _hook(self, bucket: _Bucket) -> None:
        def arrived(_: Tensor) -> None:
            if not self._armed:
                return
            if bucket.started:
                raise UsageError(
                    "a gradient arrived twice in one backward pass, after it had been sent "
                    "(re-entrant activation checkpointing, or two backward calls in one "
                    "micro-batch); sum the losses, or use checkpoint(use_reentrant=False)"
                )
            bucket.missing -= 1
            if bucket.missing == 0:
                self._start_ready()

        for param in bucket.params:
            register: Any = param.register_post_accumulate_grad_hook
            self._hooks.append(register(arrived))

    def _start_ready(self) -> None:
        """Start every bucket that is whole and whose predecessors have started."""
        group = self._attached()
        last = len(self._buckets) - 1
        while self._next < last and self._error is None:
            if self._buckets[self._next].missing > 0:
                return
            self._start_next(group)

    def _start_next(self, group: Group) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.started = True
        bucket.adopt()
        self._start(group, bucket.flat)

    def _send_control(self) -> None:
        self._start(self._attached(), self._control)

    def _start(self, group: Group, tensor: Tensor) -> None:
        if group.world == 1:
            return
        try:
            self._works.append(group.all_reduce(tensor))
        except CollectiveBrokenError as error:
            self._error = error  # raised by finish: a hook must not end the backward pass

    def _rearm(self, sync: bool) -> None:
        self._armed = sync and self._group is not None and self._group.world > 1
        self._next = 0
        self._error = None
        self._works = []
        for bucket in self._buckets:
            bucket.missing = len(bucket.params)
            bucket.started = False

    def _attached(self) -> Group:
        if self._group is None:
            raise UsageError("gradient sync has no group: call attach() first")
        return self._group


def _plan(params: list[Tensor], bucket_bytes: int) -> list[_Bucket]:
    """Buckets in the order in which a backward pass fills them: last parameters first."""
    closed: list[list[Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for param in reversed(params):
        kind = (param.dtype, param.device)
        bucket = filling.setdefault(kind, [])
        bucket.append(param)
        if sum(p.numel() * p.element_size() for p in bucket) >= bucket_bytes:
            closed.append(filling.pop(kind))
    return [_Bucket(bucket) for bucket in [*closed, *filling.values()]]
