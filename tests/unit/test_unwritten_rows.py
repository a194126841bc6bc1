"""Rows beside a snapshot: their text and its checksum are right whatever is added and forgotten."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import pytest

from relit_platform.worker import unwritten_rows as module
from relit_platform.worker.known_texts import KnownTexts, NotFixedError
from relit_platform.worker.unwritten_rows import ROWS_IN_EXTRAS, UnwrittenRows, row_text


def steps_in(rows: UnwrittenRows) -> list[int]:
    """Of the text, once it is known to have the checksum that it claims."""
    text, crc = rows.text()
    assert crc == zlib.crc32(bytes(text))
    found = json.loads(bytes(text) + b"]}")["rows"]
    assert found == rows.newest()
    return [row["step"] for row in found]


@pytest.mark.parametrize("seed", range(8))
def test_the_text_is_that_of_the_newest_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_IN_EXTRAS", 12)
    monkeypatch.setattr(module, "ROWS_DROPPED", 3)
    draw, rows, step, first = random.Random(seed), UnwrittenRows(), 0, 1
    for _ in range(150):
        kind = draw.choice(["append"] * 4 + ["forget", "merge"])
        if kind == "append":
            step += 1
            rows.append({"step": step, "x": "é" * draw.randrange(4)})
        elif kind == "forget":
            first = max(first, draw.randrange(step + 1) + 1)
            rows.forget(first - 1)
        else:
            step = draw.randrange(step + 1)
            first = min(first, step + 1)
            rows.merge([{"step": number} for number in range(first, step + 1)], step)
        found = steps_in(rows)
        assert found == list(range(step - len(found) + 1, step + 1))
        assert len(found) <= 12 and len(found) >= min(9, max(0, step - first + 1))
        assert [row["step"] for row in rows.after(step - 2)] == [
            number for number in (step - 1, step) if number >= max(first, 1)
        ]


def test_while_the_store_is_away_snapshots_hold_a_bounded_number() -> None:
    rows = UnwrittenRows()
    for step in range(1, 3 * ROWS_IN_EXTRAS):
        rows.append({"step": step})
        if step % 100 == 0:
            assert len(steps_in(rows)) <= ROWS_IN_EXTRAS
    assert rows.oldest == 1 and len(rows.after(0)) == 3 * ROWS_IN_EXTRAS - 1
    assert steps_in(rows)[-1] == 3 * ROWS_IN_EXTRAS - 1


ROW: dict[str, Any] = {
    "step": 7, "loss": 0.1, "at_s": 1764489600.1234, "epoch": 0, "lo": 32, "hi": 64,
    "samples": 32, "digest": "00ff", "world": 2, "generation": 3,
}  # fmt: skip
ROWS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "plain": ({}, {}),
    "a loss that is no number": ({"loss": float("nan")}, {}),
    "an infinite loss": ({"loss": float("-inf")}, {}),
    "a tiny loss": ({"loss": 1e-300}, {}),
    "scalars": ({}, {"lr": 0.1, 'a "name" of é': float("inf")}),
    "a scalar with a name of the row": ({}, {"loss": 4.0, "lr": 0.1}),
}


@pytest.mark.parametrize(("fields", "logged"), ROWS.values(), ids=ROWS.keys())
def test_a_row_is_written_as_json_writes_it(
    fields: dict[str, Any], logged: dict[str, float]
) -> None:
    row = {**ROW, **fields, **logged}
    text = row_text(row if "loss" in logged else {**ROW, **fields}, logged)
    rows = UnwrittenRows()
    rows.append(row, text)
    assert bytes(rows.text()[0]) == b'{"rows":[' + json.dumps(row).encode()
    assert (text is None) == ("loss" in logged)


SETTINGS: dict[str, dict[str, Any]] = {
    "scalars": {"lr": 0.1, "n": 3, "on": True, "off": None, "name": "é"},
    "a tuple": {"betas": (0.9, 0.999), "none": ()},
    "no number": {"lr": float("nan")},
    "the sign of zero": {"lr": -0.0},
    "large": {"n": 1 << 80, "x": 1e300},
}


@pytest.mark.parametrize("data", SETTINGS.values(), ids=SETTINGS.keys())
def test_known_texts_are_those_of_json(data: dict[str, Any]) -> None:
    texts = KnownTexts()
    for step in range(3):
        now = {**data, "step": 1000 + step, "half": step / 2, "params": [1]}
        expected = json.dumps({key: its for key, its in now.items() if key != "params"})
        assert texts.of(now, but="params") == expected[1:-1]


@pytest.mark.parametrize(
    "data", [{"x": [1]}, {"x": {}}, {"x": (1, [2])}, {1: 2}, {"$t": 1}, {"x": object()}]
)
def test_what_can_change_unseen_has_no_known_text(data: dict[Any, Any]) -> None:
    with pytest.raises(NotFixedError):
        KnownTexts().of(data)


def test_an_equal_value_of_another_type_is_another_text() -> None:
    texts = KnownTexts()
    found = [texts.of({"x": value}) for value in (1, True, 1.0, 0.0, -0.0)]
    assert found == ['"x": 1', '"x": true', '"x": 1.0', '"x": 0.0', '"x": -0.0']
