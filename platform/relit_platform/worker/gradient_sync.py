"""Sum of gradients over the ranks of a generation, overlapped with the backward pass.

After the backward pass gradients are views of flat buckets. A bucket's all-reduce starts from
the post-accumulate hook of its last parameter, always in the same bucket order on every rank;
the last bucket, which cannot overlap with anything, starts in `finish`. So a small model, whose
gradients fit one bucket, pays no Python call per parameter and one collective a step: the
control values travel in the same buffer. The group can be changed at any boundary;
that is what DistributedDataParallel cannot do.

    sync.attach(group)                      at every new generation
    for each micro-batch:
        sync.begin(sync=is_last)
        loss.backward()
    sync.control[0] = ...                   until finish
    sync.finish()                           gradients and control are sums over all ranks
    optimizer.step(); sync.zero()

The sum is not divided: ranks weight their losses by samples before the backward pass. For one
world size the order of additions is fixed, so results are bit-identical from run to run.
Gradients begin a step as None, so that autograd hands over its own tensors instead of adding to
zeros; they are copied into the bucket just before it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils.hooks import RemovableHandle

from relit_platform.errors import CollectiveBrokenError, UsageError
from relit_platform.worker.process_group import Group
from relit_platform.worker.sharding import is_dtensor

# Two gloo ranks, 24 x 768 linears, noisy box: 2 MiB cost 20 % more CPU than 8 MiB; at 25 MiB
# CPU was 3 % less, but the fastest fifth of the steps took longer. benchmarks/gradient_sync.py
BUCKET_BYTES = 8 << 20
CONTROL_VALUES = 8
_PARTS = 3  # float32 values that hold one float64
# From this size on a gradient is copied when it arrives: it is in the cache then, and its memory
# is free for the next one. Below it, the Python call costs more than the copy.
_COPY_AT_ONCE_BYTES = 256 << 10


class _Bucket:
    """Parameters of one dtype and device whose gradients are sent as one flat tensor."""

    __slots__ = ("flat", "missing", "pairs", "params", "started")

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.flat: Tensor = torch.empty(0)
        self.pairs: list[tuple[Tensor, Tensor]] = []  # parameter, its view of `flat`
        self.missing = len(params)
        self.started = False

    @property
    def num_values(self) -> int:
        """Gradient values in the bucket; `flat` may be longer."""
        return sum(param.numel() for param in self.params)

    def allocate(self, tail: int) -> None:
        """A new flat tensor of zeros with room for `tail` more values; gradients become None."""
        first = self.params[0]
        self.flat = torch.zeros(self.num_values + tail, dtype=first.dtype, device=first.device)
        self.pairs, start = [], 0
        for param in self.params:
            view = self.flat[start : start + param.numel()].view_as(param)
            self.pairs.append((param, view))
            param.grad = None
            start += param.numel()

    def adopt(self) -> None:
        """Copy gradients that autograd made into their views, and make the views the gradients."""
        views, grads = [], []
        for param, view in self.pairs:
            grad = param.grad
            if grad is view or grad is None:
                continue
            views.append(view)
            grads.append(grad)
            param.grad = view
        if views:
            with torch.no_grad():
                torch._foreach_copy_(views, grads)

    def adopt_one(self, index: int) -> None:
        """The same for one parameter, while its gradient is still in the processor's cache."""
        param, view = self.pairs[index]
        grad = param.grad
        if grad is not view and grad is not None:
            with torch.no_grad():
                view.copy_(grad)
            param.grad = view

    def complete(self) -> None:
        """All gradients are views; a parameter without a gradient counts as zeros."""
        self.adopt()
        for param, view in self.pairs:
            if param.grad is None:
                view.zero_()
                param.grad = view

    def clear(self) -> None:
        """All gradients are None, and the next backward pass begins a new sum."""
        for param in self.params:
            param.grad = None


class _PackedControl:
    """float64 control values inside a float32 buffer whose elements are summed over ranks.

    Each rank has a place of its own, where the others add zeros: so every rank gets every
    rank's values, split into three float32 that hold all 53 bits, and adds them up in float64 in
    the order of ranks. Exact within float32's range; larger values become infinite.
    """

    def __init__(self, room: Tensor, rank: int, world: int) -> None:
        self._places = room.numpy().reshape(world, _PARTS, CONTROL_VALUES)
        self._rank = rank

    @staticmethod
    def num_values(world: int) -> int:
        """Elements of the buffer that `world` ranks need."""
        return world * _PARTS * CONTROL_VALUES

    def write(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Put this rank's values into the buffer, before the collective."""
        self._places[:] = 0.0
        place, rest = self._places[self._rank], values
        with np.errstate(all="ignore"):
            for part in range(_PARTS):
                place[part] = rest
                rest = rest - place[part]
                rest[~np.isfinite(rest)] = 0.0  # inf and nan are whole in the first part

    def read(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Take the sum over ranks out of the buffer, after the collective."""
        parts = self._places.astype(np.float64)
        values[:] = (parts[:, 0] + (parts[:, 1] + parts[:, 2])).sum(axis=0)


class GradientSync:
    """Bucketed all-reduce of the gradients of `params`; see the module for the order of calls.

    params that need no gradient at construction are left alone; a parameter given twice counts
    once. Parameters without a gradient in a step count as zeros, at every world size alike. Raises
    UsageError for DTensors, whose gradients are sums of another kind.
    Not thread-safe: one training thread drives it.
    """

    def __init__(self, params: Iterable[Tensor], bucket_bytes: int = BUCKET_BYTES) -> None:
        self._params = list(dict.fromkeys(p for p in params if p.requires_grad))
        _refuse_sharded(self._params)
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        self._hooks: list[RemovableHandle] = []
        self._group: Group | None = None
        self._control = torch.zeros(CONTROL_VALUES, dtype=torch.float64)
        self._packed: _PackedControl | None = None
        self._tail = 0  # elements of the last bucket that hold control values
        self._works: list[Work | None] = []
        self._next = 0  # index of the next bucket to start
        self._armed = False
        self._error: CollectiveBrokenError | None = None

    @property
    def control(self) -> Tensor:
        """A float64 vector of CONTROL_VALUES that travels with the gradients.

        Written before `finish`, the sum over all ranks after it. Fetch it anew each step:
        `reset` and `detach` replace it.
        """
        return self._control

    @property
    def num_buckets(self) -> int:
        """Gradient all-reduces a step; 0 before the first `attach`."""
        return len(self._buckets)

    def attach(self, group: Group) -> None:
        """Use this group from now on.

        The first call lays out the buckets and takes over the gradients. Call at a boundary,
        after `reset` if the last step was abandoned.
        """
        if not self._buckets:
            self._buckets = _plan(self._params, self._bucket_bytes)
            self._hook_all()
        self._group = group
        tail = _PackedControl.num_values(group.world) if self._packable(group) else 0
        if tail != self._tail or not all(bucket.pairs for bucket in self._buckets):
            self._tail = tail
            self._allocate()
        if tail:
            room = self._buckets[-1].flat[-tail:]
            self._packed = _PackedControl(room, group.rank, group.world)
        else:
            self._packed = None
        self._rearm(sync=False)

    def detach(self) -> None:
        """Remove the hooks, forget the group and give up all buffers; never blocks.

        Gradients stay as they are. The next `attach` begins with buffers of its own, so this
        is right even while a broken collective may still write to the old ones.
        """
        for handle in self._hooks:
            handle.remove()
        self._hooks, self._buckets, self._group = [], [], None
        self._packed, self._tail = None, 0
        self._control = torch.zeros(CONTROL_VALUES, dtype=torch.float64)
        self._rearm(sync=False)

    def begin(self, sync: bool) -> None:
        """Call before each backward pass; sync is True for the last micro-batch of a step only.

        Costs microseconds. Gradients that the user's loop set to None are tolerated.
        """
        for bucket in self._buckets:
            bucket.adopt()
        self._rearm(sync)

    def finish(self) -> None:
        """Start what is left, wait for all; gradients and `control` are then sums over ranks.

        Raises CollectiveBrokenError if any collective failed: gradients and control are then
        garbage, and `reset`, `attach` and a retry of the whole step are due.
        """
        group = self._attached()
        self._armed = False
        if self._packed is not None:
            self._packed.write(self._control.numpy())
        while self._next < len(self._buckets):
            self._start_next(group)
        if self._packed is None:
            self._start(group, self._control)
        self._wait(group)
        if self._packed is not None:
            self._packed.read(self._control.numpy())

    def zero(self) -> None:
        """Begin a new sum: all gradients are None; in place of optimizer.zero_grad()."""
        for bucket in self._buckets:
            bucket.clear()

    def reset(self) -> None:
        """Abandon the step: nothing in flight counts any more, no gradient is left.

        Call after `close_group`. Buffers that an unfinished collective may still write to are
        given up and replaced. Never blocks.
        """
        if any(work is not None and not work.is_completed() for work in self._works):
            self._allocate()
        self.zero()
        self._control = torch.zeros(CONTROL_VALUES, dtype=torch.float64)
        self._group, self._packed = None, None
        self._rearm(sync=False)

    def _packable(self, group: Group) -> bool:
        if group.world == 1 or not self._buckets:
            return False
        flat = self._buckets[-1].params[0]
        return flat.dtype is torch.float32 and flat.device.type == "cpu"

    def _allocate(self) -> None:
        for bucket in self._buckets:
            bucket.allocate(self._tail if bucket is self._buckets[-1] else 0)

    def _hook(self, bucket: _Bucket, index: int) -> None:
        def arrived(param: Tensor) -> None:
            bucket.adopt_one(index)
            if not self._armed or bucket is self._buckets[-1]:
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

        register: Any = bucket.params[index].register_post_accumulate_grad_hook
        self._hooks.append(register(arrived))

    def _hook_all(self) -> None:
        for bucket in self._buckets:
            for index, param in enumerate(bucket.params):
                big = param.numel() * param.element_size() >= _COPY_AT_ONCE_BYTES
                if big or bucket is not self._buckets[-1]:
                    self._hook(bucket, index)

    def _start_ready(self) -> None:
        """Start every bucket that is whole and whose predecessors have started."""
        group = self._attached()
        last = len(self._buckets) - 1
        while self._next < last and self._buckets[self._next].missing <= 0:
            self._start_next(group)

    def _start_next(self, group: Group) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.started = True
        bucket.complete()
        self._start(group, bucket.flat)

    def _start(self, group: Group, tensor: Tensor) -> None:
        if group.world == 1 or self._error is not None:
            return
        try:
            self._works.append(group.all_reduce(tensor))
        except CollectiveBrokenError as error:
            self._error = error  # raised by finish: a hook must not end the backward pass

    def _wait(self, group: Group) -> None:
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


def _refuse_sharded(params: list[Tensor]) -> None:
    count = sum(is_dtensor(param) for param in params)
    if count:
        raise UsageError(
            message=f"{count} of {len(params)} registered parameters are DTensors (FSDP2's "
            "fully_shard, or tensor parallelism). run.backward sums whole gradients: register a "
            "model that is whole on every rank, before or instead of sharding it."
        )
