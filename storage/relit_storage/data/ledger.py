"""The audit ledger: one row per completed step, and the proof that no sample was lost or repeated.

Rows of abandoned lines stay in the ledger. The *surviving line* is what the newest generations
left: a row of step k in generation g cancels every row of an older generation at step k or later.
On that line steps must follow each other without a gap and their positions must tile each epoch;
with `sample_ids` the audit recomputes which samples those were and checks each row's digest too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash

from relit_storage.data.permutation import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """Step `step` (counted from 0) consumed positions [lo, hi) of `epoch`.

    hi may lie beyond the epoch's length: the rest are the first positions of the next epochs.
    digest is `ids_digest` of the samples in canonical order.
    """

    step: int
    epoch: int
    lo: int
    hi: int
    world: int
    generation: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """A flat object, for a line of the ledger."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> LedgerRow:
        """Rebuild from `to_json`; other keys of the line are ignored. Raises KeyError."""
        return cls(**{name: body[name] for name in cls.__slots__})

    @classmethod
    def from_metric_row(cls, row: Mapping[str, Any]) -> LedgerRow:
        """From a run's metric row, whose `step` counts completed steps: one more than ours."""
        return cls.from_json({**row, "step": row["step"] - 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """Result of an audit. Spans are (epoch, lo, hi); problems are sentences."""

    num_steps: int
    num_samples: int
    num_epochs: int
    lost: tuple[tuple[int, int, int], ...]
    repeated: tuple[tuple[int, int, int], ...]
    rolled_back: tuple[LedgerRow, ...]
    problems: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """True if every sample was consumed exactly once per epoch as far as the run came."""
        return not (self.lost or self.repeated or self.problems)


def ids_digest(ids: Ints) -> str:
    """xxh3_64 of the ids as little-endian int64, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(ids, dtype="<i8").data)


def surviving(rows: Iterable[LedgerRow]) -> tuple[list[LedgerRow], list[LedgerRow]]:
    """(rows of the surviving line by step, rows rolled back). A repeated equal row counts once."""
    line: list[LedgerRow] = []
    gone: list[LedgerRow] = []
    for row in sorted(dict.fromkeys(rows), key=lambda row: (row.generation, row.step)):
        while line and line[-1].step >= row.step and line[-1].generation < row.generation:
            gone.append(line.pop())
        line.append(row)
    return line, gone


def audit(
    rows: Iterable[LedgerRow],
    dataset_rows: int,
    epochs: int | None = None,
    *,
    dropped_per_epoch: int = 0,
    sample_ids: Callable[[int], Ints] | None = None,
) -> AuditReport:
    """Prove that the surviving line consumed each sample once per epoch, or say where not.

    epochs: how many whole epochs there must be (None: as far as the rows reach).
    dropped_per_epoch: rows left out at each epoch's end by tail "drop".
    sample_ids: `Loader.sample_ids`; recomputes the ids of every step (slower, complete).
    """
    line, gone = surviving(rows)
    used_rows = dataset_rows - dropped_per_epoch
    lost, repeated = _coverage(line, used_rows, epochs)
    problems = _step_problems(line)
    if sample_ids is not None:
        problems += _digest_problems(line, sample_ids)
    end = max((row.epoch * used_rows + row.hi for row in line), default=0)
    return AuditReport(
        num_steps=len(line),
        num_samples=sum(row.hi - row.lo for row in line),
        num_epochs=end // used_rows,
        lost=tuple(_by_epoch(lost, used_rows)),
        repeated=tuple(_by_epoch(repeated, used_rows)),
        rolled_back=tuple(sorted(gone, key=lambda row: (row.step, row.generation))),
        problems=tuple(problems),
    )


Span = tuple[int, int]


def _coverage(
    line: list[LedgerRow], used_rows: int, epochs: int | None
) -> tuple[list[Span], list[Span]]:
    """Gaps and overlaps of the line's spans over the stream of epochs laid end to end."""
    spans = sorted((row.epoch * used_rows + row.lo, row.epoch * used_rows + row.hi) for row in line)
    lost, repeated, reached = [], [], 0
    for lo, hi in spans:
        if lo > reached:
            lost.append((reached, lo))
        if lo < reached:
            repeated.append((lo, min(hi, reached)))
        reached = max(reached, hi)
    if epochs is not None and reached < epochs * used_rows:
        lost.append((reached, epochs * used_rows))
    return lost, repeated


def _by_epoch(spans: list[Span], used_rows: int) -> list[tuple[int, int, int]]:
    """Stream spans cut at epoch ends."""
    out = []
    for lo, hi in spans:
        while lo < hi:
            epoch, start = divmod(lo, used_rows)
            end = min(hi, (epoch + 1) * used_rows)
            out.append((epoch, start, start + end - lo))
            lo = end
    return out


def _step_problems(line: list[LedgerRow]) -> list[str]:
    problems = []
    for number, row in enumerate(line):
        before = line[number - 1].step if number else -1
        if row.step == before:
            problems.append(f"step {row.step} has two rows in generation {row.generation}")
        elif row.step != before + 1:
            problems.append(f"no row for steps {before + 1} to {row.step - 1}")
    return problems


def _digest_problems(line: list[LedgerRow], sample_ids: Callable[[int], Ints]) -> list[str]:
    return [
        f"step {row.step} consumed other samples than the order says (digest {row.digest})"
        for row in line
        if ids_digest(sample_ids(row.step)) != row.digest
    ]
