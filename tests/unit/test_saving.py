"""Saves of which a part is copied beside the next pass: what counts, when, and what is told."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from looping import STEPS, BreakingMember, train
from safetensors.torch import load
from torch import Tensor, nn

from relit_platform.facts import Fact
from relit_platform.node.slots import Slot, SlotState, create_slot
from relit_platform.run_config import CheckpointConfig
from relit_platform.worker.context import RankContext, call_train
from relit_platform.worker.drill import Drill
from relit_platform.worker.local import LocalRecorder, local_run
from relit_platform.worker.saving import Saver
from relit_platform.worker.staging import BackgroundCopy
from relit_platform.worker.state_tree import flatten


class Link:
    """Agent and manager at once: gives slots, keeps what it is told."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self.slots: list[str] = []
        self.calls: list[tuple[Any, ...]] = []

    def call(self, method: str, *args: Any) -> Any:
        assert method == "open_slots"
        _, count, image_bytes, extras = args
        paths = [str(self._folder / f"{next(self._numbers)}.slot") for _ in range(count)]
        for path in paths:
            create_slot(path, image_bytes, extras)
        self.slots += paths
        return paths

    def send(self, method: str, *args: Any) -> None:
        self.calls.append((method, *args))

    def told(self, kind: str) -> list[dict[str, Any]]:
        facts = [call[1] for call in self.calls if isinstance(call[1], Fact)]
        return [fact.data for fact in facts if fact.kind == kind]

    @property
    def persists(self) -> list[int]:
        return [call[3] for call in self.calls if call[0] == "persist"]


class Rank:
    """A small training loop around a real Saver, one boundary at a time."""

    def __init__(self, folder: Path, **config: Any) -> None:
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 8)
        self.model = nn.Sequential(self.linear, nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.weight: Tensor = self.linear.weight
        self.objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.link = Link(folder)
        checkpoint = CheckpointConfig(**{"staging": "overlap", "memory_every_steps": 1, **config})
        self.saver = Saver(checkpoint, "w", self.link, self.link)  # type: ignore[arg-type]
        self.saver.bind(self.objects)
        self.member = SimpleNamespace(rank=0, world=1, generation=1, step=0)
        self.boundary: dict[int, dict[str, Tensor]] = {}

    def step(self, between: Callable[[], object] = lambda: None, *, to_disk: bool = False) -> None:
        """Forward, backward, settle, update, save; `between` happens ahead of the forward."""
        between()
        self.model(torch.randn(16, 4)).square().mean().backward()
        self.saver.settle(self.member)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.save(to_disk=to_disk)

    def save(self, *, to_disk: bool = False, last: bool = False) -> None:
        self.member.step += 1
        tensors, _ = flatten(self.objects)
        self.boundary[self.member.step] = {name: t.clone() for name, t in tensors.items()}
        self.saver.save(
            self.member, lambda skeleton: b"{}", self.member.step, to_disk=to_disk, last=last
        )

    def whole(self) -> dict[int, dict[str, Tensor]]:
        return whole_slots(self.link.slots)


def whole_slots(paths: list[str]) -> dict[int, dict[str, Tensor]]:
    """Step and tensors of every COMPLETE slot."""
    found = {}
    for path in paths:
        slot = Slot.open(path)
        if slot.info().state is SlotState.COMPLETE:
            found[slot.info().step] = load(bytes(slot.image))
        slot.close()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.saver.close()


def check(rank: Rank, newest: int) -> None:
    """Every whole slot holds its boundary's state bit for bit, and the newest is this one."""
    whole = rank.whole()
    assert max(whole) == newest
    for step, tensors in whole.items():
        assert_same(tensors, rank.boundary[step])


def test_slots_hold_their_boundary_though_the_loop_went_on(rank: Rank) -> None:
    for step in range(1, 13):
        rank.step()
        if step > 1:
            rank.saver.settle(rank.member)
            check(rank, step)
            assert rank.saver.memory_step == step
    assert rank.link.told("ckpt.staging") == [] and rank.link.told("ckpt.skipped") == []


def test_a_process_that_ends_before_it_settles_has_left_the_newest_step(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copying thread commits by itself: here nobody settles after step 3."""
    for _ in range(3):
        rank.step()
    rank.saver.close()  # waits for the thread, asks for nothing
    check(rank, 3)


def test_until_the_copy_is_over_the_step_before_is_the_newest(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        rank.step()
    rank.saver.settle(rank.member)
    with monkeypatch.context() as patch:
        patch.setattr(BackgroundCopy, "_copy", _die)
        rank.step()
        rank.saver.settle(rank.member)
    check(rank, 2)
    assert "the copy failed: torn" in rank.link.told("ckpt.skipped")[0]["reason"]
    rank.step()
    rank.saver.settle(rank.member)
    check(rank, 4)


def _die(*_: Any) -> None:
    raise RuntimeError("torn")


def test_disk_is_asked_for_as_soon_as_the_snapshot_is_whole(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        rank.step()
    go, copy = threading.Event(), BackgroundCopy._copy
    monkeypatch.setattr(BackgroundCopy, "_copy", lambda *what: go.wait(30) and copy(*what))
    rank.step(to_disk=True)
    assert rank.link.persists == []
    go.set()
    rank.saver.close()  # nobody settles
    assert rank.link.persists == [3]
    pinned = [path for path in rank.link.slots if Slot.open(path).info().pinned]
    assert [Slot.open(path).info().step for path in pinned] == [3]


def test_the_agent_hears_of_a_copy_that_begins_if_it_is_due_on_disk(rank: Rank) -> None:
    looks = {1, 2, 4}  # copied at once
    for step in range(1, 8):
        rank.step(to_disk=step != 6)
        rank.saver.settle(rank.member)
        for path in rank.link.slots:  # as the agent does
            Slot.open(path).unpin()
    told = [call for call in rank.link.calls if call[0].startswith("persist")]
    begun = [(at, call) for at, call in enumerate(told) if call[0] == "persist_growing"]
    assert [call[3] for _, call in begun] == sorted({1, 2, 3, 4, 5, 7} - looks)
    for at, (_, *what) in begun:
        following = [call for call in told[at:] if call[0] == "persist" and call[3] == what[2]]
        assert following[0][1:5] == tuple(what)  # the same slot and place, once it is whole


def test_the_last_save_is_whole_at_once(rank: Rank) -> None:
    for _ in range(3):
        rank.step()
    rank.save(last=True)
    check(rank, 4)
    assert rank.link.persists == [4]
    assert "persist_growing" not in [call[0] for call in rank.link.calls]


def test_a_new_generation_settles_first_and_then_holds_its_own(rank: Rank) -> None:
    for step in range(1, 4):
        rank.step(to_disk=step == 3)
    rank.member.generation = 2
    rank.saver.rejoined(rank.member, lambda skeleton: b"{}")
    slots = [Slot.open(path).info() for path in rank.link.slots]
    assert [(s.step, s.generation) for s in slots if s.generation == 2] == [(3, 2)]
    assert rank.link.persists == [3]


def _past_autograd(rank: Rank) -> Callable[[], object]:
    return lambda: rank.weight.data.clamp_(-0.01, 0.01)


def _with_autograd(rank: Rank) -> Callable[[], object]:
    def clamp() -> None:
        with torch.no_grad():
            rank.weight.clamp_(-0.01, 0.01)

    return clamp


@pytest.mark.parametrize("write", [_past_autograd, _with_autograd])
def test_a_loop_that_writes_ahead_of_its_forward_never_leaves_a_mixed_snapshot(
    rank: Rank, write: Callable[[Rank], Callable[[], object]]
) -> None:
    for _ in range(10):
        rank.step(write(rank))
    rank.save(last=True)
    check(rank, 11)
    (warning,) = rank.link.told("ckpt.staging")
    assert warning["staging"] == "sync" and "model.0.weight" in warning["reason"]


def test_a_write_that_begins_later_is_found_and_that_snapshot_does_not_count(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(7):  # 5, 6 and 7 are no looks, 8 is one, 9 is none
        rank.step()
    rank.saver.settle(rank.member)
    weight = rank.weight
    copy = BackgroundCopy._copy

    def late(self: BackgroundCopy, *what: Any) -> None:
        copy(self, *what)
        with torch.no_grad():
            weight.add_(1.0)  # as another thread of the loop's might

    monkeypatch.setattr(BackgroundCopy, "_copy", late)
    rank.save()
    rank.save()
    rank.saver.settle(rank.member)
    assert 9 not in rank.whole()
    assert "outside the update" in rank.link.told("ckpt.staging")[0]["reason"]
    weight_before = weight.clone()
    rank.step()
    check(rank, 10)
    assert not torch.equal(weight, weight_before)


def test_weights_that_are_exchanged_for_a_while_are_found_at_any_step(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaged weights for an evaluation, past autograd, and back before the update."""
    for _ in range(4):
        rank.step()
    rank.saver.settle(rank.member)
    go, copy = threading.Event(), BackgroundCopy._copy
    monkeypatch.setattr(BackgroundCopy, "_copy", lambda *what: go.wait(30) and copy(*what))
    rank.save()  # the fifth is no look
    trained = rank.weight.data.clone()
    rank.weight.data.mul_(0.5)
    go.set()
    rank.saver.settle(rank.member)
    rank.weight.data.copy_(trained)
    check(rank, 4)
    assert "model.0.weight was changed" in rank.link.told("ckpt.staging")[0]["reason"]
    rank.step()
    check(rank, 6)


@pytest.mark.parametrize("staging", ["auto", "sync"])
def test_small_states_and_sync_are_whole_at_each_boundary(tmp_path: Path, staging: str) -> None:
    rank = Rank(tmp_path, staging=staging)
    for step in range(1, 6):
        rank.step()
        check(rank, step)
    rank.saver.close()


def test_memory_cadence_and_skips_are_as_without_overlap(tmp_path: Path) -> None:
    rank = Rank(tmp_path, memory_every_steps=3)
    for _ in range(10):
        rank.step()
    rank.saver.settle(rank.member)
    assert sorted(rank.whole()) == [3, 6, 9]
    for path in rank.link.slots:
        slot = Slot.open(path)
        slot.pin()
        slot.close()
    for _ in range(2):
        rank.step()
    assert "no free slot" in rank.link.told("ckpt.skipped")[0]["reason"]
    rank.saver.close()


# ---- under the real loop ----


@dataclass(slots=True)
class SavingRecorder(LocalRecorder):
    """A LocalRecorder whose steps are saved by a real Saver, and which looks at every slot."""

    saver: Any = None
    link: Any = None
    boundary: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def bind(self, objects: Any) -> None:
        LocalRecorder.bind(self, objects)
        self.saver.bind(objects)

    def settle(self, member: Any) -> None:
        """Afterwards the newest slot is the newest boundary's, bit for bit."""
        self.saver.settle(member)
        if member.step:
            whole = whole_slots(self.link.slots)
            assert max(whole) == member.step
            for step, tensors in whole.items():
                assert_same(tensors, self.boundary[step])
                self.seen.add(step)

    def completed(self, **fields: Any) -> None:
        LocalRecorder.completed(self, **fields)
        member = fields["member"]
        tensors, _ = flatten(self.objects)
        self.boundary[member.step] = {name: t.clone() for name, t in tensors.items()}
        last = fields["final"]
        self.saver.save(member, lambda s: b"{}", member.step, to_disk=False, last=last)


@pytest.mark.parametrize("visits", [(), (1,), (4, 5, 6), (2, 3, 9)])
@pytest.mark.parametrize("micro", [None, 3])
def test_the_loop_settles_before_anything_changes_the_state(
    tmp_path: Path, visits: tuple[int, ...], micro: int | None
) -> None:
    link = Link(tmp_path)
    saver = Saver(CheckpointConfig(staging="overlap"), "w", link, link)  # type: ignore[arg-type]
    recorder = SavingRecorder(saver=saver, link=link)
    run = RankContext(
        member=BreakingMember(visits=visits), recorder=recorder, drill=Drill((), ""), seed=3,  # type: ignore[arg-type]
        device=torch.device("cpu"),
    )  # fmt: skip
    value = call_train(train, run, {"micro": micro} if micro else {})
    saver.close()
    calm = local_run(train, {"micro": micro} if micro else {}, seed=3)
    assert value == calm.value
    assert [row["loss"] for row in recorder.rows] == [row["loss"] for row in calm.rows]
    assert set(range(1, STEPS)) <= recorder.seen
    assert max(whole_slots(link.slots)) == STEPS
    assert link.told("ckpt.staging") == [] and link.told("ckpt.skipped") == []
