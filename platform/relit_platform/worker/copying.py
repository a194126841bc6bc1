"""Copies of tensors into memory that is there already.

The C library's memmove writes large blocks by streaming stores, past the caches: it need not read
what it overwrites, which is a third of the traffic, and pushes nothing out that the loop has there.
From which size on is the library's choice, some MB to some tens of MB, by the size of the caches.
Figures are in docs/log.md.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

# One call for each: after it the thread may have to wait for the interpreter's lock.
LARGE_BYTES = 32 << 20

THREADS_MAX = 2  # torch copies with as many; three and more outdo one that streams

_PLAIN = (Tensor, nn.Parameter)  # of other classes nobody knows what lies at their address


def copy_into(
    targets: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool = False
) -> None:
    """Copy each source into its target, which has its shape and dtype; the targets share no memory
    with the sources. Blocks, but for non_blocking copies from a GPU into page-locked memory; gives
    the interpreter's lock away meanwhile.
    """
    by_block = torch.get_num_threads() <= THREADS_MAX
    rest_targets, rest_sources = [], []
    for target, source in zip(targets, sources, strict=True):
        if source.nbytes >= LARGE_BYTES and by_block and _are_alike(target, source):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            rest_targets.append(target)
            rest_sources.append(source)
    if rest_sources:
        with torch.no_grad():
            torch._foreach_copy_(rest_targets, rest_sources, non_blocking=non_blocking)


def _are_alike(target: Tensor, source: Tensor) -> bool:
    same = target.dtype is source.dtype and target.shape == source.shape
    return same and _is_plain(target) and _is_plain(source)


def _is_plain(tensor: Tensor) -> bool:
    """Its values lie one after the other, as they are, in host memory."""
    return (
        type(tensor) in _PLAIN
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
