"""JobHandle: one run, seen and steered through its directory.

Everything but `resume` works without a cluster, from any machine that reaches the store. Calls
block for a few small reads of the store; the `follow` iterators poll it and end with the run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from relit.commands import send_command
from relit.errors import ClusterUnreachableError, NotFinishedError, RunFinishedError
from relit.reading import RunReader
from relit.run_state import IMPORTED, LOST, OVER, PENDING, TERMINAL
from relit.spec.resolve import run_directory
from relit.spec.secret_guard import Redactor

if TYPE_CHECKING:
    from relit.client import Client
    from relit.spec.model import JobSpec

_POLL_S = 0.25
_JOB_LOOK_S = 5.0
_LOST_GRACE_S = 60.0  # Ray brings a killed supervisor back within seconds
_NAMESPACE = "relit"


class JobHandle:
    """A run by its id. Got from `submit` or `Client.get`; as good in any other process."""

    def __init__(self, reader: RunReader, client: Client) -> None:
        self._reader = reader
        self._client = client
        self._redact = Redactor.from_environment()

    def __repr__(self) -> str:
        return f"<JobHandle {self.id} in {self._client.store_url}>"

    @property
    def id(self) -> str:
        """The run id."""
        return self._reader.run_id

    @property
    def reader(self) -> RunReader:
        """The run directory."""
        return self._reader

    @property
    def path(self) -> str:
        """Where the run directory lies: a local path or a URL."""
        return run_directory(self._client.store_url, self._reader.run_key)

    def status(self) -> dict[str, Any]:
        """Live state: state, reason, step, loss, world, committed, ... (docs: run directory)."""
        return self._reader.status()

    def events(self, since: int = 0, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Events above sequence number `since`; with follow, also those to come."""
        follower, is_over = self._reader.follower(), self._ending()
        while True:
            over = not follow or is_over()  # before reading: nothing may slip between
            yield from (event for event in follower.poll() if event["seq"] > since)
            if over:
                return
            time.sleep(_POLL_S)

    def incidents(self) -> list[dict[str, Any]]:
        """One record for each recovery, oldest first."""
        return self._reader.incidents()

    def metrics(self) -> list[dict[str, Any]]:
        """Committed metric rows, one for each step."""
        return self._reader.rows()

    def logs(
        self, rank: int | None = None, worker: str | None = None, follow: bool = False
    ) -> Iterator[str]:
        """Text of workers' logs, segment by segment; of one rank's present holder or one worker.

        Values of this process's secret-like variables are masked.
        """
        seen: set[str] = set()
        is_over = self._ending()
        while True:
            over = not follow or is_over()
            chosen = worker or (None if rank is None else self._reader.worker_of_rank(rank))
            if rank is None or chosen is not None:
                for key in self._reader.log_segments(chosen):
                    if key not in seen:
                        seen.add(key)
                        text = self._reader.store.get(key).decode("utf-8", "replace")
                        yield self._redact.text(text)
            if over:
                return
            time.sleep(_POLL_S)

    def result(self) -> dict[str, Any]:
        """result.json: state, reason, value, last step and loss. NotFinishedError before it."""
        found = self._reader.result()
        if found is None:
            status = self.status()
            raise NotFinishedError(run=self.id, state=status["state"], why=_why(status))
        return found

    def wait(
        self,
        timeout_s: float | None = None,
        on_status: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Block until the run is over; its last status, whatever the outcome.

        NotFinishedError after `timeout_s`, or when the run was lost for a minute or its job
        failed before a supervisor lived. `on_status` sees each poll.
        """
        began = lost_since = look_s = time.monotonic()
        while True:
            status = self.status()
            if on_status:
                on_status(status)
            if status["state"] in TERMINAL:
                return status
            now = time.monotonic()
            if status["state"] == IMPORTED:
                raise NotFinishedError(run=self.id, state=IMPORTED, why=status["reason"])
            lost_since = lost_since if status["state"] == LOST else now
            if now - lost_since > _LOST_GRACE_S:
                raise NotFinishedError(run=self.id, state=LOST, why=status["reason"])
            if status["state"] == PENDING and now - look_s > _JOB_LOOK_S:
                look_s = now
                self._raise_if_job_failed()
            if timeout_s is not None and now - began > timeout_s:
                why = f"waited {timeout_s:g} s; it goes on"
                raise NotFinishedError(run=self.id, state=status["state"], why=why)
            time.sleep(_POLL_S)

    def stop(self, reason: str = "stop asked for") -> int:
        """Ask for a commit at the next boundary and a stop; returns the command's number.

        The command lies in the run directory until the supervisor acknowledges it by an event.
        RunFinishedError if the run is over.
        """
        status = self.status()
        if status["state"] in TERMINAL or status["state"] == IMPORTED:
            raise RunFinishedError(run=self.id, state=status["state"], verb="stop")
        number = send_command(self._reader.store, "stop", self._redact.text(reason), time.time())
        self._tell_supervisor(reason)
        return number

    def resume(
        self,
        spec: JobSpec | None = None,
        overrides: Sequence[str] = (),
        allow: Sequence[str] = (),
    ) -> JobHandle:
        """Go on from the newest checkpoint under the same run id.

        Without arguments the run's own stored code and configuration are used again. A changed
        config, code or data set raises DriftError with the difference unless `allow` names it
        ("config", "code", "data").
        """
        return self._client.resume(self, spec=spec, overrides=overrides, allow=allow)

    def _ending(self) -> Callable[[], bool]:
        """Says whether the run is over. One that was alive and is lost may come back."""
        alive_s = float("-inf")

        def over() -> bool:
            nonlocal alive_s
            state, now_s = self.status()["state"], time.monotonic()
            if state not in OVER:
                alive_s = now_s
            return state in OVER and (state != LOST or now_s - alive_s > _LOST_GRACE_S)

        return over

    def _raise_if_job_failed(self) -> None:
        """A job that ended while no supervisor ever lived explains itself only in Ray."""
        attempts = self._reader.attempts()
        if not attempts:
            return
        try:
            job = self._client.transport.status(str(attempts[-1]["submission_id"]))
        except ClusterUnreachableError:
            return  # the run directory says what becomes of it
        if job and job[0] in ("FAILED", "STOPPED") and self.status()["state"] == PENDING:
            why = f"its Ray job {job[0].lower()}: {self._redact.text(job[1])[-1500:]}"
            raise NotFinishedError(run=self.id, state=PENDING, why=why)

    def _tell_supervisor(self, reason: str) -> None:
        """Faster than the command file, where this process is connected to the cluster."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        try:
            actor = ray.get_actor(f"supervisor/{self.id}", namespace=_NAMESPACE)
            actor.stop.remote(reason)
        except (ValueError, ray.exceptions.RayError):
            pass  # the command file is there; the supervisor reads it


def _why(status: Mapping[str, Any]) -> str:
    return str(status.get("reason") or f"at step {status.get('step', 0)}")
