"""The part of a snapshot that is copied beside the next forward and backward pass.

What nothing but an optimizer's update changes stands still from a boundary to the moment when this
rank's part of the next step's sum goes out. Its copy need not hold up the loop: a thread makes it,
and commits the slot itself, so that a process that dies right after has left the newer step. Where
the tensors lie on a GPU, the thread drives a stream of its own, which begins where the boundary's
work ends.

A loop may break the rule, by `p.data.clamp_()` ahead of its forward pass, say. A mixed snapshot
must never count, so there are three guards. What autograd knows of shows in a tensor's version
counter: looked at after each copy, which is then not committed. What goes past autograd (`.data`,
NumPy, C++) and changes whole tensors shows in samples (samples.py), at each copy, too. And there
are looks: the snapshots 1, 2, 4, 8, ... are copied at the boundary, and compared with the live
tensors bit by bit when the sum goes out. After a finding all are copied at the boundary. Not found
is a write past autograd to a few values that begins between two looks.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relit_platform.worker.copying import copy_into

# A copy of less holds the loop up for two milliseconds, about what handing it over may cost.
OVERLAP_MIN_BYTES = 32 << 20

# A copy goes in so many parts, but none smaller than that, for between two of them the thread may
# wait for the interpreter's lock; and none much larger than this, for the agent waits for them.
PARTS = 8
PART_MAX_BYTES = 1 << 30

Committed = Callable[[], object]
Copied = Callable[[int], object]


class BackgroundCopy:
    """One thread that makes one copy at a time. `begin` and `wait` are the training thread's.

    cuda: torch.cuda, or what stands for it; kind: the type of the devices that it drives.
    """

    def __init__(self, cuda: Any = torch.cuda, kind: str = "cuda") -> None:
        self._cuda = cuda
        self._kind = kind
        self._streams: dict[torch.device, Any] = {}
        self._todo: queue.SimpleQueue[Callable[[], str] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy = False

    def begin(
        self,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        commit: Committed,
        moved: Callable[[], str] = str,
        copied: Copied = lambda count: None,
    ) -> None:
        """Start copying sources into targets (host memory); returns at once.

        commit is called by the copying thread when all is copied, no source has changed
        meanwhile, and moved, which it asks then, names none that has. copied is called by it with
        the number of tensors, from the first, that are copied so far. Call `wait` before the next
        `begin`, and before anything may change a source.
        """
        versions = [source._version for source in sources]
        ready = self._after_present_work(sources)

        def copy() -> str:
            self._copy(targets, sources, ready, copied)
            for source, version in zip(sources, versions, strict=True):
                if source._version != version:
                    return "a parameter or optimizer state was changed outside the update"
            if name := moved():
                return f"{name} was changed outside the update"
            commit()
            return ""

        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="relit-staging", daemon=True)
            self._thread.start()
        self._busy = True
        self._todo.put(copy)

    @property
    def busy(self) -> bool:
        """True from `begin` to `wait`."""
        return self._busy

    def wait(self) -> str:
        """Block until the copy is done: "" if it was committed, or why it was not."""
        reason = self._done.get()
        self._busy = False  # not before: who is interrupted in here has still to wait
        return reason

    def close(self) -> None:
        """End the thread, after the copy that it is at. Safe to repeat."""
        if self._busy:
            self.wait()
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (copy := self._todo.get()) is not None:
            try:
                reason = copy()
            except Exception as error:  # a failed save is never a reason to stop training
                reason = f"the copy failed: {error}"
            del copy  # holds tensors, and with them a mapping that may have to go
            self._done.put(reason)

    def _after_present_work(self, sources: Sequence[Tensor]) -> dict[torch.device, Any]:
        """For each GPU an event behind what was enqueued up to the boundary."""
        ready: dict[torch.device, Any] = {}
        devices = {source.device for source in sources if source.device.type == self._kind}
        for device in devices:
            ready[device] = self._cuda.Event()
            ready[device].record(self._cuda.current_stream(device))
            if device not in self._streams:
                self._streams[device] = self._cuda.Stream(device)
        return ready

    def _copy(
        self,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        ready: Mapping[torch.device, Any],
        copied: Copied,
    ) -> None:
        with contextlib.ExitStack() as streams:
            for device, event in ready.items():
                self._streams[device].wait_event(event)
                streams.enter_context(self._cuda.stream(self._streams[device]))
            for begin, end in parts(sources):
                these, those = targets[begin:end], sources[begin:end]
                copy_into(these, those, non_blocking=bool(ready))
                for device in ready:
                    self._streams[device].synchronize()
                copied(end)


def parts(sources: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Ranges of tensors to be copied at a time: even by bytes, a few, none small or very large."""
    sizes = [source.numel() * source.element_size() for source in sources]
    wanted = max(OVERLAP_MIN_BYTES, min(PART_MAX_BYTES, -(-sum(sizes) // PARTS)))
    found, begin, size = [], 0, 0
    for end, num_bytes in enumerate(sizes, 1):
        size += num_bytes
        if size >= wanted or end == len(sizes):
            found.append((begin, end))
            begin, size = end, 0
    return found


def still_names(objects: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the tensors that only an update of a registered optimizer changes.

    tensors: what `flatten` gave for `objects`. Those are the parameters that an optimizer owns and
    its state; a copy that a state_dict made of them for the occasion is not among them.
    """
    addresses: set[int] = set()
    for obj in objects.values():
        if isinstance(obj, torch.optim.Optimizer):
            for group in obj.param_groups:
                addresses.update(map(_address, group["params"]))
            for state in obj.state.values():
                addresses.update(_address(v) for v in state.values() if isinstance(v, Tensor))
    addresses.discard(0)
    return frozenset(
        name
        for name, tensor in tensors.items()
        if _address(tensor) in addresses and not tensor.is_inference()
    )


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Bit for bit the same values, NaN included; left lies in host memory. Blocks to read both."""
    if left.numel() == 0:
        return right.numel() == 0
    there = right.detach().to(left.device).contiguous().flatten()
    return torch.equal(left.contiguous().flatten().view(torch.uint8), there.view(torch.uint8))


def _address(tensor: Tensor) -> int:
    """Where it lies; 0 for one that lies nowhere or in several places."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


class HostMemory:
    """Tells the GPU's driver of a mapping, so that copies into it are asynchronous and fast.

    By cudaHostRegister. Without a GPU, and when the driver refuses, copies are slower and right all
    the same.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._registered: set[int] = set()

    def register(self, image: Tensor) -> bool:
        """Page-lock the memory of `image`, uint8; False where that is not to be had."""
        if not self._cuda.is_initialized() or not image.numel():
            return False
        address = image.data_ptr()
        if address not in self._registered:
            code = self._cuda.cudart().cudaHostRegister(address, image.numel(), 0)
            if int(code) == 0:
                self._registered.add(address)
        return address in self._registered

    def forget(self, image: Tensor) -> None:
        """Undo `register`, before the memory is unmapped."""
        if image.data_ptr() in self._registered:
            self._registered.discard(image.data_ptr())
            self._cuda.cudart().cudaHostUnregister(image.data_ptr())
