"""`auto` in the manager: hears what the run shows, and says how far saves shall lie apart.

The shell of auto_spacing.py. What it finds goes three ways: to rank 0, when it asks (see Pace);
to the checkpoint machine, which chooses what goes on to the object tier; and into the event log
as "ckpt.respaced", with the reason. Used under the coordinator's lock only; never blocks. Where
nothing is automatic it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from relit_platform.control.journal import Journal
from relit_platform.facts import Fact, RunHistory
from relit_platform.machines import auto_spacing
from relit_platform.machines.auto_spacing import Asked, Save, Seen
from relit_platform.machines.failure_rates import expected_mtbf_s, kind_of
from relit_platform.machines.save_costs import Span, ends_of
from relit_platform.run_config import RunConfig


class CadenceDesk:
    """`space` is told, in seconds, of a new spacing of the object tier."""

    def __init__(
        self,
        *,
        config: RunConfig,
        journal: Journal,
        space: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        checkpoint = config.checkpoint
        self._asked = Asked(
            disk=checkpoint.disk_auto,
            object=checkpoint.object_auto,
            memory=checkpoint.memory_every_steps > 0,
            max_s=checkpoint.auto_max_s,
            mtbf_s=expected_mtbf_s(config.scaling.workers, checkpoint.expected_mtbf_s),
        )
        self._on = checkpoint.disk_auto or checkpoint.object_auto
        self._journal = journal
        self._space = space
        self._clock = clock
        self._seen = Seen()
        self._broken = False
        self._generation = 0

    @property
    def disk_every_s(self) -> float:
        """Seconds between two saves to disk, for rank 0; 0: nothing is known, or not automatic."""
        return self._seen.disk_s if self._asked.disk else 0.0

    def status(self) -> dict[str, Any] | None:
        """What status.json shows of it; None where nothing is automatic or known."""
        if not self._on or not self._seen.reason:
            return None
        parts = {"disk_every_s": self._seen.disk_s, "object_every_s": self._seen.object_s}
        return {**{k: round(v, 3) for k, v in parts.items() if v}, "reason": self._seen.reason}

    def remember(self, history: RunHistory) -> None:
        """What a supervisor has read in the run directory, at the beginning of an epoch."""
        if not self._on:
            return
        told = history.spacing
        had_s = self._seen.object_s
        self._seen = auto_spacing.remember(
            self._seen,
            failures=history.failures,
            trained_s=history.trained_s,
            disk_s=_seconds(told, "disk_every_s") if self._asked.disk else 0.0,
            object_s=_seconds(told, "object_every_s") if self._asked.object else 0.0,
            reason=str(told.get("reason") or ""),
        )
        if self._seen.object_s != had_s:
            self._respace_object()

    def rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Metric rows that are news."""
        ends = ends_of(rows) if self._on else ()
        if ends:
            self._seen = auto_spacing.ended(self._seen, ends)

    def heard(self, fact: Fact) -> None:
        """Each fact of the manager's own, as it is said."""
        if not self._on:
            return
        match fact.kind:
            case "ckpt.committed":
                self._committed(fact)
            case "generation.lost":
                self._broken = True
            case "epoch.started":
                self._broken = self._broken or bool(fact.data.get("ended"))
            case "generation.formed":
                self._formed(fact)

    def _committed(self, fact: Fact) -> None:
        seconds = float(fact.data.get("seconds") or 0.0)
        if fact.data.get("tier") == "disk":
            save = Save(fact.step or 0, fact.generation, seconds)
            self._seen = auto_spacing.saved(self._seen, save)
        else:
            upload = Span(fact.at_s - seconds, fact.at_s)
            self._seen = auto_spacing.uploaded(self._seen, upload)
        self._revise()

    def _formed(self, fact: Fact) -> None:
        """A stop and a resume is no failure: then no generation was lost before this one."""
        self._generation = fact.generation
        if self._broken:
            self._broken = False
            self._seen = auto_spacing.failed(self._seen, kind_of(str(fact.data.get("tier") or "")))
            self._revise()

    def _revise(self) -> None:
        self._seen, told = auto_spacing.revise(self._asked, self._seen, self._clock())
        if told is None:
            return
        step = self._journal.completed_step
        self._journal.say("ckpt.respaced", told, generation=self._generation, step=step)
        self._respace_object()

    def _respace_object(self) -> None:
        """A step is due when it is committed on disk, which is never at the moment itself: half
        the disk's spacing early is on time.
        """
        if self._asked.object and self._seen.object_s:
            self._space(max(0.0, self._seen.object_s - self._seen.disk_s / 2))


def _seconds(told: Mapping[str, Any], name: str) -> float:
    value = told.get(name)
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else 0.0
