"""A few values of each tensor, kept at a boundary and compared with what was copied later.

Who writes past autograd (`p.data.copy_(average)`, to evaluate with averaged weights and put the
others back, say) changes no version counter, but nearly every value. So some values of each tensor
are kept when the snapshot begins, by one fused copy, and must be those that the slot holds when its
copy is over. A write to a few values only can pass unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SAMPLES = 8  # of a tensor, along its longest dimension
MAX_IMAGES = 8  # whose views are kept; a worker has four slots


class Samples:
    """Of one set of tensors, the same at each boundary. sources: the live ones, with names."""

    def __init__(self, sources: Sequence[Tensor], names: Sequence[str]) -> None:
        self._names = names
        self._live = [sample(source) for source in sources]
        self._kept = [torch.empty_like(one) for one in self._live]  # where the tensors lie
        self._before = [torch.empty(one.shape, dtype=one.dtype) for one in self._live]
        self._after = [torch.empty_like(one) for one in self._before]
        self._pairs = [
            (_bytes(before), _bytes(after))
            for before, after in zip(self._before, self._after, strict=True)
        ]
        self._views: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """At the boundary; on a GPU enqueued behind the update, and nothing is waited for."""
        torch._foreach_copy_(self._kept, self._live)

    @torch.no_grad()
    def moved(self, targets: Sequence[Tensor]) -> str:
        """The first tensor whose copy is not what it was at `keep`; "" if all agree.

        targets: what was copied into, in host memory. Called by the copying thread.
        """
        torch._foreach_copy_(self._before, self._kept)
        torch._foreach_copy_(self._after, self._views_of(targets))
        for (before, after), name in zip(self._pairs, self._names, strict=True):
            if not torch.equal(before, after):
                return name
        return ""

    def _views_of(self, targets: Sequence[Tensor]) -> list[Tensor]:
        """The same places in an image; a slot's image stays where it is."""
        key = targets[0].data_ptr()
        if key not in self._views:
            if len(self._views) >= MAX_IMAGES:
                self._views.clear()
            self._views[key] = [sample(target) for target in targets]
        return self._views[key]


def sample(tensor: Tensor) -> Tensor:
    """A view of some values, whatever the strides: equal places in tensors of equal shape."""
    if tensor.dim() == 0:
        return tensor.detach()
    longest = max(range(tensor.dim()), key=tensor.shape.__getitem__)
    step = max(1, tensor.shape[longest] // SAMPLES)
    places = [slice(0, 1)] * tensor.dim()
    places[longest] = slice(None, None, step)
    return tensor.detach()[tuple(places)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)
