"""Shared memory of this host whose node is no more: taken over, or given back.

Ranks die with their raylet, and a raylet dies with its cluster; what a rank's last boundary left in
shared memory does not. When Ray is started anew on the host, under another node id, the run's next
agent takes these snapshots over as if they were of its own dead workers: a restore finds them in
its inventory, and what waited for the disk is persisted. As adoption.py does with the disk: a node
folder names its owner, the raylet; if that process is gone, one rename into our own folder decides
which of several new nodes has it. Cut short anywhere, the next start finishes it, also another's.

What runs of other names have left stays, for they may be resumed, until tmpfs has no room for a
slot: a run that trains comes before one that does not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from relit_platform.node.adoption import (
    is_orphan,
    node_of,
    orphans_beside,
    take_orphan,
    taken_orphans,
)
from relit_platform.node.paths import NodeFolders
from relit_platform.node.processes import kill_and_wait
from relit_platform.node.slot_pool import SUFFIX
from relit_storage.checkpoint.durable import read_file

DOOMED_PREFIX = "doomed-"
MAX_WORKERS_BYTES = 16 << 20
_COPY = re.compile(r"(rank-\d+)\.(\d+)(\.slot(?:\.offer)?)")


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
    left: list[Inherited] = []
    for orphan in orphans_beside(folder):
        try:
            stuck = _end_workers(orphan, kill_timeout_s)
            reason = f"process {stuck} does not die" if stuck else ""
            if not stuck:
                take_orphan(orphan, folder)
        except OSError as error:
            reason = str(error)
        if reason:
            left.append(Inherited(node=os.path.basename(orphan), reason=reason))
    for name in os.listdir(folder):
        if name.startswith(DOOMED_PREFIX):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    return [_merged(orphan, folder) for orphan in taken_orphans(folder)] + left


def abandoned(root: str, but_run: str = "") -> list[Abandoned]:
    """Node folders of all runs below `root` whose node is no more, those of `but_run` left out.

    Only of owners that were of this process's namespace: those of other containers may live.
    """
    found = []
    for run in _folders(root):
        if run != but_run:
            nodes = [os.path.join(root, run, node) for node in _folders(os.path.join(root, run))]
            orphans = [path for path in nodes if is_orphan(path, sure=True)]
            found += [Abandoned(path=path, num_bytes=_tree_bytes(path)) for path in orphans]
    return found


def give_back(folder: str) -> int:
    """Remove what nodes that are no more hold of other runs than that of `folder`, ours on tmpfs;
    how many bytes that was. Who has a page mapped keeps it.
    """
    run_folder = os.path.dirname(folder)
    root, run = os.path.split(run_folder)
    freed = 0
    for found in abandoned(root, run):
        name = os.path.relpath(found.path, root).replace(os.sep, "-")
        doomed = os.path.join(folder, DOOMED_PREFIX + name)
        try:
            os.rename(found.path, doomed)
        except OSError:
            continue  # its own run's next agent was faster
        shutil.rmtree(doomed, ignore_errors=True)
        freed += 0 if os.path.exists(doomed) else found.num_bytes
    return freed


def _merged(orphan: str, folder: str) -> Inherited:
    """A node without it is better than none: what fails is said, and tried again at a start."""
    node, theirs, ours = node_of(orphan), NodeFolders(orphan, ""), NodeFolders(folder, "")
    count = num_bytes = 0
    try:
        for nested in taken_orphans(orphan):  # its own work, cut short
            inner = _merged(nested, folder)
            count, num_bytes = count + inner.slots, num_bytes + inner.num_bytes
            if inner.reason:
                raise OSError(inner.reason)
        offset = _next_number(ours.peers)
        for source, target in ((theirs.slots, ours.slots), (theirs.peers, ours.peers)):
            for path in _moved(source, target, offset):
                count += path.endswith(SUFFIX)
                num_bytes += os.stat(path).st_size
    except OSError as error:
        return Inherited(node=node, slots=count, num_bytes=num_bytes, reason=str(error))
    shutil.rmtree(orphan, ignore_errors=True)
    return Inherited(node=node, slots=count, num_bytes=num_bytes)


def _moved(source: str, target: str, offset: int) -> Iterator[str]:
    """New paths of the files that were moved. Slots carry their worker's id; copies of another
    node's ranks are numbered, and get numbers that are not taken.
    """
    if not os.path.isdir(source):
        return
    os.makedirs(target, mode=0o700, exist_ok=True)
    for name in sorted(os.listdir(source)):
        copy = _COPY.fullmatch(name)
        new = f"{copy[1]}.{int(copy[2]) + offset}{copy[3]}" if copy else name
        os.rename(os.path.join(source, name), os.path.join(target, new))
        yield os.path.join(target, new)


def _next_number(folder: str) -> int:
    """Above those of all copies that are there."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    copies = [copy for copy in map(_COPY.fullmatch, names) if copy]
    return max((int(copy[2]) + 1 for copy in copies), default=0)


def _end_workers(orphan: str, timeout_s: float) -> int:
    """The pid of a worker that does not die, or 0."""
    try:
        entries = json.loads(read_file(NodeFolders(orphan, "").workers, MAX_WORKERS_BYTES))
        workers = [(int(entry["pid"]), int(entry["start_ticks"])) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return 0  # nobody said hello, or nobody can tell who did
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
