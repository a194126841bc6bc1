"""Where a node keeps its part of a run: one folder on tmpfs, one on disk, both 0700.

    <shm_dir>/relit/<run_id>/<node>/   slots/<worker_id>.<n>.slot  heartbeats/<worker_id>
                                       control  workers.json  peers/rank-<n>.<m>.slot
    <disk_dir>/<run_id>/<node>/        checkpoints/steps/...  logs/<worker_id>.log  fence.json
                                       owner.json

<node> is the beginning of the node id, so that several raylets of one host stay apart.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from relit_platform.errors import UsageError

NODE_ID_CHARS = 8
FENCE_FILE = "fence.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePaths:
    """What an agent answers to a worker's hello: where the worker finds its shared files."""

    shm_dir: str
    control_path: str
    heartbeat_path: str
    log_path: str


@dataclass(frozen=True, slots=True)
class NodeFolders:
    """The two roots of one (run, node)."""

    shm: str
    disk: str

    @classmethod
    def of(cls, shm_dir: str, disk_dir: str, run_id: str, node_id: str) -> NodeFolders:
        """The roots below the configured directories. Raises UsageError for an unsafe run id."""
        node = node_id[:NODE_ID_CHARS]
        check_name(run_id)
        check_name(node)
        return cls(
            shm=os.path.join(os.path.expanduser(shm_dir), "relit", run_id, node),
            disk=os.path.join(os.path.expanduser(disk_dir), run_id, node),
        )

    @property
    def slots(self) -> str:
        """Folder of the slot files."""
        return os.path.join(self.shm, "slots")

    @property
    def peers(self) -> str:
        """Folder of the copies of other nodes' snapshots."""
        return os.path.join(self.shm, "peers")

    @property
    def heartbeats(self) -> str:
        """Folder of one page per worker."""
        return os.path.join(self.shm, "heartbeats")

    @property
    def control(self) -> str:
        """The node's control page."""
        return os.path.join(self.shm, "control")

    @property
    def workers(self) -> str:
        """The register of worker processes: needed as long as they live, so on tmpfs too."""
        return os.path.join(self.shm, "workers.json")

    @property
    def logs(self) -> str:
        """Folder of one log file per worker."""
        return os.path.join(self.disk, "logs")

    @property
    def fence(self) -> str:
        """The highest epoch and generation sealed on this node."""
        return os.path.join(self.disk, FENCE_FILE)

    def for_worker(self, worker_id: str) -> NodePaths:
        """What a worker is told. Raises UsageError for an unsafe worker id."""
        check_name(worker_id)
        return NodePaths(
            shm_dir=self.shm,
            control_path=self.control,
            heartbeat_path=os.path.join(self.heartbeats, worker_id),
            log_path=os.path.join(self.logs, f"{worker_id}.log"),
        )


def check_name(name: str) -> None:
    """Raise UsageError unless `name` is safe as one part of a path."""
    if not _NAME.fullmatch(name):
        raise UsageError(message=f"{name!r} cannot be part of a path (letters, digits, . _ -).")
