"""A rank's membership: asking for a place, meeting the others, and having the right state.

    enter(fault)
      close the old group -> open a rendezvous store -> ask the manager until it assigns a place
      -> form the group -> take state (from a survivor, a checkpoint, or rank 0) -> agree -> go on

Every failure on the way, a peer that dies while the group forms or a checkpoint file that is not
what was written, begins the round again with a fault report. State that was overwritten halfway is
never offered to others: `holds` is False from the first byte written to the last check passed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from relit_platform.errors import CollectiveBrokenError, DriftError, StaleMemberError
from relit_platform.facts import (
    Assignment,
    Dismissed,
    FaultReport,
    JoinRequest,
    Refused,
)
from relit_platform.run_config import RunConfig
from relit_platform.worker.boundary import trainable_parameters
from relit_platform.worker.broadcast import (
    agree,
    gather_values,
    receive_state,
    send_state,
    state_digest,
)
from relit_platform.worker.filling import rooms
from relit_platform.worker.forming import form_watched
from relit_platform.worker.gradient_sync import GradientSync
from relit_platform.worker.initial_state import IMPORTED, load_import, load_initial
from relit_platform.worker.manager_client import Level, ManagerClient, tell
from relit_platform.worker.process_group import Group, close_group, form_group, open_rendezvous
from relit_platform.worker.recorder import Recorder
from relit_platform.worker.restore import load_plan
from relit_platform.worker.sharding import refuse_parts, whole_tensors
from relit_platform.worker.state_tree import flatten, restore, sharded_like
from relit_platform.worker.taking_over import MAX_LISTED, Report
from relit_storage.errors import CorruptShardError, DatasetChangedError, StoreUnavailableError
from relit_storage.run.layout import INITIAL

COLLECTIVE_TIMEOUT_S = 120.0
NOTHING = -1  # held step of a member without state, in the exchange of held steps


class Member:
    """One process's place in the run; `step` counts the completed steps whose state it holds."""

    def __init__(
        self,
        *,
        config: RunConfig,
        worker_id: str,
        epoch: int,
        node_id: str,
        pid: int,
        host: str,
        manager: ManagerClient,
        recorder: Recorder,
    ) -> None:
        self._config = config
        self.worker_id = worker_id
        self._epoch = epoch
        self._node_id = node_id
        self._pid = pid
        self._host = host
        self._manager = manager
        self._recorder = recorder
        self._group: Group | None = None
        self._store: TCPStore | None = None
        self._holds = False
        self._lineage: tuple[tuple[int, int], ...] = ()
        self._cursor: Callable[[int], Mapping[str, Any]] = lambda step: {}
        self._check_cursor: Callable[[dict[str, Any]], Any] = lambda state: None
        self.entered = False
        self.epilogue = False
        self.rank = -1
        self.world = 0
        self.generation = 0
        self.step = 0

    def bind_cursor(
        self,
        cursor: Callable[[int], Mapping[str, Any]],
        check: Callable[[dict[str, Any]], Any],
    ) -> None:
        """How to write the data position of a step, and how to check a saved one."""
        self._cursor, self._check_cursor = cursor, check

    def make_sync(self, objects: Mapping[str, Any]) -> GradientSync:
        """Gradient sync over `trainable_parameters`."""
        return GradientSync(trainable_parameters(objects))

    def enter(
        self, objects: Mapping[str, Any], sync: GradientSync, fault: FaultReport | None
    ) -> bool:
        """Take a place in the next generation; False if there is nothing left to do.

        Blocks until the generation is formed and state is in place, however long that takes: a
        hot spare spends its life in here. Raises StaleMemberError when fenced off.
        """
        while True:
            self._recorder.phase("join", self.step)
            self._close()
            sync.detach()  # fresh buffers at attach: a broken collective may still write to these
            self._store, endpoint = open_rendezvous(self._host)
            assignment = self._ask(endpoint, fault)
            if assignment is None:
                return False
            try:
                self._drill(assignment, "form")
                self._form(assignment)
                self._drill(assignment, "restore")
                began_s = time.monotonic()
                self._take_state(assignment, objects)
                self._agree(objects)
                restore_s = time.monotonic() - began_s
            except CollectiveBrokenError as broken:
                fault = self._fault("collective", str(broken))
                continue
            except CorruptShardError as corrupt:
                fault = self._fault("restore_refused", str(corrupt), dict(corrupt.fields))
                continue
            except StoreUnavailableError as away:  # says nothing about the checkpoint: ask again
                fault = self._fault("timeout", str(away))
                continue
            assert self._group is not None
            sync.attach(self._group)
            self._entered(assignment, restore_s)
            return True

    def meet(self) -> FaultReport | None:
        """Wait until every rank of the generation is here; the fault to enter with if one died."""
        if self._group is None or self.epilogue:
            return None
        try:
            gather_values(self._group, [self.step])
        except CollectiveBrokenError as broken:
            return self._fault("collective", str(broken))
        return None

    def leave(self) -> None:
        """Close the group; peers see a broken connection at once. Safe to repeat."""
        self._close()

    # ---- the steps of a round ----

    def _ask(self, endpoint: tuple[str, int], fault: FaultReport | None) -> Assignment | None:
        while True:
            reply = self._manager.join(
                JoinRequest(
                    worker_id=self.worker_id,
                    epoch=self._epoch,
                    node_id=self._node_id,
                    pid=self._pid,
                    rank=self.rank if self.entered else None,
                    generation=self.generation,
                    step=self.step if self._holds else None,
                    endpoint=endpoint,
                    at_s=time.time(),
                    fault=fault,
                    lineage=self._lineage,
                )
            )
            if isinstance(reply, Assignment):
                return reply
            if isinstance(reply, Dismissed):
                return None
            if isinstance(reply, Refused):
                raise StaleMemberError(
                    worker_id=self.worker_id,
                    generation=self.generation,
                    newest=reply.newest_generation,
                    reason=reply.reason,
                )

    def _form(self, assignment: Assignment) -> None:
        store = self._store if assignment.rank == 0 else None
        self._group = form_watched(
            lambda: form_group(assignment, store, COLLECTIVE_TIMEOUT_S, host=self._host),
            assignment,
            lambda: self._manager.lost(assignment.generation),
        )
        self.rank, self.world = assignment.rank, assignment.world
        self.generation = assignment.generation
        self.epilogue = assignment.epilogue
        self._lineage = assignment.lineage
        self._recorder.place(self.rank, self.generation, assignment.last_row_step)

    def _drill(self, assignment: Assignment, phase: str) -> None:
        drill = self._recorder.drill
        if drill is not None:
            drill.check(assignment.rank, assignment.source.step + 1, phase)

    def _take_state(self, assignment: Assignment, objects: Mapping[str, Any]) -> None:
        assert self._group is not None
        source = assignment.source
        self._recorder.phase("restore", self.step)
        if source.kind == "checkpoint":
            assert source.plan is not None
            self._holds = False
            plan = self._recorder.near(source.plan, self._node_id)
            like = partial(sharded_like, objects)
            there = partial(self._rooms, objects)
            shared = any(_same_node(self.worker_id, other) for other in assignment.members)
            tensors, extras = load_plan(plan, self._recorder.store, like, there, shared=shared)
            if IMPORTED not in extras[0]:
                self._apply(objects, tensors, extras[0], give=True)
                return
            report = load_import(self._config.run_id, objects, tensors, extras[0])
            self._recorder.adopt(extras[0])
            if self._begun(report, source.step):
                return
        elif source.kind == "fresh" and self._config.init is not None:
            self._holds = False
            if self._begun(load_initial(self._config.init, objects), source.step):
                return
        holder = source.rank or 0
        held = [
            values[0]
            for values in gather_values(self._group, [self.step if self._holds else NOTHING])
        ]
        need = [r for r in range(self.world) if r != holder and held[r] != source.step]
        if self.rank == holder:
            tensors, skeleton = flatten(objects)
            if need:
                refuse_parts(tensors)
            cursor = self._cursor(self.step)
            extras_json = self._recorder.extras(self, cursor, skeleton)
            send_state(self._group, need, tensors, extras_json)
            self._holds = True
        elif self.rank in need:
            self._holds = False
            tensors, message = receive_state(self._group, holder)
            self._apply(objects, tensors, message)

    def _begun(self, report: Report, step: int) -> bool:
        """True if all that is registered was taken over. Else the rest is as each rank's code made
        it, and one of them counts.
        """
        self.step = step
        if self.rank == 0:
            self._tell_initial(report)
        return report.whole

    def _tell_initial(self, report: Report) -> None:
        """An event, and all names in the run directory."""
        self._recorder.store.put(INITIAL, json.dumps(report.to_json()).encode())
        lacking = bool(report.missing or report.unexpected)
        level: Level = "warning" if lacking else "info"
        data = report.to_json(MAX_LISTED)
        tell(self._recorder.manager, self, "state.initialized", data, level)

    def _rooms(
        self,
        objects: Mapping[str, Any],
        extras: Mapping[str, Any],
        shapes: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """What a checkpoint is read into, once it is clear that it is for this run."""
        if IMPORTED in extras:
            return {}
        self._check_position(extras["cursor"])
        self._check_drift(extras["ids"])
        return rooms(objects, shapes, extras["objects"])

    def _apply(
        self,
        objects: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        extras: Mapping[str, Any],
        *,
        give: bool = False,
    ) -> None:
        self._check_position(extras["cursor"])
        self._check_drift(extras["ids"])
        restore(objects, tensors, extras["objects"], give=give)
        self.step = int(extras["step"])
        self._recorder.adopt(extras)

    def _check_position(self, cursor: Mapping[str, Any]) -> None:
        """The saved data position must be one of this data set; another one only by name."""
        try:
            if cursor:
                self._check_cursor(dict(cursor))
        except DatasetChangedError as changed:
            if "data" not in self._config.allow_drift:
                diff = "; ".join(changed.fields["diff"])
                raise DriftError(
                    what="the data set", diff=diff, flag="--allow-data-change"
                ) from changed

    def _check_drift(self, saved: Mapping[str, str]) -> None:
        ours = {"config": self._config.config_sha, "code": self._config.code_sha}
        for what, value in ours.items():
            if saved.get(what, value) != value and what not in self._config.allow_drift:
                raise DriftError(
                    what=what,
                    diff=f"sha256 {saved[what][:12]} -> {value[:12]}",
                    flag=f"--allow-{what}-change",
                )

    def _agree(self, objects: Mapping[str, Any]) -> None:
        """Design section 4.11: nobody goes on before all hold the same."""
        assert self._group is not None
        tensors, _ = flatten(objects)
        digest = state_digest(whole_tensors(tensors))  # parts differ from rank to rank
        agree(self._group, {"step": self.step, "state digest": digest})
        self._holds = True

    def _entered(self, assignment: Assignment, restore_s: float) -> None:
        first = not self.entered
        self.entered = True
        data = {
            "worker_id": self.worker_id,
            "pid": self._pid,
            "node_id": self._node_id,
            "newcomer": first,
            "source": assignment.source.kind,
            "rank": self.rank,
            "restore_s": restore_s,
        }
        tell(self._recorder.manager, self, "rank.entered", data)

    def _fault(self, kind: Any, message: str, refused: dict[str, Any] | None = None) -> FaultReport:
        return FaultReport(
            kind=kind, message=message[:300], at_s=time.time(), step=self.step, refused=refused
        )

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            close_group(group)
        self._store = None


def _same_node(worker_id: str, other: str) -> bool:
    """Are these two processes of one node? An id begins with its node's."""
    return worker_id != other and worker_id.partition("-")[0] == other.partition("-")[0]
