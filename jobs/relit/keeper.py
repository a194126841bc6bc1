"""The keeper of the local Ray cluster: `python -m relit.keeper`, started by relit.cluster.

    start `ray start --head --block` -> record it -> watch -> idle for IDLE_S or SIGTERM -> end it

It owns every process of the cluster: it is the reaper of its orphaned descendants, so at the end
it can wait for each of them by name of pid and leave none behind; Ray itself is told to die with
it. Nothing but its own descendants is ever signalled (`ray stop` would end every Ray process of
the user, other clusters included).

Every socket is bound to 127.0.0.1. Ray replaces a loopback `--node-ip-address` by the outward
address and then listens on all interfaces; RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, Ray's switch for
laptops, stops that in every one of its processes. No socket of Ray 2.60 is left on another address
(checked with ss by tests/cluster and `relit doctor`).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from relit.cluster import (
    TEMP_PREFIX,
    ClusterInfo,
    answers,
    cluster_lock,
    in_use,
    process_ticks,
    read_record,
    record_path,
    touched_s,
    without_proxy_for_loopback,
    write_record,
)

LOOPBACK = "127.0.0.1"
TEMP_SUBFOLDER = "tmp"
IDLE_S = 60.0
_POLL_S = 0.5
_LOOK_S = 5.0  # how often the cluster is asked what runs
_START_S = 90.0
_STOP_S = 20.0
_KILL_S = 10.0
_DASHBOARD_PORT = 8265
_OBJECT_STORE_BYTES = 100_000_000  # no tensor goes through it
_MIN_CPUS = 8  # Ray's CPUs are counters: two ranks and a spare shall fit on a laptop
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Keeper:
    """Starts, watches and ends one local cluster. Single-threaded; `run` is its whole life."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._stop = False
        self._head: subprocess.Popen[bytes] | None = None
        self._info = ClusterInfo(dashboard_url="")
        self._temp_dir = ""

    def run(self) -> int:
        """Blocks until the cluster has ended; the process's exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            if not self._start():
                return 1
            self._watch()
        finally:
            self._end()
        return 0

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop = True

    def _start(self) -> bool:
        self._temp_dir = tempfile.mkdtemp(prefix=TEMP_PREFIX)
        os.mkdir(os.path.join(self._temp_dir, TEMP_SUBFOLDER))
        gcs, client = free_port(), free_port()
        dashboard = free_port(preferred=_DASHBOARD_PORT)
        self._info = ClusterInfo(
            dashboard_url=f"http://{LOOPBACK}:{dashboard}",
            gcs_address=f"{LOOPBACK}:{gcs}",
            keeper_pid=os.getpid(),
            keeper_ticks=process_ticks(os.getpid()),
            temp_dir=self._temp_dir,
        )
        self._head = subprocess.Popen(
            start_command(gcs, dashboard, client, self._temp_dir),
            env=ray_environment(self._info, dict(os.environ)),
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
        )
        return self._wait_until_up()

    def _wait_until_up(self) -> bool:
        assert self._head is not None
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s and not self._stop:
            if self._head.poll() is not None:
                print(f"ray start ended with code {self._head.returncode}", flush=True)
                return False
            if answers(self._info.dashboard_url, timeout_s=1.0):
                write_record(self._info)
                return True
            time.sleep(0.05)
        print(f"no dashboard after {_START_S:.0f} s", flush=True)
        return False

    def _watch(self) -> None:
        assert self._head is not None
        last_used_s = look_s = time.time()
        while not self._stop and self._head.poll() is None:
            time.sleep(_POLL_S)
            now = time.time()
            if now < look_s:
                continue
            look_s = now + _LOOK_S
            if in_use(self._info.dashboard_url):
                last_used_s = now
            if now - max(last_used_s, touched_s()) > self._idle_s and self._may_end():
                return

    def _may_end(self) -> bool:
        """Look again with starters locked out; the record goes first, so none finds us ending."""
        with cluster_lock(_STOP_S):
            url = self._info.dashboard_url
            if in_use(url) or time.time() - touched_s() < self._idle_s:
                return False
            self._forget()
            return True

    def _end(self) -> None:
        """End every process of the cluster, then its files. The record goes first, so none finds us
        ending; who waits for the end waits for this process's.
        """
        self._forget()
        if self._head is not None and self._head.poll() is None:
            self._head.send_signal(signal.SIGTERM)
            try:
                self._head.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._head.kill()
        end_descendants(_KILL_S)
        if self._temp_dir:
            shutil.rmtree(self._temp_dir, ignore_errors=True)

    def _forget(self) -> None:
        recorded = read_record()
        if recorded and recorded.keeper_pid == os.getpid():
            record_path().unlink(missing_ok=True)


def start_command(gcs: int, dashboard: int, client: int, temp_dir: str) -> list[str]:
    """`ray start` for a head that only this machine can reach; port 0 lets Ray choose."""
    cpus = max(_MIN_CPUS, os.cpu_count() or 1)
    options = {
        "node-ip-address": LOOPBACK,
        "port": gcs,
        "dashboard-host": LOOPBACK,
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": 0,
        "dashboard-agent-grpc-port": 0,
        "metrics-export-port": 0,
        "min-worker-port": 0,
        "max-worker-port": 0,
        "ray-client-server-port": client,  # cannot be turned off when grpcio is installed
        "object-store-memory": _OBJECT_STORE_BYTES,
        "num-cpus": cpus,
        "temp-dir": temp_dir,
        # Ranks write their own logs into the run directory; one process less.
        "include-log-monitor": "false",
    }
    flags = ["--head", "--block", "--disable-usage-stats", "--no-monitor"]
    valued = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *flags, *valued]


def ray_environment(info: ClusterInfo, inherited: dict[str, str]) -> dict[str, str]:
    """The variables of every process of the cluster."""
    own_python = str(Path(sys.executable).parent)
    inherited = dict(inherited)
    without_proxy_for_loopback(inherited)
    return {
        **inherited,
        "PATH": f"{own_python}{os.pathsep}{inherited.get('PATH', os.defpath)}",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # see the module's text
        # With several clusters on a host, Ray's own helpers pick a wrong one without it.
        "RAY_ADDRESS": info.gcs_address,
        # What killed processes could not remove (multiprocessing, torch's caches) ends with us.
        "TMPDIR": os.path.join(info.temp_dir, TEMP_SUBFOLDER),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "2",
        "RAY_DEDUP_LOGS": "0",
        "PYTHONUNBUFFERED": "1",
    }


def free_port(preferred: int = 0) -> int:
    """A free TCP port on loopback; `preferred` if that is free."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no free port on loopback")


def end_descendants(timeout_s: float) -> None:
    """SIGTERM, then SIGKILL, to every descendant of this process, until each is reaped."""
    began = time.monotonic()
    number = signal.SIGTERM
    while living := descendants(os.getpid()):
        if time.monotonic() - began > timeout_s:
            print(f"processes that do not end: {living}", flush=True)
            return
        for pid in living:
            _signal(pid, number)
        for _ in range(20):
            _reap()
            if not descendants(os.getpid()):
                return
            time.sleep(0.05)
        number = signal.SIGKILL


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # ended by itself since we listed it


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def descendants(root: int) -> list[int]:
    """Pids below `root`, zombies that only need reaping left out."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended while we looked
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(Keeper().run())
