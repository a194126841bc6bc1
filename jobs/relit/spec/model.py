"""JobSpec: what a user asks for, validated before anything is started.

Sub-models mirror `relit_platform.run_config` field for field; a unit test holds them together.
Nothing here reads files, looks at the clock or imports ray or torch.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StrictInt,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from relit.errors import SpecError
from relit.spec import secret_guard

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
_ENTRY = re.compile(r"^(?P<where>[^:]+):(?P<function>[A-Za-z_]\w*)$")
_BY_METRIC = ("disk_on_metric", "object_on_metric", "keep_disk_best", "keep_object_best")
_RESERVED_EXPERIMENTS = {"index"}
_MIN_PEER_BYTES_PER_S = 64 << 10


class SpecPart(BaseModel):
    """Frozen, and strict about keys: an unknown one is an error that names the nearest known."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for key in data:
                if key not in known:
                    raise ValueError(_unknown_key(str(key), known))
        return data


def _unknown_key(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {key!r} ({hint})"


class Scaling(SpecPart):
    """Ranks and what each one needs; spares are extra workers that hold no rank."""

    workers: int = Field(default=1, ge=1, le=100_000)
    spares: int = Field(default=0, ge=0, le=1000)
    cpus_per_worker: float = Field(default=1.0, ge=0, le=10_000)
    gpus_per_worker: float = Field(default=0.0, ge=0, le=1000)
    placement: Literal["PACK", "SPREAD"] = "PACK"


class Checkpoint(SpecPart):
    """Cadence, retention and place of each tier; what is 0 or false says nothing.

    A tier is due at multiples of *_every_steps, *_every_s seconds after its last save, or because
    the step measured best (*_on_metric), whichever comes first; without any of them it is off.
    *_first_steps: the spacing begins there and grows by `growth` up to *_every_steps. metric is
    the name under which run.log gets a step's number. *_auto: once the run has shown what its saves
    cost, the spacing that loses least takes the place of steps and seconds, auto_max_s at the most;
    expected_mtbf_s are the seconds between two failures, 0: as large fleets report. Kept are the
    newest keep_*, the first step of each keep_*_every_steps, and the best keep_*_best, all within
    keep_*_bytes. staging: parameters and optimizer state are copied into memory beside the next
    pass (overlap), before it (sync), or beside it if they are large (auto). disk_bytes_per_s: what
    a node writes of snapshots at the most (0: no cap; the last save of all ignores it). save_nice:
    by how many steps the threads that save and upload step back for training. peer: snapshots are
    copied to the memory of another node where there is one (auto) or never (off), at
    peer_bytes_per_s at the most (0: no cap).
    """

    memory_every_steps: int = Field(default=1, ge=0)
    staging: Literal["auto", "overlap", "sync"] = "auto"
    disk_every_steps: int = Field(default=50, ge=0)
    disk_every_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    disk_first_steps: int = Field(default=0, ge=0)
    disk_on_metric: bool = False
    object_every_steps: int = Field(default=200, ge=0)
    object_every_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    object_first_steps: int = Field(default=0, ge=0)
    object_on_metric: bool = False
    disk_auto: bool = False
    object_auto: bool = False
    auto_max_s: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    expected_mtbf_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    growth: float = Field(default=2.0, gt=1, le=1000)
    metric: str = ""
    metric_mode: Literal["min", "max"] = "min"
    keep_disk: int = Field(default=2, ge=1)
    keep_disk_every_steps: int = Field(default=0, ge=0)
    keep_disk_best: int = Field(default=0, ge=0)
    keep_disk_bytes: int = Field(default=0, ge=0)
    keep_object: int = Field(default=3, ge=1)
    keep_object_every_steps: int = Field(default=0, ge=0)
    keep_object_best: int = Field(default=0, ge=0)
    keep_object_bytes: int = Field(default=0, ge=0)
    shm_dir: str = "/dev/shm"
    disk_dir: str = "/var/tmp/relit"
    memory_budget_bytes: int = Field(default=4 << 30, ge=1 << 20)
    peer: Literal["auto", "off"] = "auto"
    peer_bytes_per_s: int = Field(default=0, ge=0)
    chunk_bytes: int = Field(default=16 << 20, ge=4096)
    disk_bytes_per_s: int = Field(default=0, ge=0)
    save_nice: int = Field(default=5, ge=0, le=19)

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        if 0 < self.peer_bytes_per_s < _MIN_PEER_BYTES_PER_S:
            raise ValueError(
                f"peer_bytes_per_s is {self.peer_bytes_per_s}, below {_MIN_PEER_BYTES_PER_S}, with "
                "which no chunk arrives in time; raise it, or set peer to 'off'"
            )
        judged = [name for name in _BY_METRIC if getattr(self, name)]
        if judged and not self.metric:
            raise ValueError(
                f"{judged[0]} is set but metric is ''; set metric to the name that your loop "
                "gives to run.log, such as val_loss"
            )
        by_metric = self.disk_on_metric or self.object_on_metric
        if by_metric and self.memory_every_steps != 1:
            raise ValueError(
                f"memory_every_steps is {self.memory_every_steps}, but a step is measured after "
                "it was taken: with *_on_metric set memory_every_steps to 1"
            )
        for tier in ("disk", "object"):
            first = getattr(self, f"{tier}_first_steps")
            every = getattr(self, f"{tier}_every_steps")
            if every and first > every:
                raise ValueError(
                    f"{tier}_first_steps is {first}, above {tier}_every_steps, {every}, up to "
                    f"which the spacing grows; lower the one or raise the other"
                )
            if first and getattr(self, f"{tier}_auto"):
                raise ValueError(
                    f"{tier}_auto and {tier}_first_steps are set, and each of them says how the "
                    "spacing changes; leave out the one or the other"
                )
        return self


class Recovery(SpecPart):
    """How the run goes on after a fault, and when it gives up.

    standby_processes: how many idle processes each node keeps for ranks that must be replaced, with
    Ray and, where ranks have no GPU, torch loaded. Each takes some 350 MB of memory.
    """

    on_rank_loss: Literal["wait", "spare"] = "wait"
    max_recoveries: int = Field(default=1000, ge=0)
    no_progress: int = Field(default=3, ge=1)
    user_errors: int = Field(default=1, ge=0)
    backoff_s: float = Field(default=0.5, ge=0)
    backoff_max_s: float = Field(default=30.0, ge=0)
    lease_s: float = Field(default=15.0, ge=1, le=3600)
    standby_processes: int = Field(default=1, ge=0, le=64)


class Init(SpecPart):
    """A checkpoint of another run that this one begins with, as long as it has none of its own.

    from is a run id of the same store, or a run directory: a path or a URL. step is a number,
    "newest", or the reason with which `relit ckpt pin` has kept one. weights_only: take what is
    registered and has a flat dictionary of tensors as its state, as a module has; else all of it,
    the optimizer's state, too. Steps are counted from 0 either way. strict: both sides must have
    the same names. rename gives beginnings of saved names, up to a dot, the names registered here.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    source: str = Field(alias="from", min_length=1)
    step: Annotated[StrictInt, Field(ge=0)] | Annotated[str, Field(min_length=1)] = "newest"
    weights_only: bool = True
    strict: bool = True
    rename: dict[str, str] = Field(default_factory=dict)


class Environment(SpecPart):
    """Code and variables of the workers.

    working_dir is the folder whose code is kept with the run (default: the entry's own folder),
    exclude are patterns left out of it; secrets are names of variables that must exist on the
    cluster, whose values relit never stores.
    """

    working_dir: str | None = None
    exclude: tuple[str, ...] = ()
    env_vars: dict[str, str] = Field(default_factory=dict)
    secrets: tuple[str, ...] = ()


class JobSpec(SpecPart):
    """One training job. `entry` is "package.module:function" or "path/to/file.py:function".

    run_id makes a submit repeatable: the same id and specification is the same run. Left out, a
    new one is chosen at submit. config is handed to the function as a plain dict. init is a
    checkpoint to begin with.
    """

    schema_version: Literal[1] = 1
    name: Name
    entry: str
    experiment: Name = "default"
    run_id: Name | None = None
    config: dict[str, JsonValue] = Field(default_factory=dict)
    scaling: Scaling = Scaling()
    store: str = "~/.relit/store"
    checkpoint: Checkpoint = Checkpoint()
    recovery: Recovery = Recovery()
    init: Init | None = None
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    env: Environment = Environment()
    owner: str = ""
    tags: dict[str, str] = Field(default_factory=dict)
    faults: tuple[dict[str, JsonValue], ...] = ()

    @field_validator("entry")
    @classmethod
    def _entry_form(cls, entry: str) -> str:
        if not _ENTRY.match(entry):
            raise ValueError(
                f"{entry!r} is neither 'package.module:function' nor 'path/to/file.py:function'"
            )
        return entry

    @field_validator("experiment")
    @classmethod
    def _experiment_free(cls, experiment: str) -> str:
        if experiment in _RESERVED_EXPERIMENTS:
            raise ValueError(f"{experiment!r} is reserved; choose another name")
        return experiment

    @field_validator("config")
    @classmethod
    def _finite(cls, config: dict[str, JsonValue]) -> dict[str, JsonValue]:
        try:
            json.dumps(config, allow_nan=False)
        except ValueError:
            raise ValueError("holds NaN or infinity, which JSON cannot; use null") from None
        return config

    @model_validator(mode="after")
    def _spare_policy_has_spares(self) -> Self:
        if self.recovery.on_rank_loss == "spare" and self.scaling.spares == 0:
            raise ValueError(
                "recovery.on_rank_loss is 'spare' but scaling.spares is 0; set spares to 1 or more"
            )
        return self

    @classmethod
    def parse(cls, data: Any, source: str = "JobSpec") -> JobSpec:
        """Validate plain data; SpecError lists every problem with its field and value.

        Also refuses secrets (SecretInSpecError). Used by files, overrides and the command line;
        the constructor itself raises pydantic's ValidationError with the same texts.
        """
        if not isinstance(data, dict):
            raise SpecError(source=source, problems=f"expected a mapping, found {data!r:.80}")
        try:
            spec = cls.model_validate(data)
        except ValidationError as error:
            raise SpecError(source=source, problems="; ".join(_problems(error))) from None
        spec.check_secrets()
        return spec

    def check_secrets(self) -> None:
        """Raise SecretInSpecError if a field would store a secret; called again at submit."""
        secret_guard.refuse(self.model_dump(mode="json"))

    def to_plain(self) -> dict[str, Any]:
        """JSON data that holds only what differs from the defaults, plus the version."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        return {"schema_version": self.schema_version, **data}

    def diff(self, other: JobSpec) -> dict[str, tuple[Any, Any]]:
        """Changed leaves as {"a.b": (ours, theirs)}; an absent leaf shows as None."""
        ours = _leaves(self.model_dump(mode="json"))
        theirs = _leaves(other.model_dump(mode="json"))
        paths = sorted(ours.keys() | theirs.keys())
        return {
            path: (ours.get(path), theirs.get(path))
            for path in paths
            if ours.get(path) != theirs.get(path)
        }

    @property
    def function(self) -> str:
        """The function's name in `entry`."""
        return self.entry.rpartition(":")[2]

    @property
    def where(self) -> str:
        """The module or file in `entry`."""
        return self.entry.rpartition(":")[0]


def _problems(error: ValidationError) -> list[str]:
    """One line for each problem: field, message, and the value where it is not a secret."""
    lines = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"]) or "the specification"
        text = item["msg"].removeprefix("Value error, ")
        shown = "" if item["type"] == "value_error" else _shown(field, item["input"])
        if item["type"] == "missing":
            text, shown = "is required", ""
        lines.append(f"{field}: {text}{shown}")
    return lines


def _shown(field: str, value: Any) -> str:
    if secret_guard.is_secret_name(field.rpartition(".")[2]):
        return ""
    return f" (got {value!r:.80})"


def _leaves(data: Any, path: str = "") -> dict[str, Any]:
    if isinstance(data, dict) and data:
        found: dict[str, Any] = {}
        for key, value in data.items():
            found |= _leaves(value, f"{path}.{key}" if path else str(key))
        return found
    return {path: data}
