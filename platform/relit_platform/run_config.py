"""What the machine is told to do: the resolved, plain form of a job specification.

`relit.JobSpec` (jobs floor) validates what a user writes and turns it into this; the platform
never reads YAML. Frozen, JSON in and out, stored as config.resolved.json in the run directory.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """Ranks and what each one needs. spares are extra workers that hold no rank."""

    workers: int = 1
    spares: int = 0
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0
    placement: Literal["PACK", "SPREAD"] = "PACK"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Cadence, retention and place of each tier; what is 0 or False says nothing.

    A tier is due by steps, by seconds, or because a step measured best, whichever comes first; one
    that nothing makes due is off. first_steps: the spacing begins there and grows by `growth` up
    to every_steps. metric: the name under which run.log gets the number that says how good a
    step is. *_auto: once the run has shown what its saves cost, the spacing that loses least takes
    the place of steps and seconds, auto_max_s at the most; expected_mtbf_s: seconds between two
    failures as far as one can know, 0: as large fleets report. keep_disk, keep_object: the newest
    N; besides them the first of each keep_*_every_steps, the best N by the metric, and all of it
    within keep_*_bytes. staging: what only updates change is copied beside the next pass
    (overlap), at the boundary (sync), or as its size suggests (auto). disk_bytes_per_s: what an
    agent writes of snapshots at the most, 0: no cap. save_nice: by how much its threads that do
    step back for training. peer: snapshots are copied to the memory of another node where there is
    one (auto), or never (off); peer_bytes_per_s: what an agent sends for that at the most, 0: no
    cap.
    """

    memory_every_steps: int = 1
    staging: Literal["auto", "overlap", "sync"] = "auto"
    disk_every_steps: int = 50
    disk_every_s: float = 0.0
    disk_first_steps: int = 0
    disk_on_metric: bool = False
    object_every_steps: int = 200
    object_every_s: float = 0.0
    object_first_steps: int = 0
    object_on_metric: bool = False
    disk_auto: bool = False
    object_auto: bool = False
    auto_max_s: float = 1800.0
    expected_mtbf_s: float = 0.0
    growth: float = 2.0
    metric: str = ""
    metric_mode: Literal["min", "max"] = "min"
    keep_disk: int = 2
    keep_disk_every_steps: int = 0
    keep_disk_best: int = 0
    keep_disk_bytes: int = 0
    keep_object: int = 3
    keep_object_every_steps: int = 0
    keep_object_best: int = 0
    keep_object_bytes: int = 0
    shm_dir: str = "/dev/shm"
    disk_dir: str = "/var/tmp/relit"
    memory_budget_bytes: int = 4 << 30
    peer: Literal["auto", "off"] = "auto"
    peer_bytes_per_s: int = 0
    chunk_bytes: int = 16 << 20
    disk_bytes_per_s: int = 0
    save_nice: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """How a run goes on after a fault, and when it gives up."""

    on_rank_loss: Literal["wait", "spare"] = "wait"
    max_recoveries: int = 1000
    no_progress: int = 3  # recoveries in a row without one new completed step
    user_errors: int = 1  # the same exception at the same step this often again is final
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    lease_s: float = 15.0
    standby_processes: int = 1  # per node, see relit_platform.node.standby


@dataclass(frozen=True, slots=True, kw_only=True)
class InitConfig:
    """The step of another run with which this one begins, as long as it has none of its own.

    source is the URL of that run's directory; generation and the manifest's sha256 say which commit
    of the step it is, so that every rank and every try takes the same. For the rest see
    relit_platform.worker.initial_state.
    """

    source: str
    run_id: str
    step: int
    generation: int
    manifest_sha256: str
    weights_only: bool = True
    strict: bool = True
    rename: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run. store is the object tier's URL; run_key is `<experiment>/<run_id>` below it.

    entry is "module:function"; code_key names the zip below run_key that holds the module
    (sha256 of it is code_sha). config is handed to the user's function. secret_names are
    environment variables that must exist on the workers; their values appear nowhere.
    """

    run_id: str
    name: str
    experiment: str
    store: str
    run_key: str
    entry: str
    code_key: str
    code_sha: str
    config: dict[str, Any] = field(default_factory=dict)
    config_sha: str = ""
    owner: str = ""
    seed: int = 0
    env_vars: dict[str, str] = field(default_factory=dict)
    secret_names: tuple[str, ...] = ()
    scaling: ScalingConfig = ScalingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    init: InitConfig | None = None
    faults: tuple[dict[str, Any], ...] = ()  # drills: see relit_platform.worker.drill
    allow_drift: tuple[str, ...] = ()  # any of "config", "code", "data"
    tags: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; `from_json(to_json())` is equal to self."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunConfig:
        """Rebuild from `to_json`; unknown keys raise TypeError naming them."""
        return _build(cls, data)


_NESTED = {
    "scaling": ScalingConfig,
    "checkpoint": CheckpointConfig,
    "recovery": RecoveryConfig,
    "init": InitConfig,
}


def _build(cls: type[RunConfig], data: dict[str, Any]) -> RunConfig:
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in _NESTED:
            values[key] = None if value is None else _NESTED[key](**value)
        elif str(hints.get(key, "")).startswith("tuple"):
            values[key] = tuple(value)
        else:
            values[key] = value
    return cls(**values)
