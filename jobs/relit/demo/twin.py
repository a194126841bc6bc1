"""The undisturbed twin's losses, cached by everything that could change one bit of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

PACKAGES = ("relit", "relit_platform", "relit_storage")
VERSIONS = ("torch", "numpy", "ray")


def twin_key(config: Mapping[str, Any], world: int, data_fingerprint: str) -> str:
    """One name for: what is computed, on which data, by which code and versions, on which CPU.

    config holds no path (the fingerprint stands for the data). The CPU counts because torch picks
    its kernels by it, and another kernel may round otherwise.
    """
    facts = {
        "config": dict(config),
        "world": world,
        "data": data_fingerprint,
        "code": source_sha(),
        "versions": {name: metadata.version(name) for name in VERSIONS},
        "python": sys.version,
        "cpu": cpu_identity(),
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def source_sha() -> str:
    """sha256 over every Python file of relit's three packages, names included."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for root in _package_folders(package):
            for path in sorted(root.rglob("*.py")):
                content = path.read_bytes()
                digest.update(f"{package}/{path.relative_to(root)} {len(content)}\n".encode())
                digest.update(content)
    return digest.hexdigest()


def _package_folders(package: str) -> list[Path]:
    spec = util.find_spec(package)
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def cpu_identity() -> str:
    """Model and feature flags of this CPU, as the kernel tells them."""
    wanted = ("model name", "flags", "Features")
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.machine()
    told = [line for line in lines if line.split(":")[0].strip() in wanted]
    return "\n".join([platform.machine(), *told])


def load_losses(folder: Path, key: str) -> dict[int, float] | None:
    """The cached losses by step, or None. A file that does not parse counts as absent."""
    try:
        rows = json.loads((folder / f"{key}.json").read_text())["losses"]
        return {int(step): float(loss) for step, loss in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_losses(folder: Path, key: str, losses: Mapping[int, float], run_id: str) -> None:
    """Keep the losses under the key, atomically; the newest writer wins with the same content."""
    folder.mkdir(parents=True, exist_ok=True)
    body = json.dumps({"run_id": run_id, "losses": sorted(losses.items())})
    with _replacing(folder / f"{key}.json") as path:
        path.write_text(body)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block ends well."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield part
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
