"""Two loss series, compared bit for bit. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first step at which two series part; None stands for a missing row."""

    step: int
    ours: float | None
    twin: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`equal` of `total` steps have the same 64 bits in both series."""

    equal: int
    total: int
    first: Difference | None

    @property
    def identical(self) -> bool:
        """True if no step differs and there was something to compare."""
        return self.total > 0 and self.equal == self.total

    def sentence(self) -> str:
        """The result in one line, for people."""
        text = f"{self.equal} of {self.total} losses equal, bit for bit"
        if self.first is None:
            return text
        return f"{text}; first difference at step {self.first.step}: " + (
            f"{self.first.ours!r} with failures, {self.first.twin!r} without"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON for `relit demo --json`."""
        first = self.first and {
            "step": self.first.step,
            "ours": self.first.ours,
            "twin": self.first.twin,
        }
        return {"equal": self.equal, "total": self.total, "first_difference": first}


def compare(ours: Mapping[int, float], twin: Mapping[int, float], steps: int) -> Comparison:
    """Compare losses by step over 1..steps; a row that either side lacks counts as different."""
    first = None
    equal = 0
    for step in range(1, steps + 1):
        if _same_bits(ours.get(step), twin.get(step)):
            equal += 1
        elif first is None:
            first = Difference(step=step, ours=ours.get(step), twin=twin.get(step))
    return Comparison(equal=equal, total=steps, first=first)


def losses_of(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Loss by step of metric rows (JSON floats are exact: Python writes the shortest that is)."""
    return {int(row["step"]): float(row["loss"]) for row in rows if "loss" in row}


def _same_bits(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return False
    return struct.pack("<d", a) == struct.pack("<d", b)
