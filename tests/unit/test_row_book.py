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
    book.resume(last_row_step=2, rows_whole_to=2)
    assert (book.newest, book.needed_after) == (4, 2)


def test_a_hole_in_what_is_written_is_asked_for_again() -> None:
    """A manager died with rows 3 and 4, its supervisor wrote 5 to 8 and died, too."""
    book = RowBook()
    book.resume(last_row_step=8, rows_whole_to=2)
    assert (book.newest, book.needed_after) == (8, 2)
    give(book, 2, first=9, at_s=0.0)
    assert book.needed_after == 2  # ranks keep what they have from 3 on
    give(book, 2, first=5, at_s=1.0)
    give(book, 1, first=1, at_s=2.0)
    assert book.needed_after == 12


def test_what_no_rank_has_any_more_is_not_waited_for() -> None:
    book = RowBook()
    book.resume(last_row_step=8, rows_whole_to=2)
    assert book.skip_lost(oldest_kept=3) is None
    assert book.skip_lost(oldest_kept=0) is None  # it has none, or sends none
    lost = book.skip_lost(oldest_kept=6)
    assert lost == ("rows.lost", "warning", {"step": 3, "before": 6})
    assert book.needed_after == 5


def test_a_run_that_begins_at_another_ones_step_lacks_no_row() -> None:
    """Whatever the number of its first generation: an import has used some."""
    book = RowBook()
    book.take(RowBatch(generation=3, rank=0, rows=()), Lineage(((3, 40),)), 0.0)
    assert book.skip_lost(oldest_kept=41) is None
    assert book.needed_after == 40


def test_only_what_is_missing_is_said_to_be_lost() -> None:
    book = RowBook()
    book.resume(last_row_step=20, rows_whole_to=2, rows_again_at=5)
    assert book.skip_lost(oldest_kept=15) == ("rows.lost", "warning", {"step": 3, "before": 5})
    book = RowBook()
    give(book, 1, first=1, at_s=0.0)
    book.resume(last_row_step=0, rows_whole_to=0)  # on their way to a supervisor that died
    assert book.skip_lost(oldest_kept=4) is None
    assert book.needed_after == 3


def test_a_hole_before_a_rollback_does_not_hide_it() -> None:
    """Rows 3 and 4 come late; 7 and 8 are of the line that was left."""
    book = RowBook()
    line = Lineage(((1, 0),))
    for first in (1, 5):
        rows = tuple({"step": step, "loss": 0.5} for step in range(first, first + 4) if step != 3)
        book.take(RowBatch(generation=1, rank=0, rows=rows), line, 0.0)
    assert book.needed_after == 2
    book.rewind(6)
    line = line.started(2, 6)
    book.take(
        RowBatch(generation=2, rank=0, rows=({"step": 3, "loss": 0.5, "generation": 1},)), line, 0.0
    )
    assert book.needed_after == 6
    book.take(RowBatch(generation=2, rank=0, rows=({"step": 7, "loss": 0.5},)), line, 0.0)
    assert book.needed_after == 7
