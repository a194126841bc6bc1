"""A second node of the lab's cluster, on this host, that is lost as a machine is: all at once.

    with second_node.joined(lab) as node:      one more raylet, with its workers below it
        node.lose("run-1")                     SIGKILL to all of them; its memory and disk are gone

`python second_node.py` is the process that owns them: their reaper, so that none is left behind.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leaks import listed

from relit import cluster, keeper
from relit_platform.node.paths import NODE_ID_CHARS

JOIN_S = 60.0
CPUS = 8
LOOK_EVERY_S = 0.1
PR_SET_CHILD_SUBREAPER = 36


class Node:
    """The node that joined. node_id: Ray's, in hex."""

    def __init__(self, lab: Any, owner: subprocess.Popen[bytes], node_id: str) -> None:
        self._lab = lab
        self._owner = owner
        self.node_id = node_id

    def lose(self, run_id: str) -> None:
        """Kill every process of the node, then delete what only its memory and its disk had."""
        end(self._owner)
        for root in (Path("/dev/shm/relit"), self._lab.root / "disk"):
            shutil.rmtree(root / run_id / self.node_id[:NODE_ID_CHARS])


@contextmanager
def joined(lab: Any) -> Iterator[Node]:
    """Start the node and wait until the cluster counts it; it is gone at the end."""
    info = cluster.local_cluster()
    assert info is not None
    before = alive_nodes()
    owner = subprocess.Popen(
        [sys.executable, __file__, info.gcs_address],
        stdin=subprocess.PIPE,
        env=keeper.ray_environment(info, dict(os.environ)),
    )
    try:
        deadline_s = time.monotonic() + JOIN_S
        while not (more := alive_nodes() - before):
            assert owner.poll() is None and time.monotonic() < deadline_s, "no second node"
            time.sleep(LOOK_EVERY_S)
        yield Node(lab, owner, more.pop())
    finally:
        end(owner)


def alive_nodes() -> set[str]:
    """Ids of the nodes that Ray takes for alive."""
    return {node["node_id"] for node in listed("nodes") if node["state"] == "ALIVE"}


def end(owner: subprocess.Popen[bytes]) -> None:
    """Its owner kills the node when its input ends, and then itself. Safe to repeat."""
    assert owner.stdin is not None
    owner.stdin.close()
    owner.wait(30)


def own(gcs_address: str) -> None:
    """Start the raylet; kill it and all below it, at once, when nobody is there to be served."""
    from ray._private.node import Node as Raylet
    from ray._private.parameter import RayParams

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # By `ray start` Ray would leave loopback, see relit.keeper.
    params = RayParams(
        gcs_address=gcs_address,
        node_ip_address=keeper.LOOPBACK,
        num_cpus=CPUS,
        object_store_memory=100_000_000,
        include_log_monitor=False,
        dashboard_agent_listen_port=0,
        metrics_export_port=0,
    )
    Raylet(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
    sys.stdin.buffer.read()
    while living := keeper.descendants(os.getpid()):
        for pid in living:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass  # died of another's death
        while any_ended():
            pass


def any_ended() -> bool:
    """Reap one that has ended; False if there is none yet."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


if __name__ == "__main__":
    own(sys.argv[1])
