"""Keep the code that runs: a deterministic zip of it, found without importing it.

The zip is stored, not compressed: its bytes, and so its sha256, depend on the files alone and not
on the machine's zlib. Same code, same id, on every machine.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
import stat
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from relit.errors import SnapshotError
from relit.spec.entry import Entry

MAX_BYTES = 50 << 20
_MAX_FILES = 20_000
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)
_SKIPPED_FOLDERS = frozenset(
    {
        ".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", "node_modules", "__pycache__",
        ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".ipynb_checkpoints",
        ".aws", ".ssh", ".gnupg", ".relit", "wandb", "mlruns", "site-packages",
    }
)  # fmt: skip
# Build leftovers, and files whose only purpose is to hold a secret.
_SKIPPED_FILES = (
    "*.pyc", "*.pyo", ".DS_Store", "*.swp", ".env", ".env.*", "*.pem", "*.key", "*.p12",
    ".netrc", ".pypirc", "id_rsa*", "id_ed25519*", "credentials", "credentials.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CodeSnapshot:
    """The zip and its identity. num_files and root are for messages only."""

    data: bytes
    sha: str
    num_files: int
    root: str

    @property
    def key(self) -> str:
        """Where it lies in a run directory."""
        return f"code/{self.sha}.zip"


def snapshot(entry: Entry, exclude: Sequence[str] = ()) -> CodeSnapshot:
    """Read the entry's code from disk; SnapshotError if it is too large or unreadable."""
    files = _collect(entry, exclude)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, path in files:
            info = zipfile.ZipInfo(name, _FIXED_TIME)
            info.create_system = 3  # Unix, wherever this runs
            info.external_attr = (stat.S_IFREG | _mode(path)) << 16
            try:
                archive.writestr(info, path.read_bytes())
            except OSError as error:
                raise SnapshotError(root=str(entry.root), why=f"cannot read {error}") from None
    data = buffer.getvalue()
    return CodeSnapshot(data, hashlib.sha256(data).hexdigest(), len(files), str(entry.root))


def _mode(path: Path) -> int:
    return 0o755 if os.access(path, os.X_OK) else 0o644


def _collect(entry: Entry, exclude: Sequence[str]) -> list[tuple[str, Path]]:
    """Sorted (name in the zip, path), within the limits."""
    found: list[tuple[str, Path, int]] = []
    for path in _walk(entry.tree, entry.root, exclude):
        name = path.relative_to(entry.root).as_posix()
        found.append((name, path, path.stat().st_size))
        if len(found) > _MAX_FILES:
            why = f"more than {_MAX_FILES} files"
            raise SnapshotError(root=str(entry.root), why=why)
    total = sum(size for _, _, size in found)
    if total > MAX_BYTES:
        biggest = sorted(found, key=lambda item: -item[2])[:5]
        listed = ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, _, size in biggest)
        why = f"{total / 1e6:.1f} MB is more than {MAX_BYTES / 1e6:.0f} MB; the biggest: {listed}"
        raise SnapshotError(root=str(entry.root), why=why)
    return sorted((name, path) for name, path, _ in found)


def _walk(tree: Path, root: Path, exclude: Sequence[str]) -> Iterator[Path]:
    """Regular files below `tree` (or `tree` itself); links to folders are not followed."""
    if tree.is_file():
        yield tree
        return
    for folder, subfolders, names in os.walk(tree):
        here = Path(folder)
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _SKIPPED_FOLDERS
            and not name.endswith(".egg-info")
            and not _matches(here / name, root, exclude)
        ]
        for name in names:
            path = here / name
            if any(fnmatch.fnmatch(name, pattern) for pattern in _SKIPPED_FILES):
                continue
            if path.is_file() and not _matches(path, root, exclude):
                yield path


def _matches(path: Path, root: Path, exclude: Sequence[str]) -> bool:
    relative = path.relative_to(root).as_posix()
    return any(
        fnmatch.fnmatch(relative, pattern.rstrip("/")) or fnmatch.fnmatch(path.name, pattern)
        for pattern in exclude
    )
