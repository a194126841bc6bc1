"""The same loop in this process, without Ray, without checkpoints: for unit tests and debugging.

    value = local_run(train, {"lr": 0.1}, seed=0)

One rank of one; `run.*` behaves as on a cluster, except that nothing is saved and nothing is
recovered; state that a cluster could not save is refused here too. The metric rows are handed
back, so that a test can compare losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from relit_platform.facts import FaultReport
from relit_platform.worker.boundary import trainable_parameters
from relit_platform.worker.context import RankContext, StopTraining, call_train
from relit_platform.worker.drill import Drill
from relit_platform.worker.gradient_sync import GradientSync
from relit_platform.worker.process_group import Group
from relit_platform.worker.state_tree import flatten
from relit_storage.data.ledger import LedgerRow
from relit_storage.run.layout import checked_name


@dataclass(slots=True)
class LocalMember:
    """Rank 0 of 1, entered at once."""

    entered: bool = False
    epilogue: bool = False
    rank: int = 0
    world: int = 1
    generation: int = 1
    step: int = 0

    def bind_cursor(self, cursor: Any, check: Any) -> None:
        """Nothing is saved, so there is no position to write."""

    def make_sync(self, objects: Mapping[str, Any]) -> GradientSync:
        """As `Member.make_sync`."""
        return GradientSync(trainable_parameters(objects))

    def enter(self, objects: Mapping[str, Any], sync: GradientSync, fault: Any) -> bool:
        """A group of one."""
        sync.attach(Group(rank=0, world=1, generation=1, transport=None))
        self.entered = True
        return True

    def meet(self) -> FaultReport | None:
        """Nobody else to wait for."""
        return None


@dataclass(slots=True)
class LocalRecorder:
    """Keeps rows, tables and artifacts in memory."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[tuple[str, int], list[dict[str, Any]]] = field(default_factory=dict)
    artifacts: dict[str, bytes | str] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    stop_requested: bool = False

    def phase(self, name: str, step: int) -> None:
        """No heartbeat here."""

    def bind(self, objects: Mapping[str, Any]) -> None:
        """No snapshots here, but what could not be saved is found here already."""
        self.objects = objects
        flatten(objects)

    def settle(self, member: Any) -> None:
        """No snapshots here."""

    def rejoined(self, member: Any, cursor: Any) -> None:
        """No snapshots here."""

    def announce(self, total_steps: int | None, data: Any, member: Any) -> None:
        """Nobody to tell."""

    def votes(self) -> tuple[float, ...]:
        """Nothing is saved, so there is nothing to decide."""
        return ()

    def completed(
        self, *, member: Any, ledger: LedgerRow, loss: float, logged: Mapping[str, float], **_: Any
    ) -> None:
        """Keep the row. The first step may have made state, such as an optimizer's."""
        if not self.rows:
            flatten(self.objects)
        self.rows.append(
            {
                "step": member.step,
                "loss": loss,
                "lo": ledger.lo,
                "hi": ledger.hi,
                "epoch": ledger.epoch,
                "digest": ledger.digest,
                **logged,
            }
        )

    def save_last(self, member: Any, cursor: Mapping[str, Any]) -> None:
        """Nothing is saved."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the table."""
        self.tables[(checked_name(name), step)] = [dict(row) for row in rows]

    def artifact(self, name: str, content: bytes | str) -> None:
        """Keep the artifact."""
        self.artifacts[checked_name(name)] = content


@dataclass(frozen=True, slots=True)
class LocalResult:
    """What a local run left: the function's value, and one row per completed step."""

    value: Any
    rows: list[dict[str, Any]]
    tables: dict[tuple[str, int], list[dict[str, Any]]]


def local_run(
    train: Callable[..., Any], config: Mapping[str, Any] | None = None, *, seed: int = 0
) -> LocalResult:
    """Run a training function here and now; raises what it raises."""
    recorder = LocalRecorder()
    run = RankContext(
        member=LocalMember(),  # type: ignore[arg-type]
        recorder=recorder,  # type: ignore[arg-type]
        drill=Drill((), ""),
        seed=seed,
        device=torch.device("cpu"),
    )
    try:
        value = call_train(train, run, dict(config or {}))
    except StopTraining:
        value = None
    return LocalResult(value, recorder.rows, recorder.tables)
