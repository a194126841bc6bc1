"""The Ray internals that the adapter stands on, held to the pinned version.

When a pin moves, these fail before anything else does; each names the seam and who needs it.
"""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._common.constants import HEAD_NODE_RESOURCE_NAME
from ray._private import ray_constants
from ray.core.generated import node_manager_pb2
from ray.runtime_context import RuntimeContext
from ray.train import FailureConfig
from ray.train.backend import Backend
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup, worker_group
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import WorkerGroupError

from relit_platform.control import home
from relit_platform.ray_train import adapter, backend, groups, placement, prestart


def test_ray_is_the_pinned_version() -> None:
    assert ray.__version__ == "2.60.0"


def test_no_seam_is_missing() -> None:
    assert adapter.missing_seams() == []


def test_missing_seam_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DataParallelTrainer, "_create_default_callbacks")
    assert adapter.missing_seams() == ["DataParallelTrainer._create_default_callbacks"]


def test_replica_groups_are_off_by_default_and_on_for_ours() -> None:
    assert Backend.has_replica_groups is False
    assert backend.ReplicaBackendConfig().backend_cls.has_replica_groups is True


def test_controller_replaces_only_failed_replica_groups() -> None:
    source = inspect.getsource(TrainController._execute_resize_decision)
    assert "_replace_bad_workers" in source
    assert "failing_rgs != all_rgs" in source
    assert callable(WorkerGroup.replace_replica_group)


def test_replacing_still_needs_the_repair() -> None:
    source = inspect.getsource(WorkerGroup._replace_replica_group_impl)
    assert "ray.get(clear_tasks)" in source, "look whether repair.py is still needed"
    source = inspect.getsource(WorkerGroup)
    for name in ("self._replica_groups", "self._latest_poll_status", "after_worker_group_start"):
        assert name in source
    assert "self._worker_group.replace_replica_group(" in inspect.getsource(TrainController)


def test_fit_hands_over_the_policies_and_callbacks() -> None:
    parameters = inspect.signature(TrainController.__init__).parameters
    for name in ("failure_policy", "scaling_policy", "callbacks", "train_fn_ref"):
        assert name in parameters


def test_policy_is_a_failure_policy_with_one_decision() -> None:
    assert {d.name for d in FailureDecision} == {"RETRY", "RAISE", "NOOP"}
    assert FailurePolicy.__abstractmethods__ == frozenset({"make_decision"})
    parameters = list(inspect.signature(FailurePolicy.make_decision).parameters)
    assert parameters == ["self", "training_failed_error"]


def test_default_callbacks_still_hold_those_that_we_drop() -> None:
    trainer = adapter.ReplicaTrainer(lambda: None)
    stock = DataParallelTrainer._create_default_callbacks(trainer)
    names = {type(c).__name__ for c in stock}
    ours = {type(c).__name__ for c in trainer._create_default_callbacks()}
    assert names - ours == adapter.DROPPED
    assert ours - names == {"RepairCallback", "NamingCallback"}


def test_a_started_group_gets_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(worker_group.WorkerGroup._create_placement_group)
    assert "pg = placement_group(" in source and "name=" not in source
    start = inspect.getsource(worker_group.WorkerGroup)
    assert "callback.on_worker_group_start" in start
    made: list[str] = []
    monkeypatch.setattr(worker_group, placement.MAKER, lambda *_, name: made.append(name))
    for _ in range(2):
        with placement.NamingCallback("r").on_worker_group_start():
            worker_group.placement_group([{"CPU": 1}])
    assert all(name.startswith("relit/r/") for name in made) and len(set(made)) == 2


def test_what_is_left_of_a_run_is_removed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ["0a" * 18, "0b" * 18, "0c" * 18]
    table = {
        ids[0]: {"name": "relit/r/1", "state": "REMOVED"},
        ids[1]: {"name": "relit/r/2", "state": "CREATED"},
        ids[2]: {"name": "relit/r2/1", "state": "CREATED"},
    }
    removed: list[str] = []
    monkeypatch.setattr(groups, "placement_group_table", lambda: table)
    monkeypatch.setattr(
        groups, "remove_placement_group", lambda group: removed.append(group.id.hex())
    )
    assert groups.remove_groups("r") == 1
    assert removed == [ids[1]]


@pytest.mark.parametrize(
    ("run", "state", "waits"),
    [("r", "PENDING", True), ("r", "CREATED", False), ("r2", "PENDING", False)],
)
def test_a_run_waits_while_its_group_is_pending(
    run: str, state: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"0a" * 18: {"name": f"relit/{run}/1", "state": state}}
    monkeypatch.setattr(groups, "placement_group_table", lambda: table)
    assert groups.waits_for_place("r") is waits


class Say:
    """A verdict that records what it was asked; picklable, as the real one must be."""

    def __init__(self, retry: bool) -> None:
        self.retry = retry

    def __call__(self, error_text: str, final: bool) -> tuple[bool, str]:
        return self.retry and not final, error_text


def failed(*errors: Exception) -> WorkerGroupError:
    return WorkerGroupError(error_message="x", worker_failures=dict(enumerate(errors)))


@pytest.mark.parametrize(
    ("retry", "error", "decision"),
    [
        (True, failed(RuntimeError("died")), FailureDecision.RETRY),
        (False, failed(RuntimeError("died")), FailureDecision.RAISE),
        (True, failed(RuntimeError("FinalUserError: poison")), FailureDecision.RAISE),
    ],
)
def test_policy_follows_the_verdict(retry: bool, error: Any, decision: FailureDecision) -> None:
    policy = pickle.loads(pickle.dumps(adapter.RunFailurePolicy(Say(retry))))
    assert isinstance(policy.failure_config, FailureConfig)
    assert policy.make_decision(error) is decision


def test_a_controller_that_runs_in_a_circle_is_given_up() -> None:
    now = iter(range(1000, 2000))
    policy = adapter.RunFailurePolicy(Say(True), clock=lambda: next(now) / 10)
    error = failed(RuntimeError("died"))
    decisions = [policy.make_decision(error) for _ in range(adapter.CIRCLE_FAILURES)]
    assert decisions[:-1] == [FailureDecision.RETRY] * (adapter.CIRCLE_FAILURES - 1)
    assert decisions[-1] is FailureDecision.RAISE


def test_failures_with_a_process_start_in_between_are_no_circle() -> None:
    now = iter(range(1000))
    policy = adapter.RunFailurePolicy(Say(True), clock=lambda: next(now))
    decisions = {policy.make_decision(failed(RuntimeError("died"))) for _ in range(50)}
    assert decisions == {FailureDecision.RETRY}


def test_processes_can_be_started_ahead_with_a_hook_of_ours() -> None:
    assert prestart.HOOK == ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR
    fields = node_manager_pb2.PrestartWorkersRequest.DESCRIPTOR.fields_by_name
    assert {"language", "job_id", "runtime_env_info", "num_workers"} < set(fields)
    assert "keep_alive_duration_secs" in fields
    assert callable(RuntimeContext.get_runtime_env_string)
    source = Path(ray.__file__).with_name("_private") / "workers" / "default_worker.py"
    assert "load_and_execute_setup_hook(" in source.read_text()
    assert "if worker_process_setup_hook_key:" in source.read_text()  # empty: none


@pytest.mark.parametrize(
    ("nodes", "marked"),
    [
        ([("a", True, {}), ("b", True, {home.HEAD: 1.0})], True),
        ([("a", True, {}), ("b", False, {home.HEAD: 1.0})], False),
        ([("a", True, {"CPU": 4.0})], False),
        ([], False),
    ],
)
def test_what_decides_lives_on_the_head_node_if_ray_marks_one(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[str, bool, dict[str, float]]], marked: bool
) -> None:
    keys = ("NodeID", "Alive", "Resources")
    found = [dict(zip(keys, node, strict=True)) for node in nodes]
    monkeypatch.setattr(ray, "nodes", lambda: found)
    assert home.home() == ({home.HEAD: home.SHARE} if marked else {})
    assert home.HEAD == HEAD_NODE_RESOURCE_NAME
