"""Real ranks that begin with another run's step, or with one that was imported into their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import HOST, Ranks, assignment
from run_files import FakeJobs, submit, write_code
from saved_run import Saved, Tied, Trained, make_run
from torch import nn

from relit.client import Client
from relit.import_source import Naming, open_source
from relit.importing import Target, import_checkpoint
from relit_platform.control.object_tier import ObjectTier
from relit_platform.errors import InitialStateError
from relit_platform.facts import Assignment, JoinRequest, RestorePlan, StateSource
from relit_platform.machines.lineage import Lineage
from relit_platform.machines.restore import plan_restore
from relit_platform.run_config import RunConfig
from relit_platform.worker.member import Member
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.run.layout import INITIAL
from relit_storage.stores.opening import open_store
from relit_storage.stores.prefixed import PrefixedStore

STEP = 20


class Recorder:
    """What a member needs of one: its store, and the facts that it sends."""

    drill = None

    def __init__(self, config: RunConfig) -> None:
        self.store = PrefixedStore(open_store(config.store), config.run_key)
        self.facts: list[Any] = []
        self.adopted: list[int] = []
        self.manager = SimpleNamespace(send=lambda verb, fact: self.facts.append(fact))

    def near(self, plan: RestorePlan, node_id: str) -> RestorePlan:
        return plan

    def phase(self, name: str, step: int) -> None: ...

    def place(self, rank: int, generation: int, last_row_step: int) -> None: ...

    def extras(self, member: Any, cursor: Any, skeleton: Any) -> dict[str, Any]:
        head = {"step": member.step, "cursor": dict(cursor), "ids": {}, "rows": []}
        return {**head, "objects": skeleton}

    def adopt(self, extras: Any) -> None:
        self.adopted.append(int(extras["step"]))

    def kinds(self) -> list[str]:
        return [fact.kind for fact in self.facts]


class Manager:
    """Answers each join with the next of some assignments."""

    def __init__(self, *answers: Callable[[JoinRequest], Assignment]) -> None:
        self._answers = list(answers)

    def join(self, request: JoinRequest, wait_s: float = 5.0) -> Assignment:
        return self._answers.pop(0)(request)

    def lost(self, generation: int) -> bool:
        return False


class Sync:
    """No gradients here."""

    def attach(self, group: Any) -> None: ...

    def detach(self) -> None: ...


def member_of(config: RunConfig, manager: Any) -> tuple[Member, Recorder]:
    recorder = Recorder(config)
    member = Member(
        config=config,
        worker_id="w",
        epoch=1,
        node_id="n",
        pid=1,
        host=HOST,
        manager=manager,
        recorder=recorder,  # type: ignore[arg-type]
    )
    return member, recorder


def sourced(place: Assignment, source: StateSource) -> Assignment:
    return replace(place, source=source)


FRESH = StateSource(kind="fresh", step=0)


def at_checkpoint(plan: RestorePlan) -> StateSource:
    return StateSource(kind="checkpoint", step=plan.step, plan=plan)


def own_plan(config: RunConfig) -> RestorePlan:
    """What the manager would plan for a run with nothing but its object tier."""
    store = PrefixedStore(open_store(config.store), config.run_key)
    commits = ObjectTier(store, CommitLog(store), lambda: 0.0).commits()
    plan = plan_restore([], commits, Lineage(), [], ["n"], config.run_id)
    assert isinstance(plan, RestorePlan)
    return plan


def alone(
    config: RunConfig, objects: dict[str, Any], *sources: StateSource
) -> tuple[Member, Recorder]:
    """A rank of one that enters one generation after the other."""
    answers = [
        lambda request, n=n, s=s: sourced(assignment(0, 1, request.endpoint, n), s)
        for n, s in enumerate(sources, 1)
    ]
    member, recorder = member_of(config, Manager(*answers))
    for _ in sources:
        assert member.enter(objects, Sync(), None)  # type: ignore[arg-type]
    return member, recorder


@pytest.fixture
def base(tmp_path: Path) -> Saved:
    run = make_run(tmp_path)
    run.commit([STEP])
    return run


def config_of(base: Saved, **init: Any) -> RunConfig:
    job = submit(base.client, base.root / "code", run_id="r2", init={"from": "r1", **init})
    config = job.reader.config()
    assert config is not None
    return config


def test_a_first_generation_begins_with_the_weights_at_step_0(base: Saved) -> None:
    ours = Trained(1)
    member, recorder = alone(
        config_of(base), {"model": ours.model, "optimizer": ours.optimizer}, FRESH
    )
    wanted = Trained(STEP).model.state_dict()
    assert all(torch.equal(t, wanted[key]) for key, t in ours.model.state_dict().items())
    assert member.step == 0
    (told,) = [fact for fact in recorder.facts if fact.kind == "state.initialized"]
    assert told.data["from_step"] == STEP and told.data["objects"] == ["model"]
    assert told.level == "info"
    report = json.loads(recorder.store.get(INITIAL))
    assert (report["run"], report["missing"], report["unexpected"]) == ("r1", [], [])


def test_no_later_generation_takes_it_again(base: Saved) -> None:
    model = Trained(1).model
    config = config_of(base)
    member, recorder = alone(config, {"model": model}, FRESH)
    with torch.no_grad():
        model.embed.weight.zero_()
    kept = StateSource(kind="member", step=0, rank=0)
    manager = Manager(lambda request: sourced(assignment(0, 1, request.endpoint, 2), kept))
    member._manager = manager  # type: ignore[assignment]
    assert member.enter({"model": model}, Sync(), None)  # type: ignore[arg-type]
    assert torch.count_nonzero(model.embed.weight) == 0
    assert recorder.kinds().count("state.initialized") == 1


def test_a_run_without_init_begins_as_its_code_made_it(base: Saved) -> None:
    job = submit(base.client, base.root / "code", run_id="r3")
    config = job.reader.config()
    assert config is not None
    model = Trained(1).model
    _, recorder = alone(config, {"model": model}, FRESH)
    assert torch.equal(model.embed.weight, Trained(1).model.embed.weight)
    assert recorder.kinds() == ["rank.entered"]


def test_what_does_not_fit_ends_the_run_with_both_sides_named(base: Saved) -> None:
    config = config_of(base)
    with pytest.raises(InitialStateError, match=r"other\.weight.*model\.body\.bias"):
        alone(config, {"other": nn.Linear(2, 2)}, FRESH)


def test_what_is_missing_without_strict_is_an_event_and_a_report(base: Saved) -> None:
    objects = {"model": Tied(), "extra": nn.Linear(2, 2)}
    _, recorder = alone(config_of(base, strict=False), objects, FRESH)
    (told,) = [fact for fact in recorder.facts if fact.kind == "state.initialized"]
    assert told.level == "warning" and told.data["missing"] == ["extra.weight", "extra.bias"]
    assert json.loads(recorder.store.get(INITIAL))["num_missing"] == 2


def imported(tmp_path: Path, state: Any, step: int = 0) -> RunConfig:
    """A run that was submitted under the id of an import."""
    tmp_path.mkdir(exist_ok=True)
    torch.save(state, tmp_path / "m.pt")
    client = Client(store=str(tmp_path / "store"), transport=FakeJobs())
    with open_source(str(tmp_path / "m.pt"), Naming()) as source:
        import_checkpoint(source, Target(run_id="mine", step=step), client)
    job = submit(client, write_code(tmp_path / "code"), run_id="mine")
    config = job.reader.config()
    assert config is not None
    return config


def test_a_run_goes_on_from_a_whole_import_at_its_step(tmp_path: Path) -> None:
    theirs, ours = Trained(STEP), Trained(1)
    state = {"model": theirs.model.state_dict(), "optimizer": theirs.optimizer.state_dict()}
    config = imported(tmp_path, state, step=7)
    objects = {"model": ours.model, "optimizer": ours.optimizer}
    member, recorder = alone(config, objects, at_checkpoint(own_plan(config)))
    assert member.step == 7 and recorder.adopted == [7]
    found, wanted = ours.flatten()[0], theirs.flatten()[0]
    assert all(torch.equal(found[n], tensor.to(found[n].dtype)) for n, tensor in wanted.items())


def test_an_import_that_does_not_fit_says_so(tmp_path: Path) -> None:
    config = imported(tmp_path, nn.Linear(3, 3).state_dict())
    with pytest.raises(InitialStateError, match=r"\(3, 3\), registered is \(2, 2\)"):
        alone(config, {"model": nn.Linear(2, 2)}, at_checkpoint(own_plan(config)))


def two_ranks(rank: int, world: int, endpoint: tuple[str, int], line: Any) -> None:
    """Enter once with each configuration; each rank's code makes other numbers."""
    for _ in range(2):
        raw, source = line.recv()

        def place(request: JoinRequest, source: StateSource = source) -> Assignment:
            line.send(request.endpoint)
            return sourced(assignment(rank, world, line.recv()), source)

        torch.manual_seed(rank)
        objects = {"model": Tied(), "extra": nn.Linear(2, 2)}
        member, recorder = member_of(RunConfig.from_json(raw), Manager(place))
        assert member.enter(objects, Sync(), None)  # type: ignore[arg-type]
        numbers = (
            objects["model"].state_dict()["embed.weight"],
            objects["extra"].state_dict()["bias"],
        )
        line.send(([n.tolist() for n in numbers], recorder.kinds()))
        member.leave()


def test_two_ranks_begin_with_the_same_whatever_their_code_made(
    base: Saved, tmp_path: Path
) -> None:
    wanted = Trained(STEP).model
    config = config_of(base, strict=False)
    mine = imported(tmp_path / "import", wanted.state_dict())
    rounds = [(config, FRESH), (mine, at_checkpoint(own_plan(mine)))]
    with Ranks(two_ranks) as ranks:
        for made, source in rounds:
            for rank in range(2):
                ranks.tell(rank, (made.to_json(), source))
            endpoint = ranks.answers()[0]
            for rank in range(2):
                ranks.tell(rank, endpoint)
            (first, told), (second, untold) = ranks.answers()
            assert first == second
            assert torch.equal(torch.tensor(first[0]), wanted.embed.weight)
            assert told == ["state.initialized", "rank.entered"] and untold == ["rank.entered"]
