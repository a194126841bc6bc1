"""The book of metric rows: what a new supervisor changes, and the speed that it shows."""

from __future__ import annotations

from relit_platform.control.row_book import RowBook
from relit_platform.facts import RowBatch
from relit_platform.machines.lineage import Lineage


def give(book: RowBook, generation: int, first: int, at_s: float) -> None:
    """Four rows of ten samples, a tenth of a second apart."""
    rows = tuple(
        {"step": first + k, "loss": 0.5, "samples": 10, "at_s": at_s + k / 10} for k in range(4)
    )
    batch = RowBatch(generation=generation, rank=0, rows=rows)
    book.take(batch, Lineage(((1, 0), (2, 4))), at_s)


def test_downtime_is_no_part_of_the_speed() -> None:
    book = RowBook()
    assert book.rate("samples") is None
    give(book, 1, first=1, at_s=0.0)
    assert round(book.rate("samples") or 0) == 100
    give(book, 2, first=5, at_s=60.0)
    assert round(book.rate("samples") or 0) == 100


def test_the_step_does_not_go_back_when_rows_are_asked_for_again() -> None:
    book = RowBook()
    give(book, 1, first=1, at_s=0.0)
    book.resume(last_row_step=2)
    assert (book.newest, book.needed_after) == (4, 2)
