"""How a run is handed to Ray: one small Protocol, and Ray's job client behind it.

The seam of this floor: tests bring a transport of their own, everything else goes through the
run directory.
"""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from relit.cluster import ClusterInfo, cluster_named, ensure_cluster, local_cluster, set_auth_mode
from relit.errors import BadInputError, ClusterUnreachableError

STOP_WAIT_S = 300  # `ray job stop` waits this long for the commit at the next boundary
OVER_IN_RAY = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
JOB_ENV = {"RAY_JOB_STOP_SIGNAL": "SIGTERM", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}


class JobTransport(Protocol):
    """What relit asks of a cluster's Jobs endpoint. Each call blocks for one round trip."""

    def connect(self) -> None:
        """Find the cluster, or start a local one; blocks for seconds if it must start.

        ClusterUnreachableError or ClusterStartError. Called before anything is written.
        """
        ...

    def submit(self, submission_id: str, entrypoint: str, metadata: Mapping[str, str]) -> bool:
        """Start a Ray job. Repeating the id of one that lives is no error: it is the same job.

        False, and nothing is started, if a job of this id is over: another id is needed.
        BadInputError if the id is taken by another run's job.
        """
        ...

    def status(self, submission_id: str) -> tuple[str, str] | None:
        """(status, message) of a Ray job; None if the cluster does not know it."""
        ...

    def where(self) -> str:
        """The dashboard's URL, for people."""
        ...


class RayJobs:
    """The Jobs endpoint of a Ray cluster; finds or starts it at the first call."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self._info: ClusterInfo | None = None
        self._client: Any = None

    def connect(self) -> None:
        """See JobTransport. Looks again each time for a local cluster, which ends when idle."""
        if not cluster_named(self._address):
            self._info = self._client = None
        self._connect()

    def submit(self, submission_id: str, entrypoint: str, metadata: Mapping[str, str]) -> bool:
        """See JobTransport. The runtime environment holds a few variables and no working_dir:
        the code travels through the run directory.
        """
        client = self._connect()
        try:
            client.submit_job(
                entrypoint=entrypoint,
                submission_id=submission_id,
                metadata=dict(metadata),
                runtime_env={"env_vars": JOB_ENV},
            )
        except (RuntimeError, OSError) as error:  # requests' errors are OSErrors
            there = self._job(client, submission_id)
            if there is None:
                raise self._unreachable(error) from None
            whose = (there.metadata or {}).get("run_directory")
            if whose != metadata.get("run_directory"):
                text = f"the cluster has a job {submission_id} of another run, {whose}"
                raise BadInputError(f"{text}; choose another run_id.") from None
            return str(there.status) not in OVER_IN_RAY
        return True

    def status(self, submission_id: str) -> tuple[str, str] | None:
        """See JobTransport. Never starts a cluster: one that is gone knows no job."""
        if self._info is None and not cluster_named(self._address):
            self._info = local_cluster()
            if self._info is None:
                return None
        info = self._job(self._connect(), submission_id)
        return None if info is None else (str(info.status), str(info.message or ""))

    def _job(self, client: Any, submission_id: str) -> Any:
        """What Ray knows of a job, or None."""
        try:
            return client.get_job_info(submission_id)
        except (RuntimeError, OSError) as error:
            if "404" in str(error) or "does not exist" in str(error):
                return None
            raise self._unreachable(error) from None

    def where(self) -> str:
        """See JobTransport."""
        return self._cluster().dashboard_url or str(self._address or os.environ.get("RAY_ADDRESS"))

    def _cluster(self) -> ClusterInfo:
        if self._info is None:
            self._info = ensure_cluster(self._address)
        return self._info

    def _connect(self) -> Any:
        if self._client is not None:
            return self._client
        set_auth_mode(local=not cluster_named(self._address))
        # Importing ray takes 1.5 s: done while the cluster starts, by those who submit alone.
        importing = threading.Thread(target=import_module, args=["ray.job_submission"], daemon=True)
        importing.start()
        info = self._cluster()
        importing.join()
        from ray.exceptions import RayError
        from ray.job_submission import JobSubmissionClient

        try:
            self._client = JobSubmissionClient(info.dashboard_url or info.gcs_address)
        except (RuntimeError, ConnectionError, ValueError, RayError) as error:
            raise self._unreachable(error) from None
        return self._client

    def _unreachable(self, error: Exception) -> ClusterUnreachableError:
        text = " ".join(str(error).split())
        cause = f"{text:.300}"
        if "401" in text or "nauthenticated" in text or "oken" in text:
            cause += "; the cluster wants a token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        return ClusterUnreachableError(address=self.where(), cause=cause)


def entrypoint_command(store: str, run_key: str, submission_id: str) -> str:
    """The shell line of the Ray job."""
    words = ["python", "-m", "relit.entrypoint"]
    words += ["--store", store, "--run-key", run_key, "--job", submission_id]
    return shlex.join(words)
