"""From a JobSpec to what the platform runs: RunConfig plus the bytes of the code."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

from relit.spec.code_snapshot import CodeSnapshot, snapshot
from relit.spec.entry import find_entry
from relit.spec.model import JobSpec
from relit_platform.run_config import (
    CheckpointConfig,
    RecoveryConfig,
    RunConfig,
    ScalingConfig,
)

_SUFFIX_BYTES = 3  # 16 million ids for one name; a collision is noticed at submit anyway


def resolve(spec: JobSpec) -> tuple[RunConfig, CodeSnapshot]:
    """Check the entry, read its code and build the plain configuration.

    Chooses a run id if the specification has none. Reads the disk; starts nothing, writes
    nothing. Raises EntryError, SnapshotError, SecretInSpecError.
    """
    spec.check_secrets()
    entry = find_entry(spec)
    code = snapshot(entry, spec.env.exclude)
    config = build_config(
        spec,
        run_id=spec.run_id or new_run_id(spec.name),
        entry=entry.text,
        code_key=code.key,
        code_sha=code.sha,
    )
    return config, code


def build_config(
    spec: JobSpec, *, run_id: str, entry: str, code_key: str, code_sha: str
) -> RunConfig:
    """The plain form of a specification whose code is known; pure but for the user's name."""
    return RunConfig(
        run_id=run_id,
        name=spec.name,
        experiment=spec.experiment,
        store=absolute_store(spec.store),
        run_key=f"{spec.experiment}/{run_id}",
        entry=entry,
        code_key=code_key,
        code_sha=code_sha,
        config=dict(spec.config),
        config_sha=config_sha(spec),
        owner=spec.owner or login_name(),
        seed=spec.seed,
        env_vars=dict(spec.env.env_vars),
        secret_names=tuple(spec.env.secrets),
        scaling=ScalingConfig(**spec.scaling.model_dump()),
        checkpoint=CheckpointConfig(**spec.checkpoint.model_dump()),
        recovery=RecoveryConfig(**spec.recovery.model_dump()),
        faults=tuple(dict(fault) for fault in spec.faults),
        tags=dict(spec.tags),
    )


def config_sha(spec: JobSpec) -> str:
    """Identity of what decides the losses on the user's side: entry, config, seed and init.

    World size, cadence and tags may change at a resume without being a drift.
    """
    decides = {"entry": spec.entry, "config": spec.config, "seed": spec.seed}
    if spec.init is not None:
        decides["init"] = spec.init.model_dump(mode="json")
    return canonical_sha(decides)


def canonical_sha(data: Any) -> str:
    """sha256 of canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def new_run_id(name: str) -> str:
    """`<name>-<6 hex digits>`: readable, and a unique prefix finds it again."""
    return f"{name[:72]}-{secrets.token_hex(_SUFFIX_BYTES)}"


def absolute_store(store: str) -> str:
    """A store's URL or absolute path, so that it means the same in every process."""
    if re.match(r"^[a-z][a-z0-9+.-]*://", store, re.IGNORECASE):
        return store
    return os.path.abspath(Path(store).expanduser())


def run_directory(store: str, run_key: str) -> str:
    """The URL or path of a run in a store; options of the store's URL stay behind it."""
    place, mark, options = store.partition("?")
    return f"{place.rstrip('/')}/{run_key}{mark}{options}"


def login_name() -> str:
    """Who submits; "unknown" in a container whose user has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
