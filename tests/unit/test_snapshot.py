"""Snapshots: what is copied, into which slot, and what happens when there is none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from relit_platform.errors import BudgetError
from relit_platform.node.slots import Slot, SlotState, create_slot
from relit_platform.worker.ownership import owned
from relit_platform.worker.snapshot import NUM_SLOTS, SnapshotResult, Snapshotter
from relit_storage.checkpoint.image import TensorSpec, parse_header


class Agent:
    """The node's agent as far as slots go: real slot files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[str] = []
        self.released: list[str] = []
        self.refuse = False
        self.asked = 0

    def open_slots(self, count: int, image_bytes: int, extras_capacity: int) -> Sequence[str]:
        self.asked += 1
        if self.refuse:
            raise BudgetError(what="slots", needed_bytes=2, budget_bytes=1)
        paths = [str(self.folder / f"{len(self.opened) + i}.slot") for i in range(count)]
        for path in paths:
            create_slot(path, image_bytes, extras_capacity)
        self.opened += paths
        return paths

    def release_slots(self, paths: Sequence[str]) -> None:
        self.released += paths


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path)


@pytest.fixture
def snapshotter(agent: Agent) -> Snapshotter:
    return Snapshotter("w0", agent.open_slots, agent.release_slots)


def tensors(value: float = 1.0, width: int = 5) -> dict[str, Tensor]:
    return {
        "m.weight": torch.full((width, 3), value),
        "m.half": torch.full((7,), value, dtype=torch.bfloat16),
        "m.transposed": (torch.arange(6.0) * value).view(2, 3).t(),
        "m.flag": torch.tensor(True),
        "m.empty": torch.empty(0, 4),
        "o.step": torch.tensor(value, dtype=torch.float64),
        "o.count": torch.tensor([1, 2], dtype=torch.int64),
    }


def take(
    snapshotter: Snapshotter, step: int, state: dict[str, Tensor] | None = None, **more: Any
) -> SnapshotResult:
    arguments: dict[str, Any] = {"generation": 1, "rank": 0, "world": 1, "extras": {"step": step}}
    arguments |= more
    state = tensors(float(step)) if state is None else state
    return snapshotter.take(step=step, tensors=state, **arguments)


def read(path: str | None) -> dict[str, Tensor]:
    """What the reference reader finds in a slot's image."""
    assert path is not None
    slot = Slot.open(path)
    found = load(bytes(slot.image))
    slot.close()
    return found


def newest(agent: Agent) -> int:
    slots = [Slot.open(path) for path in agent.opened if path not in agent.released]
    return max(s.info().step for s in slots if s.info().state is SlotState.COMPLETE)


def test_the_slot_is_a_safetensors_image_with_the_live_values(
    snapshotter: Snapshotter, agent: Agent
) -> None:
    result = take(snapshotter, 3, extras={"step": 3, "x": "é"})
    found = read(result.path)
    assert set(found) == set(tensors())
    for name, tensor in tensors(3.0).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    slot = Slot.open(str(result.path))
    info = slot.info()
    assert (info.step, info.generation, info.rank, info.world) == (3, 1, 0, 1)
    assert json.loads(slot.read_extras()) == {"step": 3, "x": "é"}
    assert (
        result.num_bytes
        == info.image_bytes
        == parse_header(slot.image, info.image_bytes).total_bytes
    )


def test_a_slot_is_used_again_with_new_values(snapshotter: Snapshotter) -> None:
    paths = [take(snapshotter, step).path for step in range(1, 8)]
    assert len(set(paths)) == NUM_SLOTS
    assert read(paths[-1])["o.step"].item() == 7.0
    assert read(paths[-2])["o.step"].item() == 6.0


def test_the_newest_complete_slot_survives_a_death_in_the_copy(
    snapshotter: Snapshotter, agent: Agent
) -> None:
    for step in (1, 2, 3, 4):
        take(snapshotter, step)
    for _ in range(5):  # a drill at the worst moment, over and over
        with pytest.raises(KeyboardInterrupt):
            take(snapshotter, 5, before_commit=_die)
        assert newest(agent) == 4
    assert take(snapshotter, 5).path is not None
    assert newest(agent) == 5


def _die() -> None:
    raise KeyboardInterrupt


def test_pinned_slots_are_left_alone_and_then_snapshots_are_skipped(
    snapshotter: Snapshotter,
) -> None:
    pinned = [str(take(snapshotter, step).path) for step in (1, 2)]
    for path in pinned:
        snapshotter.pin(path)
    third = take(snapshotter, 3)
    assert third.path not in pinned
    skipped = take(snapshotter, 4)
    assert skipped.path is None
    assert "no free slot" in skipped.reason
    Slot.open(pinned[0]).unpin()  # the agent has persisted it
    assert take(snapshotter, 5).path == pinned[0]
    assert read(pinned[1])["o.step"].item() == 2.0
    with pytest.raises(KeyError):
        snapshotter.pin("elsewhere")


def test_a_changed_structure_gets_new_slots_and_the_old_stay_until_it_is_whole(
    snapshotter: Snapshotter, agent: Agent
) -> None:
    take(snapshotter, 1)
    first = list(agent.opened)
    with pytest.raises(KeyboardInterrupt):
        take(snapshotter, 2, tensors(2.0, width=5000), before_commit=_die)
    assert agent.released == []
    assert newest(agent) == 1
    result = take(snapshotter, 3, tensors(3.0, width=5000))
    assert agent.released == first
    assert read(result.path)["m.weight"].shape == (5000, 3)


def test_pinned_slots_of_an_old_structure_are_released_later(
    snapshotter: Snapshotter, agent: Agent
) -> None:
    path = str(take(snapshotter, 1).path)
    snapshotter.pin(path)
    take(snapshotter, 2, tensors(2.0, width=5000))
    assert path not in agent.released
    Slot.open(path).unpin()
    take(snapshotter, 3, tensors(3.0, width=5000))
    assert path in agent.released


def test_the_same_geometry_under_other_names_reuses_the_slots(
    snapshotter: Snapshotter, agent: Agent
) -> None:
    for step in (1, 2, 3):
        take(snapshotter, step)
    renamed = {f"{name[:-1]}X": tensor for name, tensor in tensors(4.0).items()}
    for step in (4, 5, 6):
        path = take(snapshotter, step, renamed).path
        assert set(read(path)) == set(renamed)
    assert len(agent.opened) == NUM_SLOTS


def test_extras_that_outgrow_their_room_get_larger_slots(
    snapshotter: Snapshotter, agent: Agent
) -> None:
    take(snapshotter, 1)
    result = take(snapshotter, 2, extras={"rows": ["x" * 1000] * 1000})
    assert len(agent.opened) == 2 * NUM_SLOTS
    assert len(Slot.open(str(result.path)).read_extras()) > 1_000_000


def test_an_agent_that_refuses_costs_one_snapshot_and_no_flood(
    snapshotter: Snapshotter, agent: Agent
) -> None:
    agent.refuse = True
    assert "budget is 1" in take(snapshotter, 1).reason
    agent.refuse = False
    assert "a moment ago" in take(snapshotter, 2).reason
    snapshotter._retry_at_s = 0.0
    assert take(snapshotter, 3).path is not None


def test_one_more_slot_is_asked_for_ever_more_rarely(
    snapshotter: Snapshotter, agent: Agent
) -> None:
    take(snapshotter, 1)
    agent.refuse = True
    for step in (2, 3, 4):
        assert take(snapshotter, step, cut=True).path is not None
    assert agent.asked == 2, "for three, and in vain for a fourth"
    pauses = [snapshotter._add_pause_s]
    for step in range(5, 12):
        snapshotter._add_at_s = 0.0  # it is over
        take(snapshotter, step, cut=True)
        pauses.append(snapshotter._add_pause_s)
    assert agent.asked == 9
    assert pauses == [120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0, 3600.0]
    agent.refuse = False
    assert take(snapshotter, 12, tensors(2.0, width=5000)).path is not None, "others do not wait"


def test_ranks_share_the_state_without_gap_or_overlap(agent: Agent) -> None:
    found: dict[str, Tensor] = {}
    for rank in range(3):
        part = Snapshotter(f"w{rank}", agent.open_slots)
        image = read(take(part, 1, rank=rank, world=3).path)
        assert not set(found) & set(image)
        found |= image
        part.close()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(1.0).items())


def test_the_share_is_even_and_independent_of_order() -> None:
    specs = [TensorSpec(f"t{i}", "F32", (100 + i,)) for i in range(60)]
    shares = [owned(specs, rank, 4) for rank in range(4)]
    loads = [sum(spec.num_bytes for spec in share) for share in shares]
    assert max(loads) - min(loads) <= 4 * 160
    assert shares == [owned(specs[::-1], rank, 4) for rank in range(4)]
    assert sorted(s.name for share in shares for s in share) == sorted(s.name for s in specs)


def test_a_rank_without_tensors_still_has_a_whole_slot(
    snapshotter: Snapshotter,
) -> None:
    result = take(snapshotter, 1, {"only": torch.ones(2)}, rank=1, world=2)
    assert read(result.path) == {}


def test_close_leaves_the_files_and_their_content(snapshotter: Snapshotter) -> None:
    path = take(snapshotter, 1).path
    snapshotter.close()
    assert read(path)["o.step"].item() == 1.0
