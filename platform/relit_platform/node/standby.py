"""A standby process per node: idle, with everything loaded, for the next rank that Ray starts here.

Most of a rank's start is one thread that loads Python, Ray and torch. Ray hands an idle process of
the same runtime environment and job to the next actor that wants one; so each node keeps one of
them in store. It holds no rank, no CPU, no GPU and no tensors, only some 350 MB of memory, and
Ray ends it with the job. What it loads ahead is in its environment, see worker.start.preload.

    a rank says hello  ->  SETTLE_S later: is one there?  ->  ask the raylet for what is missing
                           every LOOK_EVERY_S: again          START_S later: again
    a new epoch begins ->  at once: is there one for each rank of this node?

When all ranks start anew, with the supervisor, a process is wanted for each of them: these load
while Ray Train's controller does. One that no rank comes for stays, and is the next one's.

A node without one, because ranks died faster than it could load or because the raylet refuses,
starts its ranks as Ray does. An actor or task that the user's code starts inside a rank has the
same environment: it may take the process, and is never ended here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from relit_platform.node.processes import ProcessKey, kill_and_wait, start_ticks
from relit_platform.worker.start import LOADED

RAYLET_PID = "RAY_RAYLET_PID"  # set by Ray
RANK_OF = "RELIT_RANK_OF"  # in the environment of all processes that Ray starts for a run's ranks
SETTLE_S = 3.0  # after a rank's hello: it is still starting, and should have the processors
SEEN_S = 8.0  # for a process that was asked for to look like one
START_S = 30.0  # until it must
LOOK_EVERY_S = 10.0
UNSEEN_MAX = 3  # for each that is wanted
NEVER = float("inf")
REFUSED_S, REFUSED_MAX_S = 10.0, 600.0
_END_S = 5.0
_RAYS_TITLE, _IDLE_TITLE = b"ray::", b"ray::IDLE"


@dataclass(frozen=True, slots=True)
class Seed:
    """What a rank of this node was started with, so that a process can be started alike.

    runtime_env: as Ray writes it, byte for byte; job_id: in hex.
    """

    runtime_env: str
    job_id: str


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known between two looks; times in seconds of one monotonic clock.

    refused: times in a row that the raylet said no. unseen: processes that it was asked for and
    that were neither found nor, as far as is known, taken by a rank. asked_until_s: until then one
    may be starting, and not look like what it will be. epoch: the newest one heard of, ranks: how
    many lived here at the newest hello. expected: ranks that are about to start here.
    """

    seed: Seed | None = None
    look_at_s: float = NEVER
    refused: int = 0
    unseen: int = 0
    asked_until_s: float = float("-inf")
    epoch: int = 0
    ranks: int = 0
    expected: int = 0

    @property
    def gave_up(self) -> bool:
        """None has shown up for long, and none is asked for until a rank says hello."""
        return self.seed is not None and self.look_at_s == NEVER


def heard(outlook: Outlook, seed: Seed, now_s: float, epoch: int = 0, ranks: int = 0) -> Outlook:
    """A rank has started, the last of so many, of this epoch: it may be in the standby process."""
    return replace(
        outlook,
        seed=seed,
        look_at_s=max(now_s + SETTLE_S, outlook.asked_until_s),
        unseen=max(0, outlook.unseen - 1),
        epoch=max(outlook.epoch, epoch),
        ranks=ranks,
        expected=max(0, outlook.expected - 1),
    )


def sealed(outlook: Outlook, epoch: int, now_s: float) -> Outlook:
    """All ranks of this node start anew, if their epoch is over. An agent is sealed more than once
    in an epoch, and for the first time when its ranks are there.
    """
    if epoch <= outlook.epoch:
        return outlook
    if outlook.seed is None or not outlook.ranks:
        return replace(outlook, epoch=epoch)
    return replace(outlook, epoch=epoch, look_at_s=now_s, expected=outlook.ranks)


def looked(outlook: Outlook, wanted: int, there: int, now_s: float) -> tuple[Outlook, int]:
    """How many processes to ask for now, when `there` of them were found.

    A raylet that starts none, or a node whose processes cannot be looked at, is not asked for ever.
    Ranks that were expected are asked for once: they may come elsewhere.
    """
    wanted, outlook = max(wanted, outlook.expected), replace(outlook, expected=0)
    unseen = outlook.unseen if there < wanted else 0
    missing = max(0, wanted - there) if outlook.seed is not None else 0
    asked = min(missing, max(0, UNSEEN_MAX * wanted - unseen))
    later = replace(outlook, unseen=unseen + asked, look_at_s=now_s + LOOK_EVERY_S)
    if asked:
        later = replace(later, look_at_s=now_s + START_S, asked_until_s=now_s + SEEN_S)
    elif missing:
        later = replace(later, look_at_s=NEVER)
    return later, asked


def answered(outlook: Outlook, refusal: str, asked: int, now_s: float) -> Outlook:
    """What came of asking for so many; refusal is empty if the raylet starts them."""
    if not refusal:
        return replace(outlook, refused=0)
    pause_s = min(REFUSED_S * 2**outlook.refused, REFUSED_MAX_S)
    refused, unseen = outlook.refused + 1, max(0, outlook.unseen - asked)
    return replace(outlook, refused=refused, unseen=unseen, look_at_s=now_s + pause_s)


class Standby:
    """Keeps `wanted` standby processes. `ask(seed, count)` raises if the raylet refuses; `ranks()`
    are the pids of ranks that said hello; `say(why)` is called when there will be none for a while.
    """

    def __init__(
        self,
        *,
        run_id: str,
        wanted: int,
        ranks: Callable[[], Collection[int]],
        ask: Callable[[Seed, int], None],
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._run_id = run_id
        self._wanted = wanted
        self._ranks = ranks
        self._ask = ask
        self._say = say
        self._clock = clock
        self._outlook = Outlook()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="standby", daemon=True)

    def start(self) -> None:
        """Begin to look; does nothing if none is wanted, or could not be told apart."""
        if self._wanted and os.environ.get(RAYLET_PID, str(os.getppid())) != str(os.getppid()):
            self._say("processes of this node are not started by the raylet itself")
        elif self._wanted:
            self._thread.start()

    def offer(self, seed: Seed | None, epoch: int = 0) -> None:
        """A rank said hello. Does not block; None: it does not know how it was started."""
        if seed is None:
            return
        ranks = len(self._ranks())
        with self._changed:
            self._outlook = heard(self._outlook, seed, self._clock(), epoch, ranks)
            self._changed.notify()

    def sealed(self, epoch: int) -> None:
        """Ranks of older epochs are being ended. Does not block."""
        with self._changed:
            self._outlook = sealed(self._outlook, epoch, self._clock())
            self._changed.notify()

    def close(self) -> None:
        """End the standby processes; none is started from now on. Blocks until they are gone."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        for process in standing(self._run_id, os.getppid(), self._ranks()):
            kill_and_wait(process.pid, process.start_ticks, _END_S)

    def _loop(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                left_s = self._outlook.look_at_s - self._clock()
                if left_s > 0:
                    self._changed.wait(min(left_s, LOOK_EVERY_S))
                    continue
            self._look()

    def _look(self) -> None:
        refusal, asked = "", 0
        try:
            there = len(standing(self._run_id, os.getppid(), self._ranks()))
            with self._changed:
                self._outlook, asked = looked(self._outlook, self._wanted, there, self._clock())
                seed = None if self._closed else self._outlook.seed
                gave_up = self._outlook.gave_up
            if gave_up:
                self._say("those asked for do not show up; the next is asked for at a hello")
            if seed is None or not asked:
                return
            self._ask(seed, asked)
        except Exception as error:  # of gRPC, of Ray, of /proc: whatever it is, ranks start without
            refusal = f"{type(error).__name__}: {error}"[:300]
        with self._changed:
            if refusal and not self._outlook.refused:
                self._say(refusal)
            self._outlook = answered(self._outlook, refusal, asked, self._clock())


def standing(
    run_id: str, raylet: int, ranks: Collection[int], *, idle: bool = False
) -> list[ProcessKey]:
    """The raylet's child processes that were started for ranks of the run and hold none, those
    that are still loading among them; idle: only those that have loaded and wait.
    """
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in ranks or _parent(name) != raylet:
            continue
        title = _read(name, "cmdline")
        if title.startswith(_RAYS_TITLE) and not title.startswith(_IDLE_TITLE):
            continue  # an actor or a task is in it
        if not started_for(name, run_id) or (idle and not _waits(name, title)):
            continue
        ticks = start_ticks(int(name))
        if ticks is not None:
            found.append(ProcessKey(int(name), ticks))
    return found


def started_for(pid: str, run_id: str) -> bool:
    """Has Ray started this process for a rank of the run, or is it a child of one that it has?"""
    return f"{RANK_OF}={run_id}".encode() in _read(pid, "environ").split(b"\0")


def _waits(pid: str, title: bytes) -> bool:
    return title.startswith(_IDLE_TITLE) and _read(pid, "comm").strip() == LOADED.encode()


def _parent(pid: str) -> int:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if len(fields) > 1 and fields[0] != b"Z" else 0


def _read(pid: str, what: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{what}", "rb") as file:
            return file.read()
    except OSError:  # gone, or another user's
        return b""
