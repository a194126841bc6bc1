"""All that an agent does for one run on one node, without Ray.

    slots in shared memory    created, re-adopted, released: slot_pool
    shared memory -> disk     one thread, in order, then the slot is unpinned: persisting
    disk -> object tier       one thread, with retries: uploads; both step back: yielding
    worker processes          their end is reported within milliseconds; killed when sealed
    worker logs               shipped every two seconds: log_shipping

Every method may be repeated and called from any thread. What the keeper knows is in files, so a
keeper that is killed and started again on the same folders goes on where it was: it takes over
the slots, watches the registered processes, and persists what is pinned. `report` gets
ShardPersisted, ShardUploaded, ShardFailed and WorkerExited; it must not block or raise, and it may
get a fact twice.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from relit_platform.errors import PlatformError, UsageError
from relit_platform.facts import (
    Fact,
    Heartbeat,
    NodeInventory,
    ShardFailed,
    ShardUploaded,
    Tier,
    WorkerExited,
)
from relit_platform.node.adoption import adopt_orphans, claim
from relit_platform.node.disk_tier import DiskTier
from relit_platform.node.fencing import NodeFence
from relit_platform.node.heartbeat import ControlPage
from relit_platform.node.inheriting import give_back, inherit
from relit_platform.node.log_shipping import LogShipper
from relit_platform.node.paths import NodeFolders, NodePaths
from relit_platform.node.peer_tier import Level, PeerTier
from relit_platform.node.persisting import Persister
from relit_platform.node.processes import ProcessKey, ProcessWatch, kill_and_wait, start_ticks
from relit_platform.node.slot_pool import SlotPool
from relit_platform.node.task_thread import TaskThread
from relit_platform.node.uploads import Uploader
from relit_platform.node.workers import WorkerEntry, WorkerRegister
from relit_platform.node.yielding import step_back
from relit_platform.run_config import CheckpointConfig
from relit_storage.checkpoint.durable import make_dirs
from relit_storage.errors import StorageError
from relit_storage.run.layout import manifest_key, step_prefix
from relit_storage.stores.protocol import ObjectStore

UPLOADS_QUEUED = 4096  # a reference to what is there anyway: never the bound
WATCH_WAIT_S = 0.05
SWEEP_EVERY_S = 1.0
LOGS_EVERY_S = 2.0
CRASH_PAUSE_S = 5.0
KILL_TIMEOUT_S = 20.0
CLOSE_TIMEOUT_S = 8.0  # of each thread; the supervisor waits 30 s for all of close
SHARED_FOLDERS = ("code", "drills", "ray_train")  # beside the nodes' folders, for all workers


class NodeKeeper:
    """Use `start` before anything else, `close` at the end of the run.

    owner_pid is the process whose end means that this node is gone, by default our own: then a
    later node of this host takes over the disk tier. host: the address at which agents of other
    nodes reach this one, if the manager asks for that. peers: its part in the peer tier.
    """

    def __init__(
        self,
        node_id: str,
        run_id: str,
        config: CheckpointConfig,
        store: ObjectStore,
        report: Callable[[object], None],
        clock: Callable[[], float],
        owner_pid: int | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._node_id = node_id
        self._config = config
        self._store = store
        self._report = report
        self._clock = clock
        self._owner_pid = os.getpid() if owner_pid is None else owner_pid
        self._folders = NodeFolders.of(config.shm_dir, config.disk_dir, run_id, node_id)
        self._slots = SlotPool(
            self._folders.slots,
            config.memory_budget_bytes,
            lambda used_bytes: self.peers.make_room(used_bytes),
            self._give_back,
        )
        self._disk = DiskTier(self._folders.disk, node_id)
        self.peers = PeerTier(
            node_id=node_id,
            run_id=run_id,
            host=host,
            folder=self._folders.peers,
            config=config,
            slots=self._slots,
            disk=self._disk,
            fence_epoch=lambda: self._fence.epoch,
            peered=lambda on: self._control_page().set_peered(on),
            reap=self._free_dead,
            say=self._say,
        )
        self._workers = WorkerRegister(self._folders.workers, self._folders.heartbeats)
        self._watch = ProcessWatch()
        self._logs = LogShipper(self._folders.logs, store)
        self._fence = NodeFence(self._folders.fence, functools.partial(self._crashed, "fence"))
        self._persister = Persister(
            node_id,
            self._folders.disk,
            config,
            self._slots,
            check=self._fence.check,
            alive=self._workers.alive,
            report=report,
            crashed=self._crashed,
            clock=clock,
        )
        step_aside = functools.partial(step_back, config.save_nice)
        self._uploads = TaskThread("upload", UPLOADS_QUEUED, self._crashed, step_aside)
        self._closing = threading.Event()
        self._uploader = Uploader(self._folders.disk, store, self._closing.wait)
        self._threads: list[threading.Thread] = []
        self._control: ControlPage | None = None

    # ---- life ----

    def start(self) -> None:
        """Create or take over the folders, then the threads. Call once."""
        folders = self._folders
        for folder in (folders.slots, folders.heartbeats, folders.logs):
            make_dirs(folder)
        claim(folders.disk, self._owner_pid)
        adopt_orphans(folders.disk)
        self._take_over_memory()
        self._disk.clean()
        self._slots.adopt()
        self.peers.start()
        self._fence.load()
        self._control = ControlPage.create(folders.control)
        if self._control.stop_requested:
            self._persister.pace.hurry("stop")
        for entry in self._workers.load():
            self._watch.add(entry.process)
        self._persister.start()
        self._uploads.start()
        self._uploads.submit("sweep", self._uploader.sweep)
        for loop in (self._watch_loop, self._log_loop):
            thread = threading.Thread(target=loop, name=loop.__name__, daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self, remove_disk: bool) -> None:
        """Stop the threads, ship the logs' ends, remove shared memory; on request the disk tier.

        Blocks until the persist or upload that is running has ended, at most CLOSE_TIMEOUT_S each.
        Workers should have ended before; one that has not keeps its mapped pages, nothing else.
        """
        self._closing.set()
        self._persister.pace.hurry("close")  # before anything is waited for
        self.peers.close()
        self._persister.close(CLOSE_TIMEOUT_S)
        self._uploads.close(CLOSE_TIMEOUT_S)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        self._threads.clear()
        if os.path.isdir(self._folders.logs):
            self._logs.ship()
        self._watch.close()
        self._workers.close()
        _remove_tree(self._folders.shm, up=2)
        if remove_disk:
            _remove_tree(self._folders.disk, up=0)
            _remove_run_if_last(os.path.dirname(self._folders.disk))

    # ---- workers ----

    def hello(self, worker_id: str, pid: int, epoch: int) -> NodePaths:
        """Register a worker process; from here on its end is noticed. Answers its files.

        Raises FencedError if its epoch is over.
        """
        paths = self._folders.for_worker(worker_id)
        with self._fence.entering(epoch):
            ticks = start_ticks(pid)
            entry = WorkerEntry(worker_id=worker_id, pid=pid, start_ticks=ticks or 0, epoch=epoch)
            self._workers.add(entry)
        self._watch.add(entry.process)
        return paths

    def heartbeats(self) -> list[Heartbeat]:
        """The newest sign of life of every worker that has not ended."""
        return self._workers.heartbeats()

    def set_stop(self, number: int) -> None:
        """Ask every worker of this node to stop at its next boundary; 0 takes it back."""
        self._control_page().set_stop(number)
        if number:
            self._persister.pace.hurry("stop")
        else:
            self._persister.pace.calm("stop")

    def seal(self, epoch: int, generation: int) -> None:
        """End everything older: when this returns, no worker of an older epoch runs here.

        Workers of older epochs get SIGKILL and are waited for. From then on their hellos, and
        persists and publications of generations below `generation`, are refused, also after a
        restart unless the disk is full: that must not keep this node out of a restore. Raises
        FencedError if a newer epoch has sealed this node, PlatformError if a process does not die.
        """
        self._fence.seal(epoch, generation)
        old = [entry for entry in self._workers.entries() if entry.epoch < epoch]
        with ThreadPoolExecutor(max(1, len(old)), thread_name_prefix="seal") as pool:
            ends = [pool.submit(self._kill, entry) for entry in old]
        for end in ends:  # one that does not die spares no other
            end.result()

    # ---- memory ----

    def open_slots(
        self, worker_id: str, count: int, image_bytes: int, extras_capacity: int
    ) -> tuple[str, ...]:
        """`count` new slots for a registered worker; blocks while their memory is reserved.

        Slots of dead workers that no restore can want are freed first, others if need be: see
        SlotPool.open_for. Raises BudgetError, and UsageError for a worker that never said hello or
        whose process has ended.
        """
        if worker_id not in self._workers.alive():
            raise UsageError(message=f"worker {worker_id} is not registered on this node.")
        alive, busy = self._free_dead()
        wanted = (worker_id, count, image_bytes, extras_capacity)
        return self._slots.open_for(*wanted, alive=alive, busy=busy)

    def release_slots(self, worker_id: str, paths: Sequence[str]) -> None:
        """Give up slots of a worker; paths that are not its own are ignored."""
        own = set(self._slots.of_worker(worker_id))
        self._slots.release(path for path in paths if path in own)

    # ---- disk ----

    def persist(
        self,
        worker_id: str,
        path: str,
        step: int,
        generation: int,
        last: bool = False,
        vouched: int = 0,
    ) -> None:
        """Queue a slot that the rank has pinned; its outcome is reported, then it is unpinned.
        last: the run ends with it, so it is written as fast as it can be. vouched: the epoch of a
        manager that asks for it, though its generation may be over; see NodeFence.

        A message that comes late, when the slot holds another step, is ignored: the step it asks
        for was persisted by the sweep. Raises UsageError for a path that is not a slot of this
        worker.
        """
        if vouched:
            self._fence.vouch(vouched, step, generation)
        pin = bool(vouched)
        self._persister.ask(worker_id, path, step, generation, last=last, pin=pin)

    def persist_growing(self, worker_id: str, path: str, step: int, generation: int) -> None:
        """Begin to write a snapshot that is still being copied: no promise on either side.

        `persist` follows once it is whole. If that never comes, nothing was written that counts,
        and nothing is reported. Raises UsageError as `persist`.
        """
        self._persister.announce(worker_id, path, step, generation)

    def publish(self, step: int, generation: int, manifest: bytes) -> None:
        """Publish a step on this node's disk; durable on return.

        Raises FencedError, CommitConflictError, ManifestError: see DiskTier.publish.
        """
        self._fence.check(step, generation)
        self._disk.publish(step, generation, manifest)

    def drop(self, steps: Sequence[tuple[int, int]], tier: Tier) -> None:
        """Delete steps, each (step, generation), from a tier; the manifest of each goes first.

        memory: only slots of dead workers, the living overwrite their own. Raises UsageError for
        the newest step on disk, StoreError if the object tier fails.
        """
        for step, generation in steps:
            if tier == "memory":
                self._slots.drop_step(step, generation, self._workers.alive())
            elif tier == "disk":
                self._disk.drop(step, generation)
            else:
                self._store.delete(manifest_key(step, generation))
                for key in self._store.list(step_prefix(step, generation)):
                    self._store.delete(key)

    def inventory(self) -> NodeInventory:
        """What this node could give to a restore. Reads headers and manifests, no tensor."""
        memory, refused_memory = self._slots.infos(self._node_id)
        records, refused_records = self._disk.records()
        manifests, refused_manifests = self._disk.manifests()
        served = [info.generation for info in memory] + [r.generation for r in records]
        found = NodeInventory(
            node_id=self._node_id,
            memory=tuple(memory),
            disk=tuple(records),
            manifests=tuple(manifests),
            fence=max([self._fence.generation, *served]),
            refusals=(*refused_memory, *refused_records, *refused_manifests),
            disk_root=self._folders.disk,
        )
        return self.peers.added(found)

    # ---- object tier ----

    def upload(self, step: int, generation: int, ranks: Sequence[int]) -> None:
        """Queue the upload of persisted shards; each outcome is reported."""
        for rank in ranks:
            task = functools.partial(self._upload, step, generation, rank)
            if not self._uploads.submit((step, generation, rank), task):
                self._fail(step, generation, rank, "the upload queue is full")

    # ---- tasks ----

    def _upload(self, step: int, generation: int, rank: int) -> None:
        began_s = time.monotonic()
        try:
            record = self._disk.record(step, generation, rank)
            if record is None:
                self._fail(step, generation, rank, "the shard is not whole on this disk")
                return
            self._uploader.upload(record)
        except (StorageError, OSError) as error:
            self._fail(step, generation, rank, str(error))
            return
        self._report(
            ShardUploaded(
                step=step,
                generation=generation,
                rank=rank,
                node_id=self._node_id,
                seconds=round(time.monotonic() - began_s, 6),
                at_s=self._clock(),
            )
        )

    def _fail(self, step: int, generation: int, rank: int, reason: str) -> None:
        self._report(
            ShardFailed(
                step=step,
                generation=generation,
                rank=rank,
                node_id=self._node_id,
                tier="object",
                reason=reason,
                at_s=self._clock(),
            )
        )

    # ---- loops ----

    def _watch_loop(self) -> None:
        swept_s = self._clock()
        while not self._closing.is_set():
            try:
                for process in self._watch.poll(WATCH_WAIT_S):
                    self._exited(process)
                if abs(self._clock() - swept_s) >= SWEEP_EVERY_S:  # a clock may be set back
                    swept_s = self._clock()
                    self._persister.sweep()
            except Exception as error:  # the watch must outlive any surprise, and say so
                self._crashed("watch", error)
                self._closing.wait(CRASH_PAUSE_S)

    def _exited(self, process: ProcessKey) -> None:
        for entry, last in self._workers.remove(process):
            self._report(
                WorkerExited(
                    worker_id=entry.worker_id,
                    node_id=self._node_id,
                    pid=entry.pid,
                    at_s=self._clock(),
                    last_step=last.step,
                    last_phase=last.phase,
                    rank=last.rank if last.generation else -1,
                    generation=last.generation,
                )
            )

    def _log_loop(self) -> None:
        while not self._closing.wait(LOGS_EVERY_S):
            try:
                self._logs.ship()
            except Exception as error:  # as above
                self._crashed("logs", error)
                self._closing.wait(CRASH_PAUSE_S)

    # ---- small things ----

    def _take_over_memory(self) -> None:
        """Make this node's folder on tmpfs ours, and what dead nodes of the run have left."""
        shm = self._folders.shm
        found = []
        try:
            claim(shm, self._owner_pid)
        except OSError:  # full: by what they have left, perhaps, of which not all is kept
            found = inherit(shm, KILL_TIMEOUT_S)
            self._give_back()
            claim(shm, self._owner_pid)
        found += inherit(shm, KILL_TIMEOUT_S)
        for one in found:
            level: Level = "warning" if one.reason else "info"
            self._say("agent.inherited", level, dataclasses.asdict(one))

    def _give_back(self) -> int:
        """For a tmpfs that is full: memory of dead nodes of other runs goes; how many bytes."""
        freed = give_back(self._folders.shm)
        if freed:
            self._say("agent.gave_back", "warning", {"num_bytes": freed})
        return freed

    def _free_dead(self, before: int | None = None) -> tuple[frozenset[str], frozenset[str]]:
        """Free what no restore can want; who is alive, and which slots are being persisted."""
        whole = (self._slots.newest_whole(), self._disk.newest_published())
        floor = max((order for order in whole if order), default=None)
        alive = self._workers.alive()
        busy = self._persister.busy()
        self._slots.free_dead(alive, busy, floor, before)
        return alive, busy

    def _kill(self, entry: WorkerEntry) -> None:
        if not kill_and_wait(entry.pid, entry.start_ticks, KILL_TIMEOUT_S):
            raise PlatformError(f"worker {entry.worker_id} (pid {entry.pid}) does not die.")

    def _control_page(self) -> ControlPage:
        if self._control is None:
            raise UsageError(message="the keeper was not started.")
        return self._control

    def _crashed(self, thread: str, error: Exception) -> None:
        data = {"thread": thread, "error": f"{type(error).__name__}: {error}"}
        self._say("agent.task_failed", "error", data)

    def _say(self, kind: str, level: Level, data: dict[str, Any]) -> None:
        src = f"agent:{self._node_id}"
        self._report(Fact(kind=kind, at_s=self._clock(), src=src, level=level, data=data))


def _remove_tree(path: str, up: int) -> None:
    """Remove a folder, then up to `up` parents as long as they are empty."""
    shutil.rmtree(path, ignore_errors=True)
    for _ in range(up):
        path = os.path.dirname(path)
        try:
            os.rmdir(path)
        except OSError:
            return  # another node's or another run's folder is in it


def _remove_run_if_last(run_folder: str) -> None:
    """The last node of a run on this disk also removes what its workers shared."""
    if os.path.isdir(run_folder) and set(os.listdir(run_folder)) <= set(SHARED_FOLDERS):
        shutil.rmtree(run_folder, ignore_errors=True)
