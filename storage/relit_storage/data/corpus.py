"""A corpus that every machine already has: the source of the Python standard library.

About 10 MB of real text. It is the same for everyone with the same Python; another patch release
has another fingerprint, which a resume then names instead of hiding.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

# Not the library itself: installed packages, and the tests, which are mostly tables.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def stdlib_paths() -> list[Path]:
    """All modules of the library, sorted by relative path. Walks the folder: some 100 ms."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [path.relative_to(root) for path in root.rglob("*.py")]
    return [root / path for path in sorted(found, key=Path.as_posix) if _is_library(path)]


def _is_library(path: Path) -> bool:
    # _sysconfigdata is written by the build and holds the paths of its machine.
    return _LEFT_OUT.isdisjoint(path.parts) and not path.name.startswith("_sysconfigdata")
