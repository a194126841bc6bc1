"""The CheckpointManager: a coordinator inside a detached Ray actor, one per run.

Found by name ("manager/<run_id>", namespace "relit"), on the supervisor's node, without CPUs,
re-created by Ray as often as it dies. A new life knows nothing until the supervisor, which sees its
pid or epoch change, calls start_epoch; ranks that ask in the meantime wait. A running generation
does not need it. It never imports torch.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import ray

from relit_platform.control.agent_calls import NAMESPACE, RayAgents
from relit_platform.control.background import Background
from relit_platform.control.coordinator import Coordinator
from relit_platform.control.home import home
from relit_platform.control.object_tier import ObjectTier
from relit_platform.facts import Drained, JoinReply, JoinRequest, RowBatch, RunHistory
from relit_platform.run_config import RunConfig
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.stores.opening import open_store
from relit_storage.stores.prefixed import PrefixedStore

FINISHED_WAIT_S = 20.0  # less than the caller waits; it asks again
CONCURRENCY = 64  # 48 of them may be blocked in joins; see Coordinator


class CheckpointManager:
    """The actor's class. Every method may be repeated; see Coordinator for what they do.

    Its constructor does work, against the rule of the house, because it is the only thing that
    Ray calls when it re-creates the actor.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        run = RunConfig.from_json(config)
        store = PrefixedStore(open_store(run.store), run.run_key)
        self._coordinator = Coordinator(
            config=run,
            agents=RayAgents(run.run_id),
            objects=ObjectTier(store, CommitLog(store), time.time),
            background=Background(_report),
            clock=time.time,
            steady=time.monotonic,
            sleep=time.sleep,
        )

    def ping(self) -> int:
        """The manager's pid; answers at once."""
        return os.getpid()

    def start_epoch(self, epoch: int, history: RunHistory | None = None) -> int:
        """See Coordinator.start_epoch."""
        return self._coordinator.start_epoch(epoch, history)

    def join(self, request: JoinRequest, wait_s: float) -> JoinReply:
        """See Coordinator.join."""
        return self._coordinator.join(request, wait_s)

    def lost(self, generation: int) -> bool:
        """See Coordinator.lost."""
        return self._coordinator.lost(generation)

    def fact(self, fact: object) -> None:
        """See Coordinator.fact."""
        self._coordinator.fact(fact)

    def persisting(
        self, step: int, generation: int, rank: int, world: int, final: bool = False
    ) -> None:
        """See Coordinator.persisting."""
        self._coordinator.persisting(step, generation, rank, world, final)

    def rows(self, batch: RowBatch) -> int:
        """See Coordinator.rows."""
        return self._coordinator.rows(batch)

    def spacing(self) -> float:
        """See Coordinator.spacing."""
        return self._coordinator.spacing()

    def finished(self, worker_id: str, rank: int, value_json: str, stopped: bool = False) -> bool:
        """See Coordinator.finished. Waits for the epoch to be known; False if it is not yet."""
        deadline_s = time.monotonic() + FINISHED_WAIT_S
        while not self._coordinator.finished(worker_id, rank, value_json, stopped):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
        return True

    def user_error(
        self,
        worker_id: str,
        rank: int,
        step: int,
        error_type: str,
        message: str,
        traceback_text: str,
    ) -> tuple[bool, str]:
        """See Coordinator.user_error."""
        return self._coordinator.user_error(
            worker_id, rank, step, error_type, message, traceback_text
        )

    def request_stop(self, reason: str) -> None:
        """See Coordinator.request_stop."""
        self._coordinator.request_stop(reason)

    def rescue(self) -> str:
        """See Coordinator.rescue."""
        return self._coordinator.rescue()

    def drain(self, after: int, written: int | None = None) -> Drained:
        """See Coordinator.drain; its status also has manager_pid."""
        drained = self._coordinator.drain(after, written)
        drained.status["manager_pid"] = os.getpid()
        return drained

    def status(self) -> dict[str, Any]:
        """See Coordinator.status; with manager_pid."""
        return {**self._coordinator.status(), "manager_pid": os.getpid()}


def _report(trace: str) -> None:
    print(f"relit: manager work failed:\n{trace}", file=sys.stderr, flush=True)


def get_or_create_manager(config: RunConfig) -> Any:
    """The handle of a run's manager; does not wait for it to be up. Racing is harmless."""
    actor = ray.remote(CheckpointManager)
    return actor.options(
        name=f"manager/{config.run_id}",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,  # callers repeat calls themselves; see worker.manager_client
        max_concurrency=CONCURRENCY,
        resources=home(),
    ).remote(config.to_json())
