"""Ray Train behind one door: only this package touches its internals (Ray 2.60.0, pinned exactly).

What it uses, and what happens when a seam is gone:

| seam | what for | without it |
|---|---|---|
| `Backend.has_replica_groups` | Ray replaces failed workers only | full restart on any failure |
| `DataParallelTrainer._initialize_and_run_controller` | our failure policy | Ray's own policy |
| `DataParallelTrainer._create_default_callbacks` | drop two callbacks, add two | stock ones |
| `worker_group.placement_group` | name the placement groups | groups of a dead job may stay |

`missing_seams()` names those that are gone; `fit` then falls back to stock behaviour and returns
a warning for each. `tests/unit/test_ray_contract.py` holds the signatures, so that a moved pin
fails there first. Dropped are the placement group cleaner, because with two Ray clusters on one
host it removes a healthy run's placement group (research: ray-train.md section 8), and the Ray Data
callback, because without a Ray data set it is only one more process for each start of workers, and
an import of ray.data in every rank. Added are those of repair.py and placement.py.
"""

from __future__ import annotations

import inspect
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.worker_group import worker_group
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from relit_platform.ray_train.backend import ReplicaBackendConfig
from relit_platform.ray_train.placement import MAKER, NamingCallback
from relit_platform.ray_train.repair import RepairCallback

DROPPED = frozenset({"PlacementGroupCleanerCallback", "DatasetsCallback"})
CIRCLE_FAILURES, CIRCLE_S = 10, 5.0  # so many failures in such a time
SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",  # a dead worker is replaced that much sooner
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",  # the run directory is the record, not the head node
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # the user's relative paths mean what they mean elsewhere
}


class RunFailurePolicy(FailurePolicy):  # type: ignore[misc]
    """Asks `verdict(error_text, user_final) -> (retry, reason)` for every failure of the group.

    Lives in the controller's process. The verdict is taken by the manager, which knows whether
    the run made progress; an unreachable manager means retry, because a failed status query is
    never a failure, and the supervisor's own budget still bounds a loop. A controller that fails
    again at once, without the time to start a process in between, runs in a circle: its life ends
    here, and the supervisor begins another.
    """

    def __init__(
        self,
        verdict: Callable[[str, bool], tuple[bool, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(FailureConfig(max_failures=-1))
        self._verdict = verdict
        self._clock = clock
        self._failed_at_s: deque[float] = deque(maxlen=CIRCLE_FAILURES)

    def make_decision(self, training_failed_error: Exception) -> FailureDecision:
        """RETRY, or RAISE where the verdict is final."""
        self._failed_at_s.append(self._clock())
        if self._runs_in_a_circle():
            print("relit failure policy: give up: the controller runs in a circle", flush=True)
            return FailureDecision.RAISE
        final = is_final(training_failed_error)
        retry, reason = self._verdict(str(training_failed_error), final)
        print(f"relit failure policy: {'retry' if retry else 'give up'}: {reason}", flush=True)
        return FailureDecision.RETRY if retry else FailureDecision.RAISE

    def _runs_in_a_circle(self) -> bool:
        times = self._failed_at_s
        return len(times) == CIRCLE_FAILURES and times[-1] - times[0] < CIRCLE_S


def is_final(error: BaseException) -> bool:
    """True if any worker ended with relit's mark for an error that must not be retried."""
    failures = getattr(error, "worker_failures", None) or {}
    return any("FinalUserError" in f"{type(e).__name__} {e!r} {e}" for e in failures.values())


class ReplicaTrainer(DataParallelTrainer):  # type: ignore[misc]
    """DataParallelTrainer with relit's failure policy and callbacks, without those in DROPPED."""

    relit_policy: FailurePolicy | None = None
    relit_run_id: str = ""

    def _create_default_callbacks(self) -> list[Any]:
        stock = super()._create_default_callbacks()
        kept = [callback for callback in stock if type(callback).__name__ not in DROPPED]
        ours: list[Any] = [RepairCallback()]
        if callable(getattr(worker_group, MAKER, None)):
            ours.append(NamingCallback(self.relit_run_id))
        return [*kept, *ours]

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Any:
        if self.relit_policy is not None and "failure_policy" in controller_init_kwargs:
            controller_init_kwargs["failure_policy"] = self.relit_policy
        return super()._initialize_and_run_controller(**controller_init_kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRequest:
    """One `fit()`: train_fn(loop_config) runs in each of num_workers workers, with `env` set."""

    run_id: str
    train_fn: Callable[[dict[str, Any]], Any]
    loop_config: dict[str, Any]
    num_workers: int
    cpus_per_worker: float
    gpus_per_worker: float
    placement: str
    name: str
    storage_path: str
    verdict: Callable[[str, bool], tuple[bool, str]]
    env: dict[str, str]


def missing_seams() -> list[str]:
    """Names of Ray internals that this adapter needs and this Ray does not have."""
    gone = []
    if not hasattr(Backend, "has_replica_groups"):
        gone.append("ray.train.backend.Backend.has_replica_groups")
    for name in ("_initialize_and_run_controller", "_create_default_callbacks"):
        if not callable(getattr(DataParallelTrainer, name, None)):
            gone.append(f"DataParallelTrainer.{name}")
    if not callable(getattr(worker_group, MAKER, None)):
        gone.append(f"ray.train's worker_group.{MAKER}")
    fit_source = inspect.getsource(DataParallelTrainer.fit)
    if "failure_policy=" not in fit_source:
        gone.append("DataParallelTrainer.fit(failure_policy=...)")
    return gone


def fit(request: FitRequest) -> list[str]:
    """Run one Ray Train run to its end; blocks. Returns warnings about missing seams.

    Called in a thread of the supervisor actor. Raises what Ray Train raises: `WorkerGroupError`
    when our policy gave up, `ControllerError` when the controller could not go on, and
    `RayActorError` when the controller died.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    resources = {"CPU": request.cpus_per_worker}
    if request.gpus_per_worker:
        resources["GPU"] = request.gpus_per_worker
    trainer = ReplicaTrainer(
        request.train_fn,
        train_loop_config=request.loop_config,
        backend_config=ReplicaBackendConfig(),
        scaling_config=ScalingConfig(
            num_workers=request.num_workers,
            use_gpu=request.gpus_per_worker > 0,
            resources_per_worker=resources,
            placement_strategy=request.placement,
        ),
        run_config=RunConfig(
            name=request.name,
            storage_path=request.storage_path,
            worker_runtime_env={"env_vars": request.env},
            failure_config=FailureConfig(max_failures=-1, controller_failure_limit=10),
        ),
    )
    trainer.relit_policy = RunFailurePolicy(request.verdict)
    trainer.relit_run_id = request.run_id
    trainer.fit()
    return [f"Ray moved: {name} is gone, falling back" for name in missing_seams()]
