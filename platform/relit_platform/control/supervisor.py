"""RunSupervisor: the detached actor that sees one run to its end.

    lease -> manager -> fit() -> classify -> back off -> fit() ... -> result.json -> clean up

Ray re-creates it after a SIGKILL (`max_restarts=-1`); its work is driven by a thread of its own,
never by a caller's method, because the caller may be gone. Each `fit` runs under an epoch of its
own: the next number of the lease in the run directory. Whoever holds an older epoch, a second
driver, a supervisor cut off by a partition, or a worker that outlived its controller, is refused by
the store, the manager and the agents alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import traceback
from importlib import import_module
from typing import Any

import ray

from relit_platform.control.cleanup import close_run
from relit_platform.control.home import home
from relit_platform.control.manager import get_or_create_manager
from relit_platform.control.pump import Pump
from relit_platform.facts import Fact
from relit_platform.machines.restart import RestartState, advance, ending, tries_again
from relit_platform.machines.shortage import shortage
from relit_platform.ray_train.groups import remove_groups, waits_for_place
from relit_platform.run_config import RunConfig
from relit_platform.worker.manager_client import NAMESPACE, ManagerClient
from relit_storage.errors import (
    FencedError,
    LeaseHeldError,
    RelitError,
    StoreError,
    StoreUnavailableError,
)
from relit_storage.run import layout
from relit_storage.run.lease import Lease, read_lease
from relit_storage.stores.opening import open_store
from relit_storage.stores.prefixed import PrefixedStore

RUNNING, SUCCEEDED, FAILED = "RUNNING", "SUCCEEDED", "FAILED"
FINISH_WAIT_S = 120.0
START_EPOCH_S = 600.0
RESCUE_TIMEOUT_S = 60.0  # of its question to every agent, 5 s for one that does not answer
ADAPTER = "relit_platform.ray_train.adapter"


def supervisor_name(run_id: str) -> str:
    """The named actor of a run's supervisor."""
    return f"supervisor/{run_id}"


class RunSupervisor:
    """See the module's text. One per run; Ray calls the constructor again after each death."""

    def __init__(self, store_url: str, run_key: str) -> None:
        self._store = PrefixedStore(open_store(store_url), run_key)
        self._run_key = run_key
        context = ray.get_runtime_context()
        self._cluster = f"{context.gcs_address}/"
        self._holder = f"{self._cluster}{context.get_actor_id()}"
        self._lease: Lease | None = None
        self._pump: Pump | None = None
        self._refused = ""
        self._attempt = 0
        self._started = threading.Event()
        threading.Thread(target=self._run, name="supervise", daemon=True).start()

    # ---- what others may call ----

    def ping(self) -> int:
        """The supervisor's pid; answers at once."""
        return os.getpid()

    def refused(self, wait_s: float) -> str:
        """Why this supervisor may not run the run, '' if it may; waits for the lease to settle."""
        self._started.wait(wait_s)
        return self._refused

    def stop(self, reason: str) -> None:
        """Ask for a stop at the next boundary; returns at once."""
        if self._pump is not None:
            self._pump.request_stop(reason)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            config = RunConfig.from_json(json.loads(self._store.get(layout.RESOLVED)))
            if self._store.size(layout.RESULT) is None:
                self._supervise(config)
            else:
                self._started.set()
                self._clean_up_after(config)
        except LeaseHeldError as held:
            self._refused = str(held)
        except Exception:
            # Nobody waits for this thread, so the log must say why it ended.
            traceback.print_exc()
            self._refused = self._refused or traceback.format_exc(limit=1)
        finally:
            self._started.set()
            self._leave()

    def _clean_up_after(self, config: RunConfig) -> None:
        """The supervisor before this one died between its result and its clean-up. While this one
        lives, no other of the run begins on this cluster.
        """
        try:
            outcome = json.loads(self._store.get(layout.RESULT))
            close_run(config, keep_disk=outcome.get("state") != SUCCEEDED)
        except Exception:  # no reason to refuse the run to whoever resumes it
            traceback.print_exc()

    def _supervise(self, config: RunConfig) -> None:
        # Importing Ray Train takes over a second: done while the manager's process starts.
        threading.Thread(target=import_module, args=[ADAPTER], daemon=True).start()
        self._lease = self._take(config)
        get_or_create_manager(config)
        manager = ManagerClient(config.run_id)
        self._pump = Pump(
            store=self._store,
            config=config,
            manager=manager,
            lease=self._lease,
            why_waiting=lambda: _why_waiting(config),
        )
        self._pump.keep_lease(lambda: self._give_way(config))
        self._start_epoch(config)
        about = {"epoch": self._lease.epoch, "pid": os.getpid(), "after": self._pump.taken_over}
        self._pump.fact(self._fact("run.epoch", about))
        self._pump.set_state(RUNNING)
        self._pump.start()
        self._started.set()
        state, reason = self._until_done(config, manager)
        self._finish(config, manager, state, reason)

    def _start_epoch(self, config: RunConfig) -> None:
        """Tell the manager, which asks every agent first: it has time, for the lease is renewed."""
        assert self._pump is not None and self._lease is not None
        patient = ManagerClient(config.run_id, START_EPOCH_S)
        patient.link.call("start_epoch", self._lease.epoch, self._pump.history())

    def _take(self, config: RunConfig) -> Lease:
        """The next epoch. A lease that is not renewed while we watch belongs to a dead driver."""
        give_up_s = time.monotonic() + 3 * config.recovery.lease_s
        while True:
            try:
                return Lease.take(
                    self._store, config.run_id, self._holder, time.time(), config.recovery.lease_s
                )
            except LeaseHeldError as held:
                late = time.monotonic() > give_up_s
                if late or self._is_renewed(held, config.recovery.lease_s):
                    raise
                time.sleep(0.5)
            except StoreUnavailableError:
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(1.0)

    def _is_renewed(self, held: LeaseHeldError, lease_s: float) -> bool:
        before = self._store.get(layout.lease_key(held.epoch))
        time.sleep(lease_s / 2)
        return self._store.get(layout.lease_key(held.epoch)) != before

    def _until_done(self, config: RunConfig, manager: ManagerClient) -> tuple[str, str]:
        assert self._pump is not None and self._lease is not None
        restarts = RestartState()
        while True:
            error = self._fit(config)
            status = manager.link.call("status")
            if self._pump.fenced:
                raise FencedError(what="epoch", ours=self._lease.epoch, newest=self._pump.fenced)
            over = ending(status, failed=error is not None)
            if over is not None:
                return over
            step = int(status.get("step") or 0)
            restarts, decision = advance(restarts, step, config.recovery)
            if not decision.go_on:
                return FAILED, f"{decision.reason}; the last error was: {str(error)[:500]}"
            self._pump.fact(
                self._fact(
                    "run.restarting",
                    {
                        "error": str(error)[:2000],
                        "reason": decision.reason,
                        "backoff_s": decision.backoff_s,
                        "completed_step": status.get("completed_step"),
                    },
                )
            )
            time.sleep(decision.backoff_s)
            self._lease = self._pump.next_epoch(lambda: self._take(config))
            self._start_epoch(config)

    def _fact(self, kind: str, data: dict[str, Any]) -> Fact:
        level: Any = "warning" if kind in ("run.restarting", "ray.seam_missing") else "info"
        return Fact(kind=kind, at_s=time.time(), src="supervisor", level=level, data=data)

    def _fit(self, config: RunConfig) -> Exception | None:
        from relit_platform.ray_train.adapter import FitRequest, fit, missing_seams
        from relit_platform.ray_train.prestart import rank_env
        from relit_platform.worker.start import train_worker

        assert self._lease is not None and self._pump is not None
        for seam in missing_seams():
            self._pump.fact(self._fact("ray.seam_missing", {"seam": seam}))
        self._attempt += 1
        scaling, run_id = config.scaling, config.run_id
        request = FitRequest(
            run_id=run_id,
            train_fn=train_worker,
            loop_config={"run": config.to_json(), "epoch": self._lease.epoch},
            num_workers=scaling.workers + scaling.spares,
            cpus_per_worker=scaling.cpus_per_worker,
            gpus_per_worker=scaling.gpus_per_worker,
            placement=scaling.placement,
            name=f"{run_id}-e{self._lease.epoch}",
            storage_path=os.path.join(config.checkpoint.disk_dir, run_id, "ray_train"),
            verdict=_Verdict(run_id, self._lease.epoch),
            env=rank_env(config),
        )
        try:
            remove_groups(run_id)  # of controllers that died, or must
            fit(request)
        except Exception as error:  # Ray's own tree, plus whatever a dying controller lets through
            return error
        return None

    def _finish(self, config: RunConfig, manager: ManagerClient, state: str, reason: str) -> None:
        assert self._pump is not None and self._lease is not None
        if state != SUCCEEDED:
            self._rescue(manager)
        status = self._settle(manager)
        result = {
            "v": 1,
            "run_id": config.run_id,
            "name": config.name,
            "state": state,
            "reason": reason,
            "verdict_code": status.get("verdict_code") or "",
            "value": status.get("value"),
            "step": status.get("step"),
            "committed": status.get("committed"),
            "loss": status.get("loss"),
            "total_steps": status.get("total_steps"),
            "finished_at_s": time.time(),
        }
        self._pump.close(state, reason, result)
        with contextlib.suppress(StoreError):  # it runs out by itself
            self._lease.release(time.time())
        close_run(config, keep_disk=state != SUCCEEDED)

    def _rescue(self, manager: ManagerClient) -> None:
        """The agents end with the run, and with them what is in memory. The result comes anyhow."""
        try:
            print(f"relit: {manager.link.call('rescue', timeout_s=RESCUE_TIMEOUT_S)}", flush=True)
        except (ray.exceptions.RayError, ValueError) as error:
            print(f"relit: what memory holds could not be saved: {error}", flush=True)

    def _settle(self, manager: ManagerClient) -> dict[str, Any]:
        """Wait until what the ranks left is durable, or until that stops making progress."""
        deadline_s = time.monotonic() + FINISH_WAIT_S
        while True:
            status: dict[str, Any] = manager.link.call("status")
            if not status.get("saving") or time.monotonic() > deadline_s:
                return status
            time.sleep(0.1)

    def _give_way(self, config: RunConfig) -> None:
        """Another supervisor drives the run. Our workers end with this actor, their owner; the
        manager and the agents end too, unless it is of this cluster and has taken them over.
        """
        print("relit: another supervisor has taken this run over; leaving", flush=True)
        try:
            lease = read_lease(self._store)
            if lease is not None and not lease.holder.startswith(self._cluster):
                close_run(config, keep_disk=True)
        except StoreError as error:
            print(f"relit: cannot tell who has taken over: {error}", flush=True)
        finally:
            self._leave()

    def _leave(self) -> None:
        """End this actor for good: `max_restarts=-1` would otherwise bring it back."""
        time.sleep(1.0)  # an entrypoint that asks `refused` gets its answer
        try:
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
        except (RelitError, ray.exceptions.RayError):
            os._exit(0)


def _why_waiting(config: RunConfig) -> str:
    """Asked by the pump while the run has no workers."""
    if not waits_for_place(config.run_id):
        return ""
    return shortage(config.scaling, ray.cluster_resources(), ray.available_resources())


class _Verdict:
    """Asked by the failure policy in the controller's process; picklable."""

    def __init__(self, run_id: str, epoch: int) -> None:
        self._run_id = run_id
        self._epoch = epoch

    def __call__(self, error_text: str, final: bool) -> tuple[bool, str]:
        if final:
            return False, "the user's code failed for good"
        try:
            manager = ray.get_actor(f"manager/{self._run_id}", namespace=NAMESPACE)
            status = ray.get(manager.status.remote(), timeout=5.0)
        except (ray.exceptions.RayError, ValueError):
            return True, "the manager does not answer; replacing the worker does no harm"
        return tries_again(status, self._epoch, error_text)


def get_or_create_supervisor(store_url: str, run_key: str) -> Any:
    """The run's supervisor actor, made if there is none. Called by the Ray Job's entrypoint.

    Detached, on the head node, no CPU, re-created by Ray whenever its process dies.
    """
    run_id = run_key.rsplit("/", 1)[-1]
    actor = ray.remote(RunSupervisor).options(
        name=supervisor_name(run_id),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=16,
        resources=home(),
    )
    return actor.remote(store_url, run_key)
