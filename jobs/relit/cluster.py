"""Which Ray cluster to submit to: the one named, or a local one that relit keeps.

    --address / address=...    used as it is, never ended by relit
    RAY_ADDRESS, RAY_API_SERVER_ADDRESS      the same, from the environment
    neither                    a local cluster on 127.0.0.1, shared by all runs of this user,
                               started when missing, ended when idle (see relit.keeper)

The local cluster is recorded in ~/.relit/cluster.json. Ray's authentication mode is set
explicitly everywhere: 2.60 turns tokens on by itself for some clusters, and a client without the
variable then gets 401. The local cluster is reachable through loopback only and runs without.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relit.errors import ClusterStartError, ClusterUnreachableError

START_TIMEOUT_S = 120.0
TEMP_PREFIX = "relit-"  # of Ray's session folder; short, because socket paths end at 107 bytes
_ANSWER_TIMEOUT_S = 5.0
_PATIENCE_S = 30.0  # with a cluster whose keeper lives
_SUBMIT_S = 10.0  # somebody who asked for the cluster this lately may be about to submit
_OVER = {"SUCCEEDED", "FAILED", "STOPPED"}
_PRIVATE = 0o600
_LOOPBACKS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """Where a cluster answers. gcs_address and the keeper's fields are empty for a named one."""

    dashboard_url: str
    gcs_address: str = ""
    started_here: bool = False
    keeper_pid: int = 0
    keeper_ticks: int = 0
    temp_dir: str = ""

    @property
    def local(self) -> bool:
        """True for the cluster that relit keeps."""
        return self.keeper_pid > 0


def state_dir() -> Path:
    """~/.relit, for this user alone; made if missing."""
    folder = Path.home() / ".relit"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def record_path() -> Path:
    """Where the keeper writes which cluster it keeps."""
    return state_dir() / "cluster.json"


def log_path() -> Path:
    """What the keeper and `ray start` say."""
    return state_dir() / "cluster.log"


def touch_path() -> Path:
    """Its time of change tells the keeper that somebody is about to submit."""
    return state_dir() / "cluster.used"


def ensure_cluster(address: str | None = None) -> ClusterInfo:
    """A cluster that answers, started if none is named. Blocks for seconds if it must start.

    ClusterUnreachableError for a named cluster that does not answer, ClusterStartError for a
    local one that does not come up.
    """
    named = cluster_named(address)
    return _named_cluster(named) if named else ensure_local_cluster()


def ensure_local_cluster() -> ClusterInfo:
    """The local cluster, started if it is not up."""
    with cluster_lock(START_TIMEOUT_S):
        touch_path().touch(mode=_PRIVATE)
        return local_cluster() or _once_it_answers() or _start_keeper()


def cluster_named(address: str | None) -> str:
    """The address given, or the environment's, or '' for the local cluster."""
    environ = os.environ
    return address or environ.get("RAY_API_SERVER_ADDRESS") or environ.get("RAY_ADDRESS") or ""


def local_cluster() -> ClusterInfo | None:
    """The local cluster if it is there and answers."""
    info = read_record()
    if info and process_ticks(info.keeper_pid) == info.keeper_ticks and answers(info.dashboard_url):
        return info
    return None


def _once_it_answers() -> ClusterInfo | None:
    """The cluster of a keeper that lives, for a busy machine lets its dashboard wait; None: no
    keeper lives. Never another one beside it: its files are those of what trains there.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while (info := read_record()) and process_ticks(info.keeper_pid) == info.keeper_ticks:
        if answers(info.dashboard_url):
            return info
        if time.monotonic() > deadline_s:
            cause = f"the one that is there (keeper {info.keeper_pid}) lives, but does not answer"
            raise ClusterStartError(cause=cause, log=str(log_path()))
        time.sleep(0.25)
    return None


def stop_local_cluster(timeout_s: float = 60.0) -> bool:
    """End the local cluster and wait until its keeper is gone; False if there was none."""
    info = read_record()
    if info is None or process_ticks(info.keeper_pid) != info.keeper_ticks:
        return False
    os.kill(info.keeper_pid, 15)
    deadline_s = time.monotonic() + timeout_s
    while process_ticks(info.keeper_pid) == info.keeper_ticks:
        if time.monotonic() > deadline_s:
            raise ClusterStartError(cause="it does not end", log=str(log_path()))
        time.sleep(0.05)
    return True


def end_if_unused(timeout_s: float = 30.0) -> bool:
    """End the local cluster before its keeper would, if nothing runs on it; False if it stays.

    Waits `timeout_s` for what is just ending. For whoever started it for one purpose, the demo.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        found = local_cluster()
        if found is None:
            return False
        if not in_use(found.dashboard_url) and time.time() - touched_s() > _SUBMIT_S:
            with cluster_lock(timeout_s):  # no starter may find it while it ends
                if not in_use(found.dashboard_url) and time.time() - touched_s() > _SUBMIT_S:
                    return stop_local_cluster()
        time.sleep(0.25)
    return False


def in_use(dashboard_url: str) -> bool:
    """True if a job or a supervisor lives on a cluster, or nobody can tell."""
    try:
        jobs = _get(f"{dashboard_url}/api/jobs/")
        if any(job.get("status") not in _OVER for job in jobs):
            return True
        query = "limit=1000&filter_keys=state&filter_predicates=!%3D&filter_values=DEAD"
        answer = _get(f"{dashboard_url}/api/v0/actors?{query}")
        actors = answer["data"]["result"]["result"]
        return any(str(actor.get("name", "")).startswith("supervisor/") for actor in actors)
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return True


def touched_s() -> float:
    """When the local cluster was last asked for, in Unix seconds."""
    try:
        return touch_path().stat().st_mtime
    except OSError:
        return 0.0


def set_auth_mode(local: bool) -> None:
    """Set RAY_AUTH_MODE for this process, before ray is imported; the user's choice stays.

    Also RAY_USAGE_STATS_ENABLED=0: nothing is reported to anybody.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if local:
        without_proxy_for_loopback(os.environ)
        os.environ["RAY_AUTH_MODE"] = "disabled"
        return
    has_token = any(os.environ.get(f"RAY_AUTH_TOKEN{end}") for end in ("", "_PATH"))
    os.environ.setdefault("RAY_AUTH_MODE", "token" if has_token else "disabled")


def answers(dashboard_url: str, timeout_s: float = _ANSWER_TIMEOUT_S) -> bool:
    """True if a Ray dashboard answers there, 401 included: it is one, with tokens on."""
    return not _why_silent(dashboard_url, timeout_s)


def _named_cluster(address: str) -> ClusterInfo:
    if address.startswith("ray://"):
        cause = "ray:// is the Ray client's port; relit needs the dashboard's, http://host:8265"
        raise ClusterUnreachableError(address=address, cause=cause)
    url = address if address.startswith(("http://", "https://")) else ""
    if not url:
        return ClusterInfo(dashboard_url="", gcs_address=address)
    cause = _why_silent(url.rstrip("/"), _ANSWER_TIMEOUT_S)
    if cause:
        raise ClusterUnreachableError(address=address, cause=cause)
    return ClusterInfo(dashboard_url=url.rstrip("/"))


def _get(url: str) -> Any:
    with open_url(url, timeout_s=10.0) as answer:
        return json.load(answer)


def open_url(url: str, timeout_s: float) -> Any:
    """As urlopen; but no proxy knows this machine's loopback, whatever the environment says."""
    if urllib.parse.urlsplit(url).hostname not in _LOOPBACKS:
        return urllib.request.urlopen(url, timeout=timeout_s)
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=timeout_s)


def without_proxy_for_loopback(environ: MutableMapping[str, str]) -> None:
    """The same for Ray's own clients, which go by the environment."""
    names = ("no_proxy", "NO_PROXY")  # some programs know only one of them
    listed = ",".join(environ.get(name, "") for name in names).split(",")
    named = dict.fromkeys(host.strip() for host in listed if host.strip())
    hosts = ",".join(
        named if "*" in named else [*named, *(h for h in _LOOPBACKS if h not in named)]
    )
    environ.update(dict.fromkeys(names, hosts))


def _why_silent(url: str, timeout_s: float) -> str:
    try:
        with open_url(f"{url}/api/version", timeout_s) as answer:
            json.load(answer)
    except urllib.error.HTTPError as error:
        return "" if error.code in (401, 403) else f"HTTP {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
    return ""


def _start_keeper() -> ClusterInfo:
    """Start the keeper detached from this process and wait for its record."""
    _forget_dead_cluster()
    log = os.open(log_path(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE)
    try:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "relit.keeper"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(log)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        info = read_record()
        if info and info.keeper_pid == keeper.pid:
            return ClusterInfo(**{**asdict(info), "started_here": True})
        if keeper.poll() is not None:
            cause = f"its keeper ended with code {keeper.returncode}; {_log_tail()}"
            raise ClusterStartError(cause=cause, log=str(log_path()))
        time.sleep(0.02)
    keeper.terminate()
    raise ClusterStartError(cause=f"not up after {START_TIMEOUT_S:.0f} s", log=str(log_path()))


def _forget_dead_cluster() -> None:
    """Remove what a killed keeper could not: its record and Ray's session files."""
    info = read_record()
    if info and Path(info.temp_dir).name.startswith(TEMP_PREFIX):
        shutil.rmtree(info.temp_dir, ignore_errors=True)
    record_path().unlink(missing_ok=True)


def _log_tail() -> str:
    try:
        lines = log_path().read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][:300] if lines else ""


def read_record() -> ClusterInfo | None:
    """The recorded local cluster, alive or not."""
    try:
        return ClusterInfo(**json.loads(record_path().read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_record(info: ClusterInfo) -> None:
    """Replace the record; readers see the old one or the new one."""
    path = record_path()
    fresh = path.with_suffix(f".{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE)
    with os.fdopen(fd, "w") as file:
        json.dump(asdict(info), file)
    fresh.replace(path)


@contextmanager
def cluster_lock(timeout_s: float) -> Iterator[None]:
    """One starter or ender at a time, over all processes of this user."""
    fd = os.open(state_dir() / "cluster.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE)
    deadline_s = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    cause = "another process holds ~/.relit/cluster.lock"
                    raise ClusterStartError(cause=cause, log=str(log_path())) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)  # releases the lock


def process_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if it is gone or a zombie.

    A pid alone may be used again by another process; pid and start time are not.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])
