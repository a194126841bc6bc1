"""The emergency save of a run that ends early; what is saved is chosen in machines/rescue.py."""

from __future__ import annotations

import threading
from collections.abc import Callable

from relit_platform.control.checkpoint_desk import CheckpointDesk
from relit_platform.control.ports import AgentError, AgentPort
from relit_platform.errors import PlatformError
from relit_platform.facts import NodeInventory, RowBatch, ShardFailed, SlotInfo
from relit_platform.machines.checkpoint_state import Note, Persisting
from relit_platform.machines.rescue import choose_rescue, newest_kept
from relit_storage.errors import StorageError


class Rescuer:
    """The supervisor's last wish to the coordinator. lock guards `saves`, as everywhere."""

    def __init__(
        self,
        *,
        agents: AgentPort,
        saves: CheckpointDesk,
        lock: threading.Condition,
        say: Callable[[Note], None],
        take_rows: Callable[[RowBatch], object],
        clock: Callable[[], float],
    ) -> None:
        self._agents = agents
        self._saves = saves
        self._lock = lock
        self._say = say
        self._take_rows = take_rows
        self._clock = clock

    def rescue(self) -> str:
        """Have the newest boundary that is whole in memory saved on every tier, and the rows that
        are left beside it written; why (not) the former.

        Blocks on the agents' answers, not on the save: the status says `saving` meanwhile.
        Repeating it is harmless.
        """
        inventories = self._inventories()
        with self._lock:
            choice = choose_rescue(inventories, self._saves.book)
            for slot in choice.slots:
                self._saves.feed(
                    Persisting(
                        step=slot.step,
                        generation=slot.generation,
                        rank=slot.rank,
                        world=slot.world,
                        final=True,
                    )
                )
            if choice.slots:
                first = choice.slots[0]
                data = {"reason": choice.reason, "world": first.world}
                self._say(
                    Note(
                        kind="ckpt.rescue",
                        step=first.step,
                        generation=first.generation,
                        data=data,
                    )
                )
        for slot in choice.slots:
            self._persist(slot)
        self._collect_rows(inventories)
        return choice.reason

    def _inventories(self) -> list[NodeInventory]:
        found: list[NodeInventory] = []
        try:
            for node in self._agents.nodes():
                try:
                    found.append(self._agents.inventory(node))
                except (AgentError, PlatformError):
                    pass  # its slots will be missed, by rank
        except AgentError:
            pass
        return found

    def _collect_rows(self, inventories: list[NodeInventory]) -> None:
        """The last rows of ranks that ended before they could send them."""
        with self._lock:
            slots = newest_kept(inventories, self._saves.book.lineage)
        silent: set[str] = set()
        for slot in slots:
            if slot.node_id in silent:
                continue
            try:
                rows = self._agents.rows_beside(slot.node_id, slot.path)
                self._take_rows(RowBatch(generation=slot.generation, rank=slot.rank, rows=rows))
                return
            except AgentError:
                silent.add(slot.node_id)
            except (PlatformError, StorageError, OSError, ValueError, KeyError, TypeError):
                continue  # beside another rank's there may be whole ones

    def _persist(self, slot: SlotInfo) -> None:
        try:
            self._agents.persist(
                slot.node_id,
                slot.worker_id,
                slot.path,
                slot.step,
                slot.generation,
                self._saves.epoch,
            )
        except (AgentError, PlatformError, StorageError) as error:
            failed = ShardFailed(
                step=slot.step,
                generation=slot.generation,
                rank=slot.rank,
                node_id=slot.node_id,
                tier="disk",
                reason=str(error),
                at_s=self._clock(),
            )
            with self._lock:
                self._saves.feed(failed)
