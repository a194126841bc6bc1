"""Would a run live here? One finding for each thing that has broken runs before.

Every check is a function that returns findings and changes nothing but a few probe objects in
the store, which it deletes. No check may raise: what goes wrong is the finding.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from relit.cluster import cluster_named, local_cluster, open_url
from relit_platform.node.inheriting import abandoned
from relit_platform.run_config import CheckpointConfig
from relit_storage.errors import RelitError
from relit_storage.stores.opening import open_store, probe, redact_url

_MIN_SHM_BYTES = 1 << 30
_MIN_DISK_BYTES = 5 << 30
_MAX_DISK_USED = 0.95  # Ray refuses to spill beyond this
_MIN_OPEN_FILES = 4096
_SLOW_STORE_S = 1.0
_MAX_SKEW_S = 2.0
_PINNED_RAY = "2.60.0"
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp


@dataclass(frozen=True, slots=True)
class Finding:
    """level "bad" would break a run, "warn" might. found says what to do about it."""

    level: Literal["ok", "warn", "bad"]
    check: str
    found: str

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def examine(store_url: str, address: str | None) -> list[Finding]:
    """All checks, in order. Takes a second or two, longer where the store is slow."""
    disk = CheckpointConfig()
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("ray", check_ray),
        ("auth", lambda: check_auth(address)),
        ("cluster", lambda: check_cluster(address)),
        ("clusters on this host", check_host),
        ("store", lambda: check_store(store_url)),
        ("shared memory", lambda: [_space("shared memory", disk.shm_dir, _MIN_SHM_BYTES)]),
        ("memory of dead nodes", lambda: [_abandoned(disk.shm_dir)]),
        ("disk tier", lambda: [_space("disk tier", disk.disk_dir, _MIN_DISK_BYTES)]),
        ("open files", check_open_files),
    ]
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except (OSError, ValueError, RelitError) as error:
            findings.append(Finding("bad", name, " ".join(str(error).split())[:300]))
    return findings


def check_ray() -> list[Finding]:
    """The version that our adapter was tested with."""
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        return [Finding("bad", "ray", "not installed; install ray[default,train]")]
    if version == _PINNED_RAY:
        return [Finding("ok", "ray", version)]
    return [Finding("warn", "ray", f"{version}; relit is tested with {_PINNED_RAY}")]


def check_auth(address: str | None) -> list[Finding]:
    """Ray's authentication mode as a submit from here would use it."""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    token = any(os.environ.get(f"RAY_AUTH_TOKEN{end}") for end in ("", "_PATH"))
    if mode == "token" and not token and not Path("~/.ray/auth_token").expanduser().exists():
        found = "RAY_AUTH_MODE=token, but there is no RAY_AUTH_TOKEN and no token file"
        return [Finding("bad", "auth", found)]
    if not mode and not cluster_named(address):
        return [Finding("ok", "auth", "disabled on the local cluster, which is on loopback only")]
    shown = mode or ("token" if token else "disabled (set RAY_AUTH_MODE=token if it wants one)")
    return [Finding("ok", "auth", shown)]


def check_cluster(address: str | None) -> list[Finding]:
    """The cluster that a submit would use, its clock, and that nothing of it is reachable."""
    named = cluster_named(address)
    if named and not named.startswith("http"):
        return [Finding("ok", "cluster", f"{named} (a GCS address; not asked)")]
    info = None if named else local_cluster()
    if not named and info is None:
        return [Finding("ok", "cluster", "none named; a local one starts at the first submit")]
    url = named or (info.dashboard_url if info else "")
    began = time.time()
    with open_url(f"{url}/api/version", timeout_s=5.0) as answer:
        date = answer.headers.get("Date")
    findings = [Finding("ok", "cluster", f"{url} answers in {time.time() - began:.3f} s")]
    if date:
        findings.append(_skew(time.time() - parsedate_to_datetime(date).timestamp()))
    if info:
        findings.append(_exposed(info.keeper_pid))
    return findings


def _skew(seconds: float) -> Finding:
    """HTTP dates are whole seconds, so one second is nothing."""
    level: Literal["ok", "warn"] = "ok" if abs(seconds) < _MAX_SKEW_S else "warn"
    found = f"this clock and the cluster's differ by {max(abs(seconds) - 1.0, 0.0):.0f} s"
    return Finding(level, "clock", f"{found}; leases tolerate 5 s" if level == "warn" else found)


def _exposed(keeper_pid: int) -> Finding:
    from relit.keeper import descendants

    open_sockets = listening_beyond_loopback(descendants(keeper_pid))
    if open_sockets:
        shown = ", ".join(open_sockets[:5])
        return Finding("bad", "sockets", f"the local cluster listens beyond loopback: {shown}")
    return Finding("ok", "sockets", "every socket of the local cluster is on loopback")


def listening_beyond_loopback(pids: list[int]) -> list[str]:
    """`address:port (pid)` of each TCP socket of these processes that others could reach."""
    inodes: dict[str, int] = {}
    for pid in pids:
        try:
            for link in Path(f"/proc/{pid}/fd").iterdir():
                target = os.readlink(link)
                if target.startswith("socket:["):
                    inodes[target[8:-1]] = pid
        except OSError:
            continue  # ended, or a descriptor was closed while we looked
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            reachable = fields[3] == _LISTEN and not _is_loopback(address)
            if reachable and fields[9] in inodes:
                found.append(f"{address}:{int(port, 16)} (pid {inodes[fields[9]]})")
    return found


def _is_loopback(hex_address: str) -> bool:
    """/proc/net writes each 32-bit word in the machine's (little-endian) order."""
    if len(hex_address) == 8:
        return hex_address.endswith("7F")
    mapped = hex_address.startswith("0000000000000000FFFF0000") and hex_address.endswith("7F")
    return mapped or hex_address == "00000000000000000000000001000000"


def check_host() -> list[Finding]:
    """Ray's helpers may pick the wrong one of several clusters on a host."""
    count = sum(1 for _, command in _commands() if command.endswith("/gcs_server"))
    if count <= 1:
        return [Finding("ok", "clusters on this host", str(count))]
    found = f"{count}; set RAY_ADDRESS for every process that uses one of them"
    return [Finding("warn", "clusters on this host", found)]


def _commands() -> list[tuple[int, str]]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            first = (folder / "cmdline").read_bytes().split(b"\0")[0]
        except OSError:
            continue
        found.append((int(folder.name), first.decode("utf-8", "replace")))
    return found


def check_store(store_url: str) -> list[Finding]:
    """The promises that commits rest on, and how fast small writes are."""
    shown = redact_url(store_url)
    guarantees = probe(open_store(store_url), strict=False)
    if guarantees.missing:
        missing = ", ".join(guarantees.missing)
        return [Finding("bad", "store", f"{shown} does not give {missing}; choose another")]
    latency = f"{guarantees.latency_s * 1e3:.1f} ms for a small write"
    slow = guarantees.latency_s > _SLOW_STORE_S
    return [Finding("warn" if slow else "ok", "store", f"{shown} keeps its promises, {latency}")]


def _space(check: str, folder: str, wanted_bytes: int) -> Finding:
    """Free space where a tier would lie; its folder may not exist yet."""
    place = Path(folder)
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    found = f"{usage.free / 1e9:.1f} GB free at {folder}"
    if not os.access(place, os.W_OK):
        return Finding("bad", check, f"{folder} cannot be written")
    if usage.free < wanted_bytes or usage.used > _MAX_DISK_USED * usage.total:
        return Finding("warn", check, f"{found}; less than a real model needs")
    return Finding("ok", check, found)


def _abandoned(shm_dir: str) -> Finding:
    """Snapshots that outlived their node: a resume takes them over, a run that lacks room too."""
    check, root = "memory of dead nodes", os.path.join(shm_dir, "relit")
    found = abandoned(root)
    if not found:
        return Finding("ok", check, "none")
    total_bytes = sum(node.num_bytes for node in found)
    runs = ", ".join(sorted({Path(node.path).parent.name for node in found})[:5])
    how = f"resume them, or remove their folders below {root}"
    return Finding("warn", check, f"{total_bytes / 1e9:.1f} GB of {runs}: {how}")


def check_open_files() -> list[Finding]:
    """Ray holds a connection for each worker and store object in flight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MIN_OPEN_FILES:
        found = f"{soft} (hard limit {hard}); run `ulimit -n {_MIN_OPEN_FILES}` or more"
        return [Finding("warn", "open files", found)]
    return [Finding("ok", "open files", str(soft))]
