"""The audit finds every lost, repeated or foreign sample, and nothing in a run that is exact."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relit_storage.data.ledger import LedgerRow, audit, ids_digest, surviving

ROWS, BATCH = 10, 4  # under carry a step covers an epoch's end every few steps


def ids(step: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """What the order function would say: here simply the stream of epochs."""
    return np.arange(step * BATCH, (step + 1) * BATCH, dtype=np.int64) % ROWS


def row(step: int, generation: int = 1, **changes: int | str) -> LedgerRow:
    epoch, lo = divmod(step * BATCH, ROWS)
    digest = ids_digest(ids(step))
    made = LedgerRow(
        step=step, epoch=epoch, lo=lo, hi=lo + BATCH, world=2, generation=generation, digest=digest
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_an_undisturbed_run_is_exact() -> None:
    report = audit([row(step) for step in range(10)], ROWS, epochs=4, sample_ids=ids)
    assert report.exact and report.problems == ()
    assert (report.num_steps, report.num_samples, report.num_epochs) == (10, 40, 4)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=6), st.randoms())
@settings(max_examples=150, deadline=None)
def test_any_rollbacks_leave_an_exact_line(lives: list[tuple[int, int]], random: object) -> None:
    rows, at, written = [], 0, 0
    for generation, (back, more) in enumerate(lives, start=1):
        at = max(0, at - back)
        rows += [row(step, generation) for step in range(at, at + more)]
        at, written = at + more, written + more
    random.shuffle(rows)  # type: ignore[attr-defined]
    report = audit(rows, ROWS, sample_ids=ids)
    assert report.exact and report.num_steps == at
    assert len(report.rolled_back) == written - at


def test_a_rollback_cancels_later_steps_even_if_they_are_not_redone() -> None:
    line, gone = surviving([row(0), row(1), row(2), row(3), row(1, 2)])
    assert [(kept.step, kept.generation) for kept in line] == [(0, 1), (1, 2)]
    assert sorted(kept.step for kept in gone) == [1, 2, 3]


def test_a_row_sent_twice_counts_once() -> None:
    assert audit([row(0), row(1), row(1), row(0)], ROWS).exact


FAULTS: list[tuple[str, list[LedgerRow], dict[str, object]]] = [
    ("step missing", [row(0), row(2)], {"lost": ((0, 4, 8),), "problems": "steps 1 to 1"}),
    ("missing over an epoch's end", [row(0), row(1), row(3)], {"lost": ((0, 8, 10), (1, 0, 2))}),
    ("beginning missing", [row(1)], {"lost": ((0, 0, 4),), "problems": "steps 0 to 0"}),
    ("samples twice", [row(0), row(1, lo=2)], {"repeated": ((0, 2, 4),)}),
    ("samples skipped", [row(0), row(1, lo=5)], {"lost": ((0, 4, 5),)}),
    ("other samples", [row(0), row(1, digest="0" * 16)], {"problems": "step 1 consumed other"}),
    ("two rows for a step", [row(0), row(0, digest="1")], {"problems": "has two rows"}),
]


@pytest.mark.parametrize(("rows", "found"), [case[1:] for case in FAULTS], ids=lambda _: "")
def test_faults_are_found(rows: list[LedgerRow], found: dict[str, object]) -> None:
    report = audit(rows, ROWS, sample_ids=ids)
    assert not report.exact
    assert report.lost == found.get("lost", ())
    if "repeated" in found:
        assert report.repeated == found["repeated"]
    assert str(found.get("problems", "")) in " ".join(report.problems)


def test_epochs_that_were_not_finished_are_lost_samples() -> None:
    rows = [row(0), row(1)]
    assert audit(rows, ROWS).exact
    assert audit(rows, ROWS, epochs=1).lost == ((0, 8, 10),)
    assert audit(rows, ROWS, epochs=1, dropped_per_epoch=2).exact
    assert audit([], ROWS, epochs=1).lost == ((0, 0, 10),)
    assert audit([], ROWS).exact


def test_json_round_trip_ignores_other_keys() -> None:
    body = row(3, 2).to_json()
    assert LedgerRow.from_json(body | {"loss": 1.0}) == row(3, 2)
    assert LedgerRow.from_metric_row(body | {"step": 4}) == row(3, 2)
    with pytest.raises(KeyError, match="digest"):
        LedgerRow.from_json({key: value for key, value in body.items() if key != "digest"})


def test_digest_depends_on_ids_and_order() -> None:
    digests = [ids_digest(np.array(values)) for values in ([], [1, 2], [2, 1], [1, 3])]
    assert len(set(digests)) == 4 and all(len(digest) == 16 for digest in digests)
    assert ids_digest(np.array([1, 2], np.int32)) == digests[1]
