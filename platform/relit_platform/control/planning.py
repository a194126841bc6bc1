"""Where a new generation's state comes from, when no member holds any: asks every tier.

Runs in the background, so it may block and try again; members wait in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from relit_platform.control.ports import AgentError, AgentPort, BackgroundPort, ObjectPort
from relit_platform.errors import PlatformError
from relit_platform.facts import NodeInventory, RestorePlan, StateSource
from relit_platform.machines.generation import PlanRestore
from relit_platform.machines.restore import Nothing, ObjectCommit, plan_restore
from relit_platform.node.paths import NodeFolders
from relit_platform.run_config import RunConfig
from relit_storage.errors import FencedError, NotRestorableError, StoreError

RETRY_S = 0.5
PATIENCE_S = 15.0  # an agent that was killed is back by then
LAST_PATIENCE_S = 120.0  # when nothing was found without what is silent


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
        listen: Callable[[str, int], None],
        steady: Callable[[], float],
    ) -> None:
        self._config = config
        self._agents = agents
        self._objects = objects
        self._background = background
        self._answer = answer
        self._listen = listen
        self._steady = steady

    def plan(self, request: PlanRestore, began_s: float | None = None) -> None:
        """Answer once, now or after retries; what does not answer is asked again first.

        After PATIENCE_S a plan is taken without it, and says so: it could have held a newer step.
        That there is nothing to restore is believed only when everybody has answered.
        """
        silent: list[str] = []
        inventories = self._inventories(request, silent)
        commits: Sequence[ObjectCommit] = ()
        try:
            commits = self._objects.commits()
        except StoreError as error:
            silent.append(f"object tier: {error}")
        answer = self._choose(request, inventories, commits, silent)
        found = answer.source is not None and answer.source.kind == "checkpoint"
        began_s = self._steady() if began_s is None else began_s
        patience_s = PATIENCE_S if found else LAST_PATIENCE_S
        if silent and self._steady() - began_s < patience_s:
            self._background.submit(partial(self.plan, request, began_s), RETRY_S)
            return
        if silent and not found:
            why = answer.error or f"no checkpoint found, and no answer from {'; '.join(silent)}"
            answer = replace(answer, source=None, error=why)
        self._answer(answer)

    def _choose(
        self,
        request: PlanRestore,
        inventories: Sequence[NodeInventory],
        commits: Sequence[ObjectCommit],
        silent: Sequence[str],
    ) -> Answer:
        answer = Answer(plan_id=request.plan_id, source=None, inventories=tuple(inventories))
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
            return replace(answer, error=str(error))
        return replace(answer, source=_source(outcome, silent))

    def _inventories(self, request: PlanRestore, silent: list[str]) -> list[NodeInventory]:
        """Of every agent that answers; the others are added to `silent`.

        An agent may have come to life with the workers, after the epoch began: it is sealed here.
        """
        found: list[NodeInventory] = []
        try:
            nodes = self._agents.nodes()
            for node in nodes:
                try:
                    found.append(self._inventory(node, request, several=len(nodes) > 1))
                except (AgentError, PlatformError, FencedError) as error:
                    silent.append(f"agent {node}: {error}")
        except AgentError as error:
            silent.append(str(error))
        return found

    def _inventory(self, node: str, request: PlanRestore, *, several: bool) -> NodeInventory:
        checkpoint = self._config.checkpoint
        self._agents.seal(node, request.epoch, request.generation)
        if several:
            self._listen(node, request.epoch)
        inventory = self._agents.inventory(node)
        if inventory.disk_root:
            return inventory
        folders = NodeFolders.of(checkpoint.shm_dir, checkpoint.disk_dir, self._config.run_id, node)
        return replace(inventory, disk_root=folders.disk)


def _source(outcome: RestorePlan | Nothing, silent: Sequence[str]) -> StateSource:
    if isinstance(outcome, Nothing):
        return StateSource(kind="fresh", step=0)
    asked = [
        {"tier": "", "step": None, "generation": None, "file": "", "reason": f"no answer: {what}"}
        for what in silent
    ]
    plan = replace(outcome, refusals=(*asked, *outcome.refusals))
    return StateSource(kind="checkpoint", step=plan.step, plan=plan)
