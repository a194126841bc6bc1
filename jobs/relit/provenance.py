"""run.json: where a run comes from. No environment, no paths of the machine, no secrets."""

from __future__ import annotations

import platform
import socket
import subprocess
from importlib import metadata
from typing import Any

from relit_platform.run_config import RunConfig

_PACKAGES = ("relit", "ray", "torch", "numpy", "pyarrow")
_GIT_TIMEOUT_S = 5.0


def about_run(config: RunConfig, code_root: str, now: float) -> dict[str, Any]:
    """Owner, time, versions and the git commit of the code, as plain data."""
    return {
        "v": 1,
        "run_id": config.run_id,
        "name": config.name,
        "experiment": config.experiment,
        "owner": config.owner,
        "tags": config.tags,
        "created_at_s": now,
        "submitted_from": socket.gethostname(),
        "versions": {"python": platform.python_version(), **_versions()},
        "git": _git(code_root),
        "code_sha": config.code_sha,
        "config_sha": config.config_sha,
    }


def _versions() -> dict[str, str]:
    """Installed versions, read without importing anything."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git(root: str) -> dict[str, Any] | None:
    """Commit and whether files differ from it; None outside a repository or without git."""
    commit = _git_says(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git_says(root, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changed)}


def _git_says(root: str, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", root, *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
