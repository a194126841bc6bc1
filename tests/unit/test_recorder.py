"""Metric rows at a rank: with every snapshot until they are written, and sent until they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from relit_platform.errors import PlatformError
from relit_platform.facts import RowBatch
from relit_platform.node.heartbeat import ControlPage, HeartbeatPage
from relit_platform.node.slots import Slot, create_slot
from relit_platform.run_config import CheckpointConfig, RunConfig
from relit_platform.worker import recorder as recorder_module
from relit_platform.worker.recorder import Recorder
from relit_storage.data.ledger import LedgerRow
from relit_storage.stores.memory import MemoryStore


class Link:
    """Agent and manager: gives slots, keeps batches, answers `rows` with `written`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batches: list[RowBatch] = []
        self.written: int | None = 0
        self.spacing_s = 0.0
        self.finished: list[bool] = []
        self.slots: list[str] = []
        self.calls: list[tuple[Any, ...]] = []

    def call(self, method: str, *args: Any, **_: Any) -> Any:
        if method == "open_slots":
            _, count, image_bytes, extras = args
            self.slots = [str(self.folder / f"{i}.slot") for i in range(count)]
            for path in self.slots:
                create_slot(path, image_bytes, extras)
            return self.slots
        return self.send(method, *args)

    def send(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        if method == "finished" and self.finished:
            return self.finished.pop(0)
        if method == "spacing":
            return self.spacing_s
        if method == "rows":
            self.batches.append(args[0])
        return self.written

    def answered(self, ref: Any) -> tuple[bool, Any]:
        return True, ref

    def sent(self) -> list[list[int]]:
        return [[row["step"] for row in batch.rows] for batch in self.batches]


class Bench:
    """A recorder of rank 0 whose clock stands still."""

    def __init__(self, folder: Path, **checkpoint: Any) -> None:
        HeartbeatPage.create(str(folder / "beat"), 1).close()
        ControlPage.create(str(folder / "control")).close()
        self.link = Link(folder)
        self.member = SimpleNamespace(rank=0, world=1, generation=1, step=0, entered=True)
        self.recorder = Recorder(
            config=RunConfig(
                run_id="r",
                name="r",
                experiment="e",
                store="memory://x",
                run_key="r",
                entry="",
                code_key="",
                code_sha="",
                checkpoint=CheckpointConfig(**{"disk_every_steps": 0, **checkpoint}),
            ),
            worker_id="w",
            store=MemoryStore(),
            agent=self.link,  # type: ignore[arg-type]
            manager=self.link,  # type: ignore[arg-type]
            heartbeat_path=str(folder / "beat"),
            control_path=str(folder / "control"),
        )
        self.recorder.place(0, 1, 0)
        self.recorder.bind({"weights": (lambda: {"w": torch.ones(3)}, lambda state: None)})

    def complete(self, steps: int = 1, **logged: float) -> Bench:
        for _ in range(steps):
            step, self.member.step = self.member.step, self.member.step + 1
            row = LedgerRow(
                step=step, epoch=0, lo=step, hi=step + 1, world=1, generation=1, digest="d"
            )
            self.recorder.completed(
                member=self.member,
                ledger=row,
                loss=0.5,
                logged=logged,
                cursor={"step": step},
                final=False,
                stopping=False,
                agreed=self.recorder.votes(),
            )
        return self

    def persists(self) -> list[tuple[int, int]]:
        """(step, generation) that the agent was asked to persist."""
        return [call[3:5] for call in self.link.calls if call[0] == "persist"]

    def extras(self) -> Any:
        """What lies beside the newest snapshot."""
        slots = [Slot.open(path) for path in self.link.slots]
        newest = max(slots, key=lambda slot: slot.info().step)
        return json.loads(newest.read_extras())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(recorder_module, "SHIP_EVERY_S", 0.0)  # at every step
    bench = Bench(tmp_path)
    yield bench
    bench.recorder.close()


def test_a_snapshot_holds_the_rows_that_are_not_written(bench: Bench) -> None:
    bench.complete(3)
    assert [row["step"] for row in bench.extras()["rows"]] == [1, 2, 3]
    bench.link.written = 2
    bench.complete(3)  # asked with the first, heard with the second, in the snapshot of the third
    assert [row["step"] for row in bench.extras()["rows"]] == [3, 4, 5, 6]
    assert bench.link.sent() == [[1], [2], [3], [4], [5], [6]]


def test_the_last_step_is_saved_once_in_each_generation(bench: Bench) -> None:
    bench.complete(2)
    for generation in (1, 1, 2):
        bench.member.generation = generation
        bench.recorder.save_last(bench.member, {"step": 2})
    assert bench.persists() == [(2, 1), (2, 2)]


@pytest.fixture
def by_metric(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, disk_on_metric=True, metric="val", disk_every_steps=4)
    yield bench
    bench.recorder.close()


def test_the_step_that_measured_best_is_persisted_from_its_own_snapshot(by_metric: Bench) -> None:
    bench = by_metric
    bench.complete(val=0.5).complete()
    assert bench.persists() == [(1, 1)]
    asked = next(call for call in bench.link.calls if call[0] == "persist")
    assert Slot.open(asked[2]).info().step == 1, "not that of the step after it"
    bench.complete(val=0.4).complete().complete(val=0.9).complete()
    assert bench.persists() == [(1, 1), (3, 1), (4, 1)]
    assert bench.extras()["cadence"]["best"] == 0.4


def test_a_step_measured_before_a_recovery_is_persisted_by_the_generation_after_it(
    by_metric: Bench,
) -> None:
    bench = by_metric
    bench.complete(val=0.5)
    bench.member.generation = 2
    bench.recorder.rejoined(bench.member, {"step": 1})
    bench.complete()
    assert bench.persists() == [(1, 2)]
    bench.complete(val=0.3)
    bench.member.generation = 3  # and nobody has a snapshot of it in that one
    bench.complete()
    assert bench.persists() == [(1, 2), (4, 3)]


def test_a_step_is_asked_for_once_though_two_reasons_speak_for_it(by_metric: Bench) -> None:
    by_metric.complete(3).complete(val=0.5).complete()
    assert by_metric.persists() == [(4, 1)]


def test_the_text_beside_a_snapshot_is_what_a_broadcast_sends(bench: Bench) -> None:
    bench.complete(2)
    saved = bench.extras()
    assert saved == bench.recorder.extras(bench.member, {"step": 1}, saved["objects"])


@pytest.mark.parametrize("answer", [-1, None], ids=["unknown", "failed"])
def test_without_a_usable_answer_every_row_is_kept(bench: Bench, answer: int | None) -> None:
    bench.link.written = answer
    bench.complete(4)
    assert [row["step"] for row in bench.extras()["rows"]] == [1, 2, 3, 4]


def test_the_first_steps_of_a_generation_are_told_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "SHIP_EVERY_S", 1e6)
    bench.complete(5)
    bench.recorder.place(0, 2, 5)
    bench.complete(5)
    assert bench.link.sent() == [[1], [2], [3], [6], [7], [8]]


def test_rows_that_do_not_get_written_are_sent_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "RESEND_S", -1.0)
    bench.complete(3)
    assert bench.link.sent() == [[1], [1, 2], [1, 2, 3]]


def test_what_was_sent_to_a_manager_that_died_is_sent_again_at_once(bench: Bench) -> None:
    bench.link.written = None  # how a call ends whose actor has ended
    bench.complete(3)
    assert bench.link.sent()[-1] == [1, 2, 3]
    assert {batch.oldest_kept for batch in bench.link.batches} == {1}


def test_a_finished_rank_tells_a_manager_that_knows_no_epoch_again(bench: Bench) -> None:
    bench.link.finished = [False, False, True]
    bench.recorder.finish(bench.member, {"a": 1}, stopped=True)
    told = [call for call in bench.link.calls if call[0] == "finished"]
    assert told == [("finished", "w", 0, '{"a": 1}', True)] * 3


def test_a_rank_that_nobody_hears_ends_as_ours_and_not_as_the_users(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "FINISH_S", -1.0)
    bench.link.finished = [False]
    with pytest.raises(PlatformError, match="epoch"):
        bench.recorder.finish(bench.member, None, stopped=False)


def test_a_finished_rank_hands_over_every_row_that_is_not_written(bench: Bench) -> None:
    bench.complete(3)
    bench.recorder.finish(bench.member, None, stopped=False)
    assert bench.link.sent()[-1] == [1, 2, 3]


def test_rows_of_a_restored_state_end_with_it(bench: Bench) -> None:
    bench.complete(2)
    bench.recorder.adopt({"step": 3, "rows": [{"step": step} for step in (1, 2, 3, 4)]})
    extras = bench.recorder.extras(bench.member, {}, {})
    assert [(row["step"], "loss" in row) for row in extras["rows"]] == [
        (1, True),
        (2, True),
        (3, False),
    ]


@pytest.mark.parametrize(("step", "slots"), [(7, 3), (0, 0)], ids=["mid-run", "at the start"])
def test_a_newcomer_has_a_snapshot_before_its_first_step(
    bench: Bench, step: int, slots: int
) -> None:
    bench.member.step, bench.member.generation = step, 2
    bench.recorder.rejoined(bench.member, {"step": step})
    assert len(bench.link.slots) == slots
    if slots:
        assert bench.extras()["step"] == step and bench.extras()["generation"] == 2


def test_rank_0_votes_for_the_spacing_that_the_manager_advises(tmp_path: Path) -> None:
    bench = Bench(tmp_path, disk_auto=True)
    bench.link.spacing_s = 4.0
    bench.complete(2)  # asked after the first, heard after the second, voted for with the third
    assert bench.extras()["cadence"]["every_s"] == 0.0
    bench.complete()
    assert bench.extras()["cadence"]["every_s"] == 4.0
    bench.recorder.close()


def test_without_auto_nobody_is_asked(bench: Bench) -> None:
    bench.complete(3)
    assert "spacing" not in [call[0] for call in bench.link.calls]


def test_the_agent_is_told_which_save_is_the_last(bench: Bench) -> None:
    bench.complete(2)
    bench.recorder.save_last(bench.member, {"step": 2})
    asked = next(call for call in bench.link.calls if call[0] == "persist")
    assert asked[3:] == (2, 1, True)


def test_a_cut_is_marked_when_all_are_ready_and_then_waited_for(
    bench: Bench, tmp_path: Path
) -> None:
    bench.complete()
    assert bench.recorder.votes()[-1] == 0.0, "there is no other node"
    ControlPage.open(str(tmp_path / "control")).set_peered(True)
    assert bench.recorder.votes()[-1] == 1.0
    slots = [Slot.open(path) for path in bench.link.slots]  # before it refuses a fourth one
    bench.complete()
    [cut] = [slot for slot in slots if slot.cut]
    assert cut.info().step == 2 and bench.recorder.votes()[-1] == 0.0
    bench.complete(4)
    assert cut.info().step == 2 and [slot for slot in slots if slot.cut] == [cut]
    cut.mark_sent(cut.sequence())
    assert bench.recorder.votes()[-1] == 1.0
    bench.complete()
    assert {slot.info().step for slot in slots if slot.cut} == {2, 7}


def test_a_clock_that_is_set_back_stops_no_row(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(recorder_module, "SHIP_EVERY_S", 0.25)
    monkeypatch.setattr(recorder_module, "time", SimpleNamespace(time=lambda: now_s[0]))
    bench.recorder.place(0, 1, 0)
    bench.complete(5)  # the first ones are told at once
    now_s[0] = 400.0
    bench.complete()
    assert bench.link.sent()[-1][-1] == 6
