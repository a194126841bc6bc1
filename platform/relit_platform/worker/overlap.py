"""Which part of a snapshot may be copied beside the next pass, and whether that can be trusted.

    plan       which tensors wait, once per layout: the still ones, if they are worth a thread
    begin      hand them over                            take, at the boundary
    remember   ... or copy at the boundary and look      take, for the snapshots 1, 2, 4, 8, ...
    settle     wait for the copy, or compare             before the next step's sum goes out

Once something has moved that ought to stand still, everything is copied at the boundary for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from relit_platform.worker.samples import Samples
from relit_platform.worker.staging import (
    OVERLAP_MIN_BYTES,
    BackgroundCopy,
    Committed,
    Copied,
    same_bytes,
)

Staging = Literal["auto", "overlap", "sync"]


@dataclass(frozen=True, slots=True)
class Part:
    """Some tensors of an image: where they belong, the live ones, and their names."""

    targets: Sequence[Tensor]
    sources: Sequence[Tensor]
    names: Sequence[str]

    @property
    def num_bytes(self) -> int:
        """Bytes that a copy of it writes."""
        return sum(t.numel() * t.element_size() for t in self.sources)

    def at(self, places: Sequence[int]) -> Part:
        """Those of its tensors that are at these places."""
        return Part(
            [self.targets[i] for i in places],
            [self.sources[i] for i in places],
            [self.names[i] for i in places],
        )


NOTHING = Part((), (), ())


@dataclass(frozen=True, slots=True)
class _Plan:
    """Places in the layout's tensors. layout and still are those it was made for; samples are of
    the tensors copied later.
    """

    layout: object
    still: frozenset[str]
    now: tuple[int, ...]
    later: tuple[int, ...]
    samples: Samples


_NO_PLAN = _Plan(None, frozenset(), (), (), Samples((), ()))


class Overlap:
    """One per Snapshotter. mode: `auto` overlaps what is large enough, `sync` nothing."""

    def __init__(self, mode: Staging = "auto", copy: BackgroundCopy | None = None) -> None:
        self._mode = mode
        self._copy = copy or BackgroundCopy()
        self._count = 0
        self._looked_at: Part | None = None
        self._plan = _NO_PLAN
        self.refused = ""  # why nothing is copied beside the loop any more

    def divide(self, whole: Part, layout: object, still: frozenset[str]) -> tuple[Part, Part]:
        """(now, later): what is copied at this boundary and what may be copied beside the loop.

        whole: all tensors of `layout`. still: their names that stand still until `settle`.
        """
        if self._mode == "sync" or self.refused or not still:
            return whole, NOTHING
        plan = self._plan
        if plan.layout is not layout or plan.still is not still:
            self._plan = plan = self._planned(whole, layout, still)
        return (whole.at(plan.now), whole.at(plan.later)) if plan.later else (whole, NOTHING)

    def _planned(self, whole: Part, layout: object, still: frozenset[str]) -> _Plan:
        later = tuple(i for i, name in enumerate(whole.names) if name in still)
        if self._mode == "auto" and whole.at(later).num_bytes < OVERLAP_MIN_BYTES:
            later = ()
        rests = set(later)
        now = tuple(i for i in range(len(whole.names)) if i not in rests)
        rest = whole.at(later)
        return _Plan(layout, still, now, later, Samples(rest.sources, rest.names))

    def look_due(self) -> bool:
        """Count a snapshot that could overlap; True if it is to be copied at once and compared."""
        self._count += 1
        return self._count & (self._count - 1) == 0

    def begin(self, later: Part, commit: Committed, copied: Copied = lambda count: None) -> None:
        """Copy it in the background, and then commit; copied hears how many of its tensors are.

        later: as `divide` has just given it.
        """
        samples, targets = self._plan.samples, later.targets
        samples.keep()
        self._copy.begin(targets, later.sources, commit, lambda: samples.moved(targets), copied)

    def remember(self, later: Part) -> None:
        """It has been copied; `settle` shall compare."""
        self._looked_at = later

    def settle(self) -> str:
        """Block until the copy is done. "" if it was committed, or why there is no snapshot."""
        looked_at, self._looked_at = self._looked_at, None
        if looked_at is not None:
            moved = _first_moved(looked_at)
            if moved:
                self.refused = f"{moved} was changed between two updates"
        if not self._copy.busy:
            return ""
        reason = self._copy.wait()
        self.refused = self.refused or reason
        return reason

    def close(self) -> None:
        """Wait for the copy and end its thread; the images may be unmapped then."""
        self._looked_at = None
        self._copy.close()
        self._plan = _NO_PLAN  # its samples hold views of the images


def _first_moved(part: Part) -> str:
    for target, source, name in zip(part.targets, part.sources, part.names, strict=True):
        if not same_bytes(target, source):
            return name
    return ""
