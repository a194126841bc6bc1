"""Shared memory of this host whose node is no more: taken over, or given back.

Ranks die with their raylet, and a raylet dies with its cluster; what a rank's last boundary left in
shared memory does not. When Ray is started anew on the host, under another node id, the run's next
agent takes these snapshots over as if they were of its own dead workers: a restore finds them in
its inventory, and what waited for the disk is persisted. As adoption.py does with the disk: a node
folder names its owner, the raylet; if that process is gone, one rename into our own folder decides
which of several new nodes has it. Cut short anywhere, the next start finishes it.

What runs of other names have left stays, for they may be resumed, until tmpfs has no room for a
slot: a run that trains comes before one that does not.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from relit_platform.node.adoption import ADOPTED_PREFIX, is_orphan
from relit_platform.node.processes import kill_and_wait
from relit_storage.checkpoint.durable import read_file

SLOTS, PEERS, WORKERS = "slots", "peers", "workers.json"
SUFFIX = ".slot"
MAX_WORKERS_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """What became of one orphan's memory. reason: why it was left where it is, or "" ."""

    node: str
    slots: int = 0
    num_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """A node folder of some run that nobody keeps any more."""

    path: str
    num_bytes: int


def inherit(folder: str, kill_timeout_s: float) -> list[Inherited]:
    """Move the slots of orphans beside `folder`, a node's on tmpfs, into its own, and the copies of
    other nodes' that they kept; the rest goes.

    Ends workers of an orphan that are still there, before their memory is read: blocks for that,
    kill_timeout_s each. One that does not die keeps its node's folder as it is.
    """
    parent = os.path.dirname(folder)
    left: list[Inherited] = []
    for name in sorted(os.listdir(parent)):
        orphan = os.path.join(parent, name)
        if orphan == folder or not is_orphan(orphan):
            continue
        stuck = _end_workers(orphan, kill_timeout_s)
        if stuck:
            left.append(Inherited(node=name, reason=f"process {stuck} does not die"))
            continue
        try:
            os.rename(orphan, os.path.join(folder, ADOPTED_PREFIX + name))
        except FileNotFoundError:
            continue  # another node of this host was faster
    names = sorted(name for name in os.listdir(folder) if name.startswith(ADOPTED_PREFIX))
    return [_merged(os.path.join(folder, name), folder) for name in names] + left


def abandoned(root: str, but_run: str = "") -> list[Abandoned]:
    """Node folders of all runs below `root` whose node is no more, those of `but_run` left out."""
    found = []
    for run in _folders(root):
        if run != but_run:
            nodes = [os.path.join(root, run, node) for node in _folders(os.path.join(root, run))]
            orphans = [path for path in nodes if is_orphan(path)]
            found += [Abandoned(path=path, num_bytes=_tree_bytes(path)) for path in orphans]
    return found


def give_back(root: str, but_run: str) -> int:
    """Remove what `abandoned` finds; how many bytes that was. Who has a page mapped keeps it."""
    freed = 0
    for found in abandoned(root, but_run):
        shutil.rmtree(found.path, ignore_errors=True)
        freed += found.num_bytes
        try:
            os.rmdir(os.path.dirname(found.path))
        except OSError:
            pass  # another node's folder is in it
    return freed


def _merged(orphan: str, folder: str) -> Inherited:
    count = num_bytes = 0
    for part in (SLOTS, PEERS):
        for path in _moved(os.path.join(orphan, part), os.path.join(folder, part)):
            count += path.endswith(SUFFIX)
            num_bytes += os.stat(path).st_size
    shutil.rmtree(orphan, ignore_errors=True)
    node = os.path.basename(orphan).removeprefix(ADOPTED_PREFIX)
    return Inherited(node=node, slots=count, num_bytes=num_bytes)


def _moved(source: str, target: str) -> Iterator[str]:
    """New paths of the files that were moved. A name that is taken stays ours: copies of another
    node's ranks are numbered, slots of our own carry their worker's id.
    """
    if os.path.isdir(source):
        os.makedirs(target, mode=0o700, exist_ok=True)
        for name in sorted(os.listdir(source)):
            path = os.path.join(target, name)
            if not os.path.exists(path):
                os.rename(os.path.join(source, name), path)
                yield path


def _end_workers(orphan: str, timeout_s: float) -> int:
    """The pid of a worker that does not die, or 0."""
    try:
        entries = json.loads(read_file(os.path.join(orphan, WORKERS), MAX_WORKERS_BYTES))
        workers = [(int(entry["pid"]), int(entry["start_ticks"])) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return 0  # nobody said hello
    for pid, ticks in workers:
        if not kill_and_wait(pid, ticks, timeout_s):
            return pid
    return 0


def _folders(path: str) -> Iterator[str]:
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return  # of another user, or gone
    yield from names


def _tree_bytes(path: str) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except OSError:
                pass  # gone meanwhile
    return total
