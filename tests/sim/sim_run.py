"""One simulated run: a supervisor, a manager, nodes with agents, ranks, a store, and an atlas.

Fault model. At random moments of the first part of a run, and within the limits below:

    rank        SIGKILL at any moment (forward, update half done, snapshot, joining, restoring,
                finishing); SIGSTOP for up to twice the collective timeout, then SIGCONT (a zombie)
    all ranks   SIGKILL together
    manager     SIGKILL at any moment, and at any call it makes, before or after its effect; it
                comes back empty
    agent       SIGKILL; what it had not reported or persisted is lost with it, files are not
    supervisor  SIGKILL; what it had drained but not written is lost; its workers die with it, or
                linger until they are sealed
    network     a rank or an agent cut off from the manager for seconds; answers lost; messages
                delivered late and twice
    store       away for seconds; single calls that fail before or after their effect
    people      pin the newest durable step
    bytes       one shard of a step flipped, in memory, on disk or in the object tier

Not in it, because the design does not promise to survive it in this version: the loss of a node
together with every state holder; damage to every copy of the state at once; two supervisors
(the lease has tests of its own).
"""

from __future__ import annotations

import random
from typing import Any

from sim_check import Check
from sim_clock import Clock
from sim_group import Groups
from sim_manager import FaultyStore, SimManager
from sim_node import SimNode
from sim_rank import SimRank
from sim_supervisor import SimSupervisor

from relit_platform.run_config import CheckpointConfig, RecoveryConfig, RunConfig, ScalingConfig
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.checkpoint.pins import write_pin
from relit_storage.stores.memory import MemoryStore

FAULTS_WITHIN_S = 25.0
CALM_S = 400.0
RETIRE_WITHIN_S = 0.1


class SimRun:
    """Builds everything from one seed. `finish` runs it to its end and checks it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.clock = Clock(seed)
        rng = self.clock.rng
        self.steps = rng.randint(15, 40)
        self.config = _config(rng, rng.randint(1, 3), rng.randint(0, 2), rng.choice([2, 4]))
        self.pinned: set[int] = set()
        self.marks: dict[tuple[int, int], dict[str, Any]] = {}  # beside each snapshot
        # Metric rows beside each snapshot: those not known to be written when it was taken.
        self.kept: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
        self.inner_store = MemoryStore()
        self.store = FaultyStore(self.clock, self.inner_store)
        self.check = Check(self)
        self.manager = SimManager(self.clock, self.config, self.store)
        self.nodes = [
            SimNode(
                node_id="n1",
                clock=self.clock,
                store=self.store,
                deliver=lambda fact: self.manager.call("fact", fact),
            )
        ]
        self.manager.nodes = {node.node_id: node for node in self.nodes}
        self.groups = Groups(self)
        self.ranks: list[SimRank] = []
        self.supervisor = SimSupervisor(self)
        for _ in range(rng.randint(0, 8)):
            self.clock.after(self.clock.between(0.0, FAULTS_WITHIN_S), self._fault)
        for _ in range(rng.randint(0, 2)):
            self.clock.after(self.clock.between(0.0, FAULTS_WITHIN_S), self._pin)
        self._look()

    def finish(self) -> None:
        over = self.clock.run(lambda: self.supervisor.over, FAULTS_WITHIN_S + CALM_S)
        assert over, f"not finished: {self.manager.alive and self.manager.call('status')}"
        self.check.tiers()
        self.check.finished()

    def new_rank(self, epoch: int) -> SimRank:
        rank = SimRank(self, len(self.ranks) + 1, self.nodes[0], epoch)
        self.ranks.append(rank)
        return rank

    def living(self) -> list[SimRank]:
        return [rank for rank in self.ranks if rank.alive]

    def _look(self) -> None:
        self.check.tiers()
        if not self.supervisor.over:
            self.clock.after(1.0, self._look)

    def _pin(self) -> None:
        """The pin may come a moment too late for a deletion that is under way; not later."""
        newest = CommitLog(self.inner_store).replay().newest
        if newest is not None:
            step = newest.step
            self.clock.say(f"step {step} is pinned")
            write_pin(self.inner_store, step, reason="", at_s=self.clock.now)
            self.clock.after(RETIRE_WITHIN_S, lambda: self._pin_holds(step))

    def _pin_holds(self, step: int) -> None:
        if step in {record.step for record in CommitLog(self.inner_store).replay().commits}:
            self.pinned.add(step)

    # ---- the atlas ----

    def _fault(self) -> None:
        kinds = {
            "kill rank": 6,
            "kill all": 1,
            "kill manager": 2,
            "kill manager in a call": 3,
            "kill agent": 2,
            "kill supervisor": 1,
            "freeze rank": 2,
            "cut rank": 2,
            "cut agent": 1,
            "store": 2,
            "flip": 1,
        }
        kind = self.clock.rng.choices(list(kinds), list(kinds.values()))[0]
        self.clock.say(f"fault: {kind}")
        getattr(self, "_" + kind.replace(" ", "_"))()

    def _victim(self) -> SimRank | None:
        living = self.living()
        return self.clock.rng.choice(living) if living else None

    def _kill_rank(self) -> None:
        if rank := self._victim():
            rank.kill("SIGKILL")

    def _kill_all(self) -> None:
        for rank in self.living():
            rank.kill("SIGKILL to all")

    def _kill_manager(self) -> None:
        self.manager.kill()

    def _kill_manager_in_a_call(self) -> None:
        self.manager.die_at_call = self.clock.rng.randint(0, 12)
        self._kill_rank()

    def _kill_agent(self) -> None:
        self.nodes[0].kill_agent()

    def _kill_supervisor(self) -> None:
        self.supervisor.kill()

    def _freeze_rank(self) -> None:
        if rank := self._victim():
            rank.frozen = True
            self.clock.after(self.clock.between(0.5, 8.0), lambda: setattr(rank, "frozen", False))

    def _cut_rank(self) -> None:
        if rank := self._victim():
            rank.cut_until_s = self.clock.now + self.clock.between(0.5, 5.0)

    def _cut_agent(self) -> None:
        self.nodes[0].cut_until_s = self.clock.now + self.clock.between(0.5, 5.0)

    def _store(self) -> None:
        self.store.down_until_s = self.clock.now + self.clock.between(0.5, 5.0)
        self.store.failure_rate = 0.1
        self.clock.after(10.0, lambda: setattr(self.store, "failure_rate", 0.0))

    def _flip(self) -> None:
        """Damage one copy, and only where another whole step is left to fall back to."""
        node = self.nodes[0]
        if len(node.manifests) < 2 or self.check.corrupted:
            return
        if self.clock.chance(0.5):
            generation, step = max((g, s) for s, g in node.manifests)
            place: Any = (step, generation, 0)
            content, total, world = node.disk[place]
            node.disk[place] = (content ^ 1, total, world)
            self.check.corrupted.add(place)
            # Slots of that step and later would hide it.
            node.slots = [slot for slot in node.slots if slot.step < step or slot.pinned]
        elif node.slots:
            slot = node.slots[-1]
            slot.content = -1
            self.check.corrupted.add(slot.path)
            slot.pinned = False


def _config(rng: random.Random, workers: int, spares: int, every: int) -> RunConfig:
    return RunConfig(
        run_id="sim",
        name="sim",
        experiment="e",
        store="memory://sim",
        run_key="e/sim",
        entry="m:f",
        code_key="",
        code_sha="",
        scaling=ScalingConfig(workers=workers, spares=spares),
        checkpoint=CheckpointConfig(
            disk_every_steps=every,
            disk_every_s=rng.choice([0.0, 0.5, 1.3]),
            object_every_steps=rng.choice([0, 2 * every]),
            object_every_s=rng.choice([1.5, 4.0]),
            keep_disk=rng.randint(1, 3),
            keep_object=rng.randint(1, 3),
            keep_object_every_steps=rng.choice([0, 10]),
            keep_object_bytes=rng.choice([0, 0, 400]),
            disk_auto=rng.choice([False, False, True]),
            object_auto=rng.choice([False, False, True]),
            auto_max_s=rng.choice([1.0, 3.0]),
        ),
        recovery=RecoveryConfig(no_progress=50),
    )
