"""Where a new generation's state comes from, when no member holds any: asks every tier.

Runs in the background, so it may block and try again; members wait in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from relit_platform.control.ports import AgentError, AgentPort, BackgroundPort, ObjectPort
from relit_platform.errors import PlatformError
from relit_platform.facts import NodeInventory, RestorePlan, StateSource
from relit_platform.machines.generation import PlanRestore
from relit_platform.machines.restore import Nothing, ObjectCommit, plan_restore
from relit_platform.node.paths import NodeFolders
from relit_platform.run_config import RunConfig
from relit_storage.errors import FencedError, NotRestorableError, StoreError

STORE_TRIES = 30
NEAR_TRIES = 3
RETRY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome of a plan: a source, or why nothing can be restored.

    inventories: of agents that may be newer than the epoch, so that their steps are adopted.
    """

    plan_id: int
    source: StateSource | None
    error: str = ""
    inventories: tuple[NodeInventory, ...] = ()


class Planner:
    """Collects inventories and the object tier's commits, and lets the pure planner choose."""

    def __init__(
        self,
        *,
        config: RunConfig,
        agents: AgentPort,
        objects: ObjectPort,
        background: BackgroundPort,
        answer: Callable[[Answer], None],
    ) -> None:
        self._config = config
        self._agents = agents
        self._objects = objects
        self._background = background
        self._answer = answer

    def plan(self, request: PlanRestore, tries: int = 1) -> None:
        """Answer once, now or after retries. A store that stays away is waited for a minute.

        Until then a plan from memory or disk is taken only after NEAR_TRIES: the object tier may
        hold a newer step than a disk that has lost some.
        """
        inventories = self._inventories(request)
        problem = ""
        commits: Sequence[ObjectCommit] = ()
        try:
            commits = self._objects.commits()
        except StoreError as error:
            problem = str(error)
        if problem and tries < NEAR_TRIES:
            self._again(request, tries)
            return
        try:
            outcome = plan_restore(
                inventories,
                commits,
                request.lineage,
                request.excluded,
                request.nodes,
                self._config.run_id,
            )
        except NotRestorableError as error:
            if problem and tries < STORE_TRIES:
                self._again(request, tries)
                return
            self._answer(Answer(plan_id=request.plan_id, source=None, error=str(error)))
            return
        if problem and isinstance(outcome, Nothing):
            if tries < STORE_TRIES:
                self._again(request, tries)
                return
            error_text = f"the object tier cannot be read: {problem}"
            self._answer(Answer(plan_id=request.plan_id, source=None, error=error_text))
            return
        self._answer(
            Answer(
                plan_id=request.plan_id,
                source=_source(outcome, problem),
                inventories=tuple(inventories),
            )
        )

    def _again(self, request: PlanRestore, tries: int) -> None:
        self._background.submit(lambda: self.plan(request, tries + 1), RETRY_S)

    def _inventories(self, request: PlanRestore) -> list[NodeInventory]:
        """Of every agent that answers; one that does not has nothing to restore from now.

        An agent may have come to life with the workers, after the epoch began: it is sealed here.
        """
        try:
            nodes = self._agents.nodes()
        except AgentError:
            return []
        found = [self._inventory(node, request) for node in nodes]
        return [inventory for inventory in found if inventory is not None]

    def _inventory(self, node: str, request: PlanRestore) -> NodeInventory | None:
        checkpoint = self._config.checkpoint
        try:
            self._agents.seal(node, request.epoch, request.generation)
            inventory = self._agents.inventory(node)
        except (AgentError, PlatformError, FencedError):
            return None  # away, or serving a newer epoch: then this manager is over as well
        if inventory.disk_root:
            return inventory
        folders = NodeFolders.of(
            checkpoint.shm_dir, checkpoint.disk_dir, self._config.run_id, node
        )
        return replace(inventory, disk_root=folders.disk)


def _source(outcome: RestorePlan | Nothing, problem: str) -> StateSource:
    if isinstance(outcome, Nothing):
        return StateSource(kind="fresh", step=0)
    if problem:
        passed_over = {
            "tier": "object",
            "step": None,
            "generation": None,
            "file": "",
            "reason": f"not readable: {problem}",
        }
        outcome = replace(outcome, refusals=(passed_over, *outcome.refusals))
    return StateSource(kind="checkpoint", step=outcome.step, plan=outcome)
