"""The local cluster's parts that need no Ray; the real one is in tests/cluster."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from relit import cluster, doctor, keeper
from relit.errors import ClusterStartError, ClusterUnreachableError

INFO = cluster.ClusterInfo(dashboard_url="http://127.0.0.1:1", keeper_pid=1, temp_dir="x")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://127.0.0.1:1", "refused"),
        ("ray://127.0.0.1:10001", "Ray client's port"),
        ("http://no-such-host.invalid:8265", "no-such-host"),
    ],
)
def test_an_unreachable_address_is_named(address: str, words: str) -> None:
    with pytest.raises(ClusterUnreachableError, match=words) as caught:
        cluster.ensure_cluster(address)
    assert address in str(caught.value)


def test_the_environment_names_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster.cluster_named(None) == ""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster.ensure_cluster().gcs_address == "10.0.0.1:6379"
    assert cluster.cluster_named("http://h:1") == "http://h:1"


@pytest.mark.parametrize(
    ("busy", "touched_ago_s", "ended"), [(False, 60, True), (True, 60, False), (False, 0, False)]
)
def test_a_cluster_is_ended_only_if_nobody_needs_it(
    monkeypatch: pytest.MonkeyPatch, busy: bool, touched_ago_s: float, ended: bool
) -> None:
    monkeypatch.setattr(cluster, "local_cluster", lambda: INFO)
    monkeypatch.setattr(cluster, "in_use", lambda url: busy)
    monkeypatch.setattr(cluster, "touched_s", lambda: time.time() - touched_ago_s)
    stops: list[bool] = []

    def stop() -> bool:
        stops.append(True)
        return True

    monkeypatch.setattr(cluster, "stop_local_cluster", stop)
    assert cluster.end_if_unused(timeout_s=0.1) is ended
    assert len(stops) == ended


def test_who_cannot_be_asked_counts_as_busy() -> None:
    assert cluster.in_use("http://127.0.0.1:1")


class Dashboard(BaseHTTPRequestHandler):
    """Answers as Ray's does when it is asked for its version."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *words: object) -> None:
        """Nothing on the terminal."""


def by_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", url)
    monkeypatch.setattr(urllib.request, "_opener", None)  # urlopen keeps what it found first


def test_no_proxy_is_asked_for_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), Dashboard) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        try:
            by_proxy(place, monkeypatch)
            assert cluster.answers("http://cluster.example:8265")  # the proxy says so
            by_proxy("http://127.0.0.1:9", monkeypatch)  # nobody is there
            assert not cluster.answers("http://cluster.example:8265")
            assert cluster.answers(place)
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "127.0.0.1,localhost,::1"),
        ("corp.example, localhost", "corp.example,localhost,127.0.0.1,::1"),
        ("*", "*"),
    ],
)
def test_rays_clients_ask_none_either(before: str | None, after: str) -> None:
    environ = {} if before is None else {"no_proxy": before}
    cluster.without_proxy_for_loopback(environ)
    assert environ == {"NO_PROXY": after, "no_proxy": after}


def test_auth_mode_is_always_set(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.set_auth_mode(local=True)
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    cluster.set_auth_mode(local=False)
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_the_record_is_private_and_a_dead_keeper_is_no_cluster() -> None:
    cluster.write_record(INFO)
    assert cluster.record_path().stat().st_mode & 0o777 == 0o600
    assert cluster.read_record() == INFO
    assert cluster.local_cluster() is None  # pid 1 has another start time
    assert not cluster.stop_local_cluster()


def test_what_a_killed_keeper_left_is_removed(tmp_path: Path) -> None:
    temp_dir = tmp_path / "relit-abc"
    (temp_dir / "session").mkdir(parents=True)
    cluster.write_record(replace(INFO, temp_dir=str(temp_dir)))
    cluster._forget_dead_cluster()
    assert not temp_dir.exists()
    assert cluster.read_record() is None


def test_one_starter_at_a_time() -> None:
    refused = pytest.raises(ClusterStartError, match=r"cluster\.lock")
    with cluster.cluster_lock(1.0), refused, cluster.cluster_lock(0.1):
        pass
    with cluster.cluster_lock(0.1):
        pass


def test_start_command_names_only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "x")
    command = keeper.start_command(1, 2, 3, "t")
    assert "--node-ip-address=127.0.0.1" in command
    assert "--dashboard-host=127.0.0.1" in command
    environment = keeper.ray_environment(INFO, {"PATH": "bin", "TMPDIR": "/elsewhere"})
    assert environment["TMPDIR"] == "x/tmp"
    assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert environment["RAY_AUTH_MODE"] == "disabled"
    assert environment["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}bin"


def test_free_port_prefers_and_gives_way() -> None:
    port = keeper.free_port()
    assert keeper.free_port(preferred=port) == port
    with socket.socket() as taken:
        taken.bind((keeper.LOOPBACK, port))
        taken.listen()
        assert keeper.free_port(preferred=port) != port


def test_exposed_sockets_are_found() -> None:
    with socket.socket() as inside, socket.socket() as outside:
        inside.bind(("127.0.0.1", 0))
        inside.listen()
        assert doctor.listening_beyond_loopback([os.getpid()]) == []
        outside.bind(("0.0.0.0", 0))
        outside.listen()
        found = doctor.listening_beyond_loopback([os.getpid()])
        assert [f":{outside.getsockname()[1]} " in text for text in found] == [True]


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("0100007F", True),
        ("00000000", False),
        ("020200C0", False),
        ("00000000000000000000000001000000", True),
        ("0000000000000000FFFF00000100007F", True),
        ("00000000000000000000000000000000", False),
    ],
)
def test_kernel_addresses(address: str, loopback: bool) -> None:
    assert doctor._is_loopback(address) == loopback


def test_a_process_is_known_by_pid_and_start() -> None:
    ticks = cluster.process_ticks(os.getpid())
    assert ticks > 0
    assert cluster.process_ticks(2**22 + 1) == 0
    child = subprocess.Popen(["true"])
    time.sleep(0.2)
    assert cluster.process_ticks(child.pid) == 0  # a zombie is gone
    child.wait()


# A keeper whose descendants ignore SIGTERM and leave their parents.
STUBBORN = """
import os, signal, subprocess, sys, time
from relit import keeper
keeper._prctl(keeper._PR_SET_CHILD_SUBREAPER, 1)
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
subprocess.Popen(["sh", "-c", f'{sys.executable} -c "{deaf}" & {sys.executable} -c "{deaf}" &'])
time.sleep(0.5)
before = keeper.descendants(os.getpid())
keeper.end_descendants(10.0)
print(len(before), len(keeper.descendants(os.getpid())))
"""


def test_no_descendant_survives_the_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUBBORN], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.split() == ["2", "0"], done.stderr


def test_a_cluster_that_does_not_come_up_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ClusterStartError, match=r"ended with code 1.*cluster\.log"):
        cluster.ensure_local_cluster()


def test_doctor_reports_instead_of_raising(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    findings = doctor.examine(str(tmp_path / "file" / "store"), "http://127.0.0.1:1")
    levels = {finding.check: finding.level for finding in findings}
    assert (levels["store"], levels["cluster"], levels["ray"]) == ("bad", "bad", "ok")


@pytest.mark.parametrize("answers_at", [3, None])
def test_a_cluster_that_lives_but_is_slow_is_waited_for_and_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers_at: int | None
) -> None:
    temp_dir = tmp_path / "relit-abc"
    temp_dir.mkdir()
    ticks = cluster.process_ticks(os.getpid())
    assert ticks is not None
    living = replace(INFO, temp_dir=str(temp_dir), keeper_pid=os.getpid(), keeper_ticks=ticks)
    cluster.write_record(living)
    asked: list[str] = []

    def answers(url: str, timeout_s: float = 0.0) -> bool:
        asked.append(url)
        return len(asked) == answers_at

    monkeypatch.setattr(cluster, "answers", answers)
    monkeypatch.setattr(cluster, "_PATIENCE_S", 0.0 if answers_at is None else 30.0)
    if answers_at is None:
        with pytest.raises(ClusterStartError, match="lives, but does not answer"):
            cluster.ensure_local_cluster()
    else:
        assert cluster.ensure_local_cluster() == living
    assert temp_dir.exists() and cluster.read_record() == living
