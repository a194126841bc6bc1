"""Real ranks that begin with another run's step, or with one that was imported into their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from coordinator_harness import request
from lone_member import alone, unlike_ranks
from ranks import Ranks
from run_files import FakeJobs, submit, write_code
from saved_run import Saved, Tied, Trained, make_run
from stopped_run import Life
from torch import nn

from relit.client import Client
from relit.import_source import Naming, open_source
from relit.importing import Imported, Target, import_checkpoint
from relit_platform.control.object_tier import ObjectTier
from relit_platform.errors import InitialStateError
from relit_platform.facts import Assignment, RestorePlan, StateSource
from relit_platform.machines.lineage import Lineage
from relit_platform.machines.restore import plan_restore
from relit_platform.run_config import RunConfig
from relit_platform.worker import member as member_module
from relit_platform.worker.state_tree import flatten
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.run.layout import INITIAL
from relit_storage.stores.opening import open_store
from relit_storage.stores.prefixed import PrefixedStore

STEP = 20
FRESH = StateSource(kind="fresh", step=0)


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


def test_of_a_whole_state_nothing_is_exchanged(
    base: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a sharded state, of which no rank could give another its part, can begin with one, too."""
    monkeypatch.setattr(member_module, "send_state", None)
    ours = Trained(1)
    objects = {"model": ours.model, "optimizer": ours.optimizer}
    alone(config_of(base, weights_only=False), objects, FRESH)
    assert torch.equal(ours.model.embed.weight, Trained(STEP).model.embed.weight)


def test_no_later_generation_takes_it_again(base: Saved) -> None:
    config, model = config_of(base), Trained(1).model
    kept = StateSource(kind="member", step=0, rank=0)
    _, recorder = alone(config, {"model": model}, FRESH, kept, kept)
    assert recorder.kinds().count("state.initialized") == 1
    assert recorder.kinds().count("rank.entered") == 3


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


# ---- a step that was imported into the run itself ----


def bring(client: Client, folder: Path, state: Any, run: str, step: int = 0) -> Imported:
    torch.save(state, folder / "m.pt")
    with open_source(str(folder / "m.pt"), Naming()) as source:
        return import_checkpoint(source, Target(run_id=run, step=step), client)


def imported(folder: Path, state: Any, step: int = 0) -> tuple[RunConfig, StateSource]:
    """A run that was submitted under the id of an import, and what the manager plans for it."""
    client = Client(store=str(folder / "store"), transport=FakeJobs())
    bring(client, folder, state, "mine", step)
    config = submit(client, write_code(folder / "code"), run_id="mine").reader.config()
    assert config is not None
    store = PrefixedStore(open_store(config.store), config.run_key)
    commits = ObjectTier(store, CommitLog(store), lambda: 0.0).commits()
    plan = plan_restore([], commits, Lineage(), [], ["n"], config.run_id)
    assert isinstance(plan, RestorePlan)
    return config, StateSource(kind="checkpoint", step=plan.step, plan=plan)


def test_a_run_goes_on_from_a_whole_import_at_its_step(tmp_path: Path) -> None:
    theirs, ours = Trained(STEP), Trained(1)
    state = {"model": theirs.model.state_dict(), "optimizer": theirs.optimizer.state_dict()}
    config, source = imported(tmp_path, state, step=7)
    member, recorder = alone(config, {"model": ours.model, "optimizer": ours.optimizer}, source)
    assert member.step == 7 and recorder.adopted == [7]
    found, wanted = ours.flatten()[0], theirs.flatten()[0]
    # torch's optimizers give moments the dtype of their parameter.
    assert all(torch.equal(found[n], tensor.to(found[n].dtype)) for n, tensor in wanted.items())


def test_an_import_that_does_not_fit_says_so(tmp_path: Path) -> None:
    config, source = imported(tmp_path, nn.Linear(3, 3).state_dict())
    with pytest.raises(InitialStateError, match=r"\(3, 3\), registered is \(2, 2\)"):
        alone(config, {"model": nn.Linear(2, 2)}, source)


def test_the_manager_plans_an_import_of_step_0(tmp_path: Path) -> None:
    """Step 0 is a step, and generations go on above that of the import."""
    client = Client(store=str(tmp_path / "runs"), transport=FakeJobs())
    made = bring(client, tmp_path, nn.Linear(2, 2).state_dict(), "r")
    (tmp_path / "store").symlink_to(made.directory)  # where a Life keeps its run
    life = Life(tmp_path, epoch=2)
    try:
        replies = life.join(request("a", epoch=2), request("b", epoch=2))
    finally:
        life.close()
    for reply in replies:
        assert isinstance(reply, Assignment) and reply.source.plan is not None
        assert (reply.source.kind, reply.source.step) == ("checkpoint", 0)
        assert reply.generation > made.generation == reply.source.plan.generation


def test_two_ranks_begin_with_the_same_whatever_their_code_made(
    base: Saved, tmp_path: Path
) -> None:
    wanted = nn.Linear(8, 3)
    base.commit([30], state=flatten({"model": wanted}))
    (tmp_path / "other").mkdir()
    rounds = [
        (config_of(base, strict=False), FRESH),
        imported(tmp_path / "other", wanted.state_dict()),
    ]
    with Ranks(unlike_ranks) as ranks:
        for config, source in rounds:
            for rank in range(2):
                ranks.tell(rank, (config.to_json(), source))
            endpoint = ranks.answers()[0]
            for rank in range(2):
                ranks.tell(rank, endpoint)
            (*first, told), (*second, untold) = ranks.answers()
            assert first == second
            assert torch.equal(torch.tensor(first[0]), wanted.weight)
            assert told == ["state.initialized", "rank.entered"] and untold == ["rank.entered"]
