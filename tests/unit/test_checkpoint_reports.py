"""What users of other checkpointers have reported, each as a test of what relit does instead.

A test is named after its line in the list below. Lines without a test here say where theirs is, or
why the thing cannot happen.

 01 pytorch#144657          09 KempnerForge#102           18 SimpleTuner PR 2989
 03 NVRx PR 376             10 transformers#35782         20 accelerate#3971
 04 NeMo-RL#3312            12 Composer PR 2146           21 torchtitan#811, pytorch#102821
 06 xtuner PR 1859          13 Composer PR 2409           23 torchtitan#930
 07 torchtitan#3065         16 Lightning#1150             24 torchtitan PR 315
 26 DLRover#1146            17 accelerate#1163            27 DLRover PR 1069, PR 972
 29 Orbax#605               30 maxtext PR 5260            31 DeepSpeed#7546
 32 OpenTau PR 396          33 Ray#41700                  34 Ray#47939, #55350, marin#9213
 36 Megatron-Bridge PR 5738, PR 5964                      37 pytorch#120356, #156002
 38 vmlx-swift PR 217

 04 An alarm for a save that repeats the one before is not built: the state is walked or signed
    anew at every step, and there is no cache of addresses to go stale.
 15 Lightning#688, #19970 (truncated after SIGKILL): test_crash_matrix, test_trainer_killed.
 19 accelerate#2016, verl#7401 (data order after a resume): the position is one integer that follows
    from the step; test_loader, test_order, tests/sim, and the losses that `make run` compares.
 22 Lightning#16815 (optimizer shards of another worker count): state is replicated, its tensors are
    saved whole, each by one rank; any world reads all of them (21). Sharded state is refused by
    name so far (test_state_tree), so it cannot be saved wrongly.
 25 DLRover#1208 (several committers): the commit is an exclusive create; test_racing_committers.
 28 DLRover#1225 (a snapshot of 55 s): slots are reserved and mapped when they are opened, not when
    they are filled (test_slots); an alarm for a slow copy is not built.
 35 verl#7952, rllm#897 (silent start at 0): test_damage.test_all_checkpoints_are_gone, and
    test_corruption, in which "from scratch" is a failure.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stopped_run
import torch
from checkpoint_game import Game
from node_harness import Node, persisted, snapshot, worker
from shard_facts import inventory, manifest, shard, shards, uploaded
from test_checkpoint_machine import failed
from test_corruption import copy_of, difference, folder_of, resume
from test_snapshot import Agent, read
from torch import nn

from relit_platform.errors import UsageError
from relit_platform.facts import RestorePlan, ShardFailed, ShardPersisted, ShardUploaded
from relit_platform.machines.checkpoint_state import Discard, Note, Persisting, Published
from relit_platform.machines.lineage import Lineage
from relit_platform.machines.restore import Nothing, plan_restore
from relit_platform.node import uploads
from relit_platform.node.slots import Slot
from relit_platform.worker.snapshot import Snapshotter
from relit_platform.worker.state_memo import StateMemo
from relit_platform.worker.state_tree import flatten, restore
from relit_storage.checkpoint.image import ImageLayout, TensorSpec, parse_header
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.errors import CorruptShardError, ManifestError
from relit_storage.run.layout import shard_key


class Trainer:
    """A model, its optimizer and what a rank does at a boundary; slots lie in a folder."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.memo = StateMemo()
        agent = Agent(folder)
        self.snapshotter = Snapshotter("w0", agent.open_slots, agent.release_slots)

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()

    def save(self, step: int) -> str:
        tensors, extras = self.memo.flatten(self.objects)
        taken = self.snapshotter.take(
            step=step, generation=1, rank=0, world=1, tensors=tensors, extras=extras
        )
        return str(taken.path)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in flatten(self.objects)[0].items()}


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    trainer = Trainer(tmp_path)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """Two ranks, steps 20 and 40 on disk and in the object tier."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="relit-test-") as folder:
        stopped_run.save(Path(folder) / "run", (20, 40))
        yield Path(folder) / "run"


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# ---- what is in a snapshot ----


def test_01_an_update_right_after_the_snapshot_is_not_in_it(trainer: Trainer) -> None:
    before = trainer.state()
    path = trainer.save(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(7.0)
    assert equal(read(path), before)


def test_03_the_small_state_of_the_optimizer_is_of_the_same_step(trainer: Trainer) -> None:
    path = trainer.save(1)
    trainer.train()
    steps = {n: float(t) for n, t in read(path).items() if n.endswith("step")}
    assert len(steps) == 2 and set(steps.values()) == {1.0}


def test_04_what_was_replaced_between_two_saves_is_saved_anew(trainer: Trainer) -> None:
    trainer.save(1)
    for step in range(2, 6):
        state = trainer.optimizer.state_dict()
        trainer.model.weight = nn.Parameter(trainer.model.weight.detach() + 1)
        trainer.model.bias.data = trainer.model.bias.detach() * 2
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.1)
        trainer.optimizer.load_state_dict(state)
        trainer.train()
        assert equal(read(trainer.save(step)), trainer.state()), step


def test_06_a_thousand_tensors_cost_no_more_descriptors_than_one(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    snapshotter = Snapshotter("w0", agent.open_slots, agent.release_slots)
    state = {f"m.{number}": torch.full((3,), float(number)) for number in range(1000)}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 32, before[1]))
    try:
        for step in range(1, 5):
            taken = snapshotter.take(
                step=step, generation=1, rank=0, world=1, tensors=state, extras={}
            )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert equal(read(taken.path), state)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_20_every_optimizer_goes_on_bit_for_bit(tmp_path: Path, name: str, steps: int) -> None:
    """Also when it has no state yet."""
    one, other = Trainer(tmp_path / "a"), Trainer(tmp_path / "b")
    for trainer in (one, other):
        trainer.optimizer = OPTIMIZERS[name](trainer.model.parameters())
    for _ in range(steps):
        one.train()
    tensors, skeleton = flatten(one.objects)
    restore(
        other.objects, {n: t.clone() for n, t in tensors.items()}, json.loads(json.dumps(skeleton))
    )
    for _ in range(2):
        assert equal(one.state(), other.state())
        one.train()
        other.train()
    assert equal(one.state(), other.state())


def test_37_per_rank_state_is_kept_per_rank_and_a_name_is_one_tensor(template: Path) -> None:
    found = resume(copy_of(template, ("disk",)))
    assert {rank: extras["rank"] for rank, extras in found.extras.items()} == {0: 0, 1: 1}
    twice = [dataclasses.asdict(shard(5, rank=rank)) for rank in (0, 1)]
    twice[1]["tensors"][0]["name"] = twice[0]["tensors"][0]["name"]
    with pytest.raises(ManifestError, match="overlap"):
        Manifest.from_shards(twice, run_id="r", epoch=1, cursor={}, ids={}, created_at_s=0.0)


# ---- what makes a step ----


def test_07_a_rank_that_never_answers_costs_its_step_only() -> None:
    game = Game().feed(*(Persisting(step=5, generation=1, rank=r, world=2) for r in (0, 1)))
    game.feed(shard(5, rank=0))
    assert game.committed(6).book.newest("disk") == 6
    assert game.committed(7).phase(5) == "abandoned"
    assert not game.book.saving


def test_09_nothing_older_goes_before_the_new_step_is_published() -> None:
    game = Game().committed(10).committed(20)
    game.persisted(30)
    assert (game.book.newest("disk"), game.of(Discard)) == (20, [])
    game.feed(Published(step=30, generation=1))
    assert game.book.newest("disk") == 30
    assert [discard.step for discard in game.of(Discard)] == [10]


@pytest.mark.parametrize("tier", ["disk", "object"])
def test_10_24_33_36_a_newer_folder_without_a_commit_is_no_step(template: Path, tier: str) -> None:
    """Whole files, even: of a save that was cut short, or of an attempt that is dead."""
    root = copy_of(template, (tier,))
    for step, generation in ((60, 1), (40, 2), (999_999_999_999, 1)):
        dead = folder_of(root, tier, step).with_name(f"g{generation:06d}")
        shutil.copytree(folder_of(root, tier, 40), dead)
        (dead / "manifest.json").unlink()
    found = resume(root)
    assert (found.step, difference(found)) == (40, "")


def test_12_shards_of_two_steps_make_none() -> None:
    mixed = [dataclasses.asdict(shard(5, rank=0)), dataclasses.asdict(shard(4, rank=1))]
    with pytest.raises(ManifestError, match="several steps"):
        Manifest.from_shards(mixed, run_id="r", epoch=1, cursor={}, ids={}, created_at_s=0.0)


def test_13_a_smaller_world_later_follows_nothing_of_the_larger() -> None:
    """The same step saved by four ranks, then, after a resume, by two, then by four again."""
    for worlds in ((4, 2), (4, 2, 4)):
        made = list(enumerate(worlds, start=1))
        node = inventory(
            disk=[one for generation, world in made for one in shards(8, generation, world)],
            manifests=[manifest(8, generation, world) for generation, world in made],
        )
        plan = planned([node])
        assert (plan.generation, plan.world) == made[-1]
        assert [s.rank for s in plan.shards] == list(range(worlds[-1]))
        assert all(f"g{plan.generation:06d}" in source.location for source in plan.shards)


def planned(inventories: list[Any], lineage: tuple[tuple[int, int], ...] = ()) -> RestorePlan:
    plan = plan_restore(inventories, [], Lineage().merged(lineage), [], ["n1"], "r")
    assert not isinstance(plan, Nothing)
    return plan


def test_16_17_the_last_published_step_is_never_dropped(node: Node) -> None:
    keeper = node.boot()
    path = worker(keeper)[0]
    older = persisted(node, keeper, path, 9)
    keeper.publish(9, 1, Manifest.from_shards([dataclasses.asdict(older)], **FIELDS).to_bytes())
    persisted(node, keeper, path, 10)  # newer, and never published
    with pytest.raises(UsageError, match="never dropped"):
        keeper.drop([(9, 1)], "disk")
    keeper.drop([(10, 1)], "disk")
    assert [place[:2] for place in keeper.inventory().manifests] == [(9, 1)]


FIELDS: dict[str, Any] = {
    "run_id": "run-1",
    "epoch": 1,
    "cursor": 0,
    "ids": {},
    "created_at_s": 1.0,
}


def test_18_a_higher_step_of_a_line_that_was_left_is_not_gone_back_to() -> None:
    """Generation 1 came to 4900; generation 2 went back to 100 and has saved 110."""
    steps = [(4900, 1), (100, 1), (110, 2)]
    node = inventory(
        disk=[one for step, generation in steps for one in shards(step, generation)],
        manifests=[manifest(step, generation) for step, generation in steps],
    )
    plan = planned([node], lineage=((1, 0), (2, 100)))
    assert (plan.step, plan.generation) == (110, 2)
    assert "went back to step 100" in plan.refusals[0]["reason"]


def test_21_a_rank_without_a_tensor_saves_and_all_ranks_load(tmp_path: Path) -> None:
    layout = ImageLayout.plan([], {})
    assert parse_header(layout.header, layout.total_bytes).specs == ()
    agent = Agent(tmp_path)
    for rank in range(3):
        taken = Snapshotter(f"w{rank}", agent.open_slots, agent.release_slots).take(
            step=1, generation=1, rank=rank, world=3, tensors={"a": torch.ones(2)}, extras={}
        )
        assert len(read(taken.path)) == (rank == 0)


def test_23_a_restore_during_a_save_takes_the_step_before(template: Path) -> None:
    root = copy_of(template, ("disk",))
    folder = folder_of(root, "disk", 40)
    order = [
        "manifest.json",
        *sorted(p.name for p in folder.glob("rank-00001*")),
        "rank-00000.record",
    ]
    for name in order:  # backwards through the save: every moment of it
        (folder / name).unlink()
        found = resume(root)
        assert (found.step, difference(found)) == (20, "")


def test_26_the_same_word_twice_is_not_two_ranks() -> None:
    game = Game().feed(shard(5, rank=0), shard(5, rank=0))
    assert game.phase(5) == "open"
    game.feed(shard(5, rank=1), Published(step=5, generation=1))
    assert game.phase(5) == "committed"


def test_27_a_slot_that_holds_another_step_by_now_is_not_persisted_as_the_old(node: Node) -> None:
    keeper = node.boot()
    path = worker(keeper)[0]
    snapshot(keeper, path, 8)
    keeper.persist("w0", path, 7, 1)  # a message that comes late
    keeper.persist("w0", path, 8, 1)
    assert [done.step for done in node.wait_for(ShardPersisted)] == [8]
    keeper.seal(epoch=1, generation=2)
    Slot.open(path).unpin()
    snapshot(keeper, path, 9)  # of generation 1, which is over
    keeper.persist("w0", path, 9, 1)
    assert "has taken over" in node.wait_for(ShardFailed)[0].reason
    assert [record.step for record in keeper.inventory().disk] == [8]


def test_29_30_a_failed_save_is_said_and_the_next_one_is_taken() -> None:
    game = Game().durable(20)
    game.feed(shard(30, rank=0), failed(30, "disk"))
    assert [note.kind for note in game.of(Note)] == ["ckpt.failed"]
    assert game.book.newest("disk") == 20 and game.phase(30) == "abandoned"
    game.committed(40)
    assert game.book.newest("disk") == 40
    game.feed(failed(40, "object"))
    assert game.book.newest("disk") == 40 and game.book.newest("object") == 20
    game.committed(60).feed(uploaded(60, rank=0), uploaded(60, rank=1))
    assert game.phase(60) == "uploading"


def test_31_a_step_without_the_shard_of_a_rank_is_none() -> None:
    with pytest.raises(ManifestError, match="shards of ranks"):
        Manifest.from_shards([dataclasses.asdict(shard(5, rank=0))], **FIELDS)


@pytest.mark.parametrize(
    "place", ["../000000000004/g000001/x", "20261129/rank-00001.safetensors", shard_key(5, 2, 1)]
)
def test_32_a_rank_cannot_save_beside_its_step(place: str) -> None:
    found = [dataclasses.asdict(one) for one in shards(5)]
    found[1]["file"] = place
    with pytest.raises(ManifestError, match="are not names of this step"):
        Manifest.from_shards(found, **FIELDS)


def test_34_a_store_that_fails_costs_the_upload_and_nothing_else(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "FIRST_PAUSE_S", 0.0)
    keeper = node.boot()
    path = worker(keeper)[0]
    persisted(node, keeper, path, 7)
    node.store.failures = 10**6
    keeper.upload(7, 1, [0])
    assert (node.wait_for(ShardFailed)[0].tier, node.store.objects) == ("object", {})
    assert persisted(node, keeper, path, 8).step == 8
    node.store.failures = 2
    keeper.upload(8, 1, [0])
    node.wait_for(ShardUploaded)
    assert shard_key(8, 1, 0) in node.store.objects


def test_38_an_image_shorter_than_its_header_says_is_refused_at_any_length() -> None:
    layout = ImageLayout.plan([TensorSpec("a", "F32", (5,)), TensorSpec("b", "U8", (3,))], {})
    image = layout.header + bytes(layout.total_bytes - layout.header_bytes)
    assert parse_header(image, len(image)).specs == layout.specs
    for length in (*range(0, 4096, 64), *range(4090, len(image))):
        with pytest.raises(CorruptShardError):
            parse_header(image[:length], length)
