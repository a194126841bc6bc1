"""Events and rows: strictly numbered, nothing lost to the store, stale writers cut off."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from faulty_store import Fault, FaultyStore, every_call

from relit_storage.errors import FencedError, StoreUnavailableError
from relit_storage.run import segments
from relit_storage.run.event_log import (
    EventReader,
    EventWriter,
    RowWriter,
    read_events,
    read_rows,
)
from relit_storage.run.layout import event_key, metric_key
from relit_storage.stores.memory import MemoryStore


def fact(kind: str, level: str = "info", **data: Any) -> dict[str, Any]:
    return {"kind": kind, "at_s": 1000.5, "src": "manager", "level": level, "data": data}


def writer(store: Any, epoch: int = 1) -> EventWriter:
    return EventWriter(store, "run-1", epoch, 1000.0)


def log(store: Any, epoch: int, *kinds: str) -> EventWriter:
    events = writer(store, epoch)
    for kind in kinds:
        events.append(fact(kind))
    events.flush(0.0)
    return events


def kinds(store: Any, since_seq: int = 0) -> list[tuple[int, str]]:
    return [(event["seq"], event["kind"]) for event in read_events(store, since_seq)]


def test_envelope() -> None:
    store = MemoryStore()
    events = writer(store)
    given = {"generation": 3, "step": 46, **fact("worker.exited", "warning", signal=9)}
    returned = events.append(given)
    assert returned == {
        "v": 1,
        "seq": 1,
        "ts": "1970-01-01T00:16:40.500000Z",
        "t": 0.5,
        "run": "run-1",
        "epoch": 1,
        "gen": 3,
        "step": 46,
        "src": "manager",
        "kind": "worker.exited",
        "level": "warning",
        "data": {"signal": 9},
    }
    assert events.flush(0.0) == 1
    assert read_events(store) == [returned]
    assert store.list("events/") == [event_key(1, 0)]


def test_numbers_go_on_over_segments_and_epochs() -> None:
    store = MemoryStore()
    first = log(store, 1, "a", "b")
    first.append(fact("c"))
    first.flush(1.0)
    log(store, 2, "d")
    log(store, 4, "e")
    assert kinds(store) == [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e")]
    assert kinds(store, since_seq=3) == [(4, "d"), (5, "e")]


def test_stale_epoch_is_cut_where_the_newer_one_begins() -> None:
    store = MemoryStore()
    zombie = log(store, 1, "a", "b")
    log(store, 2, "c2")
    zombie.append(fact("c1"))
    zombie.append(fact("d1"))
    zombie.flush(1.0)
    assert kinds(store) == [(1, "a"), (2, "b"), (3, "c2")]
    log(store, 3, "d3")
    assert kinds(store)[-1] == (4, "d3")


def test_follower_gets_each_event_once() -> None:
    store = MemoryStore()
    reader = EventReader(store)
    assert reader.poll() == []
    events = log(store, 1, "a", "b")
    assert [event["kind"] for event in reader.poll()] == ["a", "b"]
    assert reader.poll() == []
    events.append(fact("c"))
    events.flush(1.0)
    log(store, 2, "d")
    assert [event["kind"] for event in reader.poll()] == ["c", "d"]


def test_two_writers_of_one_epoch_are_told() -> None:
    store = MemoryStore()
    one = log(store, 1, "a")
    log(store, 1, "b")
    one.append(fact("c"))
    with pytest.raises(FencedError):
        one.flush(1.0)


@pytest.mark.parametrize(
    ("tear", "expected"),
    [
        (lambda data: data[: len(data) - 9], [(1, "a"), (2, "b"), (3, "log.refused"), (4, "d")]),
        (lambda data: b"\x00" * 40, [(1, "log.refused"), (4, "d")]),
        (lambda data: data + b"{}\n", [(1, "a"), (2, "b"), (3, "c"), (4, "log.refused"), (4, "d")]),
        (lambda data: b"", [(4, "d")]),
    ],
)
def test_torn_segment_is_reported_and_costs_only_itself(tear: Any, expected: Any) -> None:
    store = MemoryStore()
    events = log(store, 1, "a", "b", "c")
    events.append(fact("d"))
    events.flush(1.0)
    store.put(event_key(1, 0), tear(store.get(event_key(1, 0))))
    assert kinds(store) == expected


def test_foreign_objects_are_left_out() -> None:
    store = MemoryStore()
    log(store, 1, "a")
    for key in ("events/notes.txt", "events/1-2.jsonl", "events/x-000001.jsonl"):
        store.put(key, b'{"seq": 9, "kind": "x"}\n')
    assert kinds(store) == [(1, "a")]


@pytest.mark.parametrize(
    ("levels", "asked_at", "due"),
    [
        ([], [0.0, 9.0], False),
        (["info"], [0.0], False),
        (["info"], [0.0, 1.9], False),
        (["info"], [0.0, 2.0], True),
        (["info", "warning"], [0.0], True),
        (["error"], [0.0], True),
        (["info"] * 3000, [0.0], True),  # more than 256 KiB
    ],
)
def test_when_a_segment_is_due(levels: list[str], asked_at: list[float], due: bool) -> None:
    events = writer(MemoryStore())
    for level in levels:
        events.append(fact("kind", level))
    assert [events.due(now) for now in asked_at][-1] is due


@pytest.mark.parametrize("fault", ["fail", "lost"])  # torn: see the next test
def test_no_event_is_lost_or_doubled_when_a_call_fails(fault: Fault) -> None:
    def scenario(store: FaultyStore) -> None:
        events = writer(store)
        expected = []
        for number in range(4):
            for _ in range(2):
                try:
                    event = events.append(fact(f"k{number}"))
                    expected.append((event["seq"], event["kind"]))
                    break
                except StoreUnavailableError:
                    pass  # only the first append reads the store
            try:
                events.flush(float(number))
            except StoreUnavailableError:
                pass  # the next flush begins with the same bytes
        events.flush(99.0)
        assert kinds(store.inner) == expected

    assert every_call(MemoryStore, scenario, fault) >= 5


def test_a_torn_segment_stops_its_writer_and_not_the_next_epoch() -> None:
    store = FaultyStore(MemoryStore(), "torn", nth=3)
    events = writer(store)
    events.append(fact("a"))
    with pytest.raises(StoreUnavailableError):
        events.flush(0.0)
    with pytest.raises(FencedError):
        events.flush(1.0)
    log(store, 2, "b")
    assert kinds(store) == [(1, "log.refused"), (2, "b")]


def test_failed_writes_are_given_growing_pauses() -> None:
    store = FaultyStore(MemoryStore(), "fail", nth=2)
    events = writer(store)
    events.append(fact("a", "error"))
    assert events.due(10.0)
    with pytest.raises(StoreUnavailableError):
        events.flush(10.0)
    assert not events.due(10.5)
    assert events.due(11.0)
    assert events.flush(11.0) == 1
    assert kinds(store) == [(1, "a")]


def test_what_does_not_fit_is_counted_and_warnings_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relit_storage.run.event_log.MAX_PENDING_BYTES", 1000)
    store = MemoryStore()
    events = writer(store)
    seqs = [events.append(fact("info"))["seq"] for _ in range(9)]
    assert seqs[-1] == 0
    loud = events.append(fact("bad", "error"))
    assert loud["seq"] == max(seqs) + 1
    events.flush(0.0)
    assert events.append(fact("after"))["seq"] == loud["seq"] + 2
    events.flush(1.0)
    overflow = read_events(store)[-2]
    assert (overflow["kind"], overflow["data"]) == ("log.overflow", {"dropped": seqs.count(0)})
    assert [event["seq"] for event in read_events(store)] == list(range(1, loud["seq"] + 3))


def test_data_that_json_does_not_know_becomes_text() -> None:
    store = MemoryStore()
    events = writer(store)
    events.append(fact("odd", value={1, 2}.__class__))
    events.flush(0.0)
    assert read_events(store)[0]["data"] == {"value": "<class 'set'>"}


def test_rows_one_per_step_newest_epoch_first_value() -> None:
    store = MemoryStore()
    for epoch, rows in ((1, [(1, 0.5), (2, 0.25), (2, 9.0)]), (2, [(2, 0.125), (3, math.nan)])):
        written = RowWriter(store, epoch)
        for step, loss in rows:
            assert written.append({"step": step, "loss": loss})
        written.flush(0.0)
    rows_read = read_rows(store)
    assert [(row["step"], row["loss"]) for row in rows_read[:2]] == [(1, 0.5), (2, 0.125)]
    assert math.isnan(rows_read[2]["loss"])
    with pytest.raises(TypeError, match="step"):
        RowWriter(store, 3).append({"step": "4"})


def test_rows_skip_torn_lines_and_keep_losses_bit_for_bit() -> None:
    store = MemoryStore()
    rows = RowWriter(store, 1)
    loss = 0.1 + 0.2
    rows.append({"step": 1, "loss": loss})
    assert not rows.due(0.0)
    assert rows.due(2.0)
    rows.flush(2.0)
    store.put(metric_key(1, 1), b'{"step": 2, "lo')
    assert read_rows(store) == [{"step": 1, "loss": loss}]


def test_full_row_writer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_PENDING_BYTES", 100)
    rows = RowWriter(MemoryStore(), 1)
    assert [rows.append({"step": step, "pad": "x" * 30}) for step in range(3)] == [
        True,
        True,
        False,
    ]


def test_many_segments_are_read_in_order() -> None:
    store = MemoryStore()
    for number in range(40):
        line = json.dumps({"seq": number + 1, "kind": f"k{number}"})
        store.put(event_key(1, number), line.encode() + b"\n")
    assert [seq for seq, _ in kinds(store)] == list(range(1, 41))


@pytest.mark.parametrize("field", [b'"t":"x"', b'"t":[1]', b'"data":5', b'"a":' + b"[" * 50_000])
def test_a_line_with_the_wrong_types_is_refused(field: bytes) -> None:
    store = MemoryStore()
    store.put(event_key(1, 0), b'{"seq":1,"kind":"a",' + field + b"}\n")
    assert [event["kind"] for event in read_events(store)] == ["log.refused"]


def test_of_a_step_that_was_done_again_the_newer_generation_counts() -> None:
    store = MemoryStore()
    writer = RowWriter(store, 1)
    for generation, step, loss in ((1, 5, 0.5), (1, 6, 0.6), (2, 6, 0.7), (2, 6, 0.8), (1, 5, 0.9)):
        writer.append({"step": step, "generation": generation, "loss": loss})
    writer.flush(0.0)
    assert [(row["step"], row["loss"]) for row in read_rows(store)] == [(5, 0.5), (6, 0.7)]
