"""Checkpoints on this disk that belong to a node which is no more, taken over by this one.

A host that was rebooted, or whose Ray was started anew, comes back under another node id, while
the run's newest committed step lies in the folder of the old one. Each node folder names its
owner: the raylet that is the parent of the agent. If that process is gone, the folder is an
orphan; it is moved into ours by one rename, which only one of several new nodes can win, and its
steps and logs are then merged into our own, manifests last. Cut short anywhere, `adopt_orphans`
finishes it the next time.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator

from relit_platform.node.fencing import Fence, load_fence, save_fence
from relit_platform.node.paths import FENCE_FILE
from relit_platform.node.processes import start_ticks
from relit_storage.checkpoint.durable import make_dirs, read_file, sync_dir, write_file
from relit_storage.run.layout import STEPS_PREFIX

OWNER_FILE = "owner.json"
MAX_OWNER_BYTES = 4096
ADOPTED_PREFIX = "adopted-"
MANIFEST_NAME = "manifest.json"
MERGED_FOLDERS = (STEPS_PREFIX, "logs")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def claim(folder: str, owner_pid: int) -> None:
    """Write down that `owner_pid` keeps this folder; durable.

    Nothing is written if it says so already: an agent comes back on a full disk, too.
    """
    path, data = os.path.join(folder, OWNER_FILE), json.dumps(_identity(owner_pid)).encode()
    try:
        if read_file(path, MAX_OWNER_BYTES) == data:
            return
    except OSError:
        pass  # none yet
    write_file(path, [data])


def adopt_orphans(folder: str) -> list[str]:
    """Merge the orphans beside `folder` into it; answers their names. Blocks for renames only.

    Folders of another host (on a disk that is shared against advice) are never touched.
    """
    for orphan in orphans_beside(folder):
        take_orphan(orphan, folder)
    adopted = taken_orphans(folder)
    for orphan in adopted:
        _merge(orphan, folder)
    return [node_of(orphan) for orphan in adopted]


def orphans_beside(folder: str) -> list[str]:
    """Paths of the node folders of the same run that nobody keeps."""
    parent = os.path.dirname(folder)
    paths = [os.path.join(parent, name) for name in sorted(os.listdir(parent))]
    return [path for path in paths if path != folder and is_orphan(path)]


def take_orphan(orphan: str, folder: str) -> None:
    """Move it into ours, by one rename; durable. Nothing if another node was faster."""
    try:
        os.rename(orphan, os.path.join(folder, ADOPTED_PREFIX + os.path.basename(orphan)))
    except FileNotFoundError:
        return
    sync_dir(os.path.dirname(folder))
    sync_dir(folder)


def taken_orphans(folder: str) -> list[str]:
    """Paths of those that lie in ours, taken now or before a start that was cut short."""
    names = sorted(name for name in os.listdir(folder) if name.startswith(ADOPTED_PREFIX))
    return [os.path.join(folder, name) for name in names]


def node_of(orphan: str) -> str:
    """The name that a taken one had."""
    return os.path.basename(orphan).removeprefix(ADOPTED_PREFIX)


def is_orphan(folder: str, *, sure: bool = False) -> bool:
    """True if `claim` named its owner on this host, and that process is gone.

    A container that is started anew keeps its host's name, not its processes' numbers: such an
    owner counts as gone, too. sure: only one that we would see if it lived, for who takes from
    strangers; two containers of one name may share a host's memory.
    """
    try:
        with open(os.path.join(folder, OWNER_FILE), "rb") as file:
            owner = json.loads(file.read())
        now = _identity(int(owner["pid"]))
        if owner["host"] != now["host"]:
            return False
        if sure and owner["pid_namespace"] != now["pid_namespace"]:
            return False
        return bool({key: now.get(key) for key in owner} != owner)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False  # no node folder, or one that is being made at this moment


def _identity(pid: int) -> dict[str, object]:
    with open(_BOOT_ID, encoding="ascii") as file:
        boot_id = file.read().strip()
    return {
        "host": socket.gethostname(),
        "boot_id": boot_id,
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
        "pid": pid,
        "start_ticks": start_ticks(pid),
    }


def _merge(orphan: str, folder: str) -> None:
    ours, theirs = (load_fence(os.path.join(f, FENCE_FILE)) for f in (folder, orphan))
    fence = Fence(max(ours.epoch, theirs.epoch), max(ours.generation, theirs.generation))
    if fence != ours:
        save_fence(os.path.join(folder, FENCE_FILE), fence)
    for key in sorted(_files(orphan), key=_manifests_last):
        target = os.path.join(folder, key)
        make_dirs(os.path.dirname(target))
        os.rename(os.path.join(orphan, key), target)
        sync_dir(os.path.dirname(target))
    shutil.rmtree(orphan)
    sync_dir(folder)


def _files(orphan: str) -> Iterator[str]:
    for part in MERGED_FOLDERS:
        for folder, _, names in os.walk(os.path.join(orphan, part)):
            for name in names:
                yield os.path.relpath(os.path.join(folder, name), orphan)


def _manifests_last(key: str) -> tuple[bool, str]:
    return os.path.basename(key) == MANIFEST_NAME, key
