"""`os` for a module under test, on a machine whose power goes at the n-th call.

What the disk then holds is the worst that POSIX allows: of a file that was not synced half of its
bytes, and, in the variant `lost`, of a directory that was not synced its names as they were at its
last sync. In the variant `kept` the names had reached the disk all the same, as names often do.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any, Literal

Variant = Literal["kept", "lost"]
VARIANTS: tuple[Variant, ...] = ("kept", "lost")


class PowerCutError(BaseException):
    """Nothing of ours runs after it but clean-up, whose calls fail, too."""


class PowerCut:
    """Counts calls; the `nth` (1, 2, ...; 0: never) and all later ones raise PowerCutError."""

    def __init__(self, nth: int) -> None:
        self.calls, self.nth = 0, nth
        self.names: list[str] = []
        self._wrapped: dict[str, Any] = {}  # one object a name: callers compare them
        self._paths: dict[int, str] = {}
        self._dirty: set[str] = set()
        self._undo: list[tuple[str, Callable[[], None]]] = []  # folder, and how to undo one change

    @property
    def fired(self) -> bool:
        """Whether the power has gone."""
        return 0 < self.nth <= self.calls

    def __getattr__(self, name: str) -> Any:
        counted = type(self).__dict__.get(f"_do_{name}")
        if counted is None:
            return getattr(os, name)
        return self._wrapped.setdefault(name, self._counted(name, counted))

    def _counted(self, name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "close":
                return do(self, *args, **kwargs)
            self.calls += 1
            self.names.append(name)
            if self.fired:
                raise PowerCutError
            return do(self, *args, **kwargs)

        return call

    def go_on(self) -> None:
        """It was the process alone that ended; the power goes later, by `after`."""
        self.nth = 0

    def after(self, variant: Variant) -> None:
        """Make of the files what the machine finds when it comes up again."""
        for path in self._dirty:
            if os.path.exists(path):
                os.truncate(path, os.stat(path).st_size // 2)
        if variant == "lost":
            for _, undo in reversed(self._undo):
                undo()

    # ---- the calls ----

    def _do_open(self, path: str, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
        fresh = not os.path.exists(path)
        fd = os.open(path, flags, mode, **kwargs)
        self._paths[fd] = path
        if fresh:
            self._dirty.add(path)
            self._changed(path, lambda: _unlink(path))
        return fd

    def _do_close(self, fd: int) -> None:
        os.close(fd)

    def _do_write(self, fd: int, data: Any) -> int:
        self._dirty.add(self._paths[fd])
        return os.write(fd, data)

    def _do_fsync(self, fd: int) -> None:
        os.fsync(fd)
        path = self._paths[fd].rstrip("/")
        self._dirty.discard(path)
        self._undo = [(folder, undo) for folder, undo in self._undo if folder != path]

    def _do_rename(self, source: str, target: str) -> None:
        before = _read(target)
        os.rename(source, target)
        if source in self._dirty:
            self._dirty.discard(source)
            self._dirty.add(target)
        self._changed(target, lambda: _write(target, before))

    _do_replace = _do_rename

    def _do_copy_file_range(self, source: int, target: int, count: int, offset: int) -> int:
        self._dirty.add(self._paths[target])
        return os.copy_file_range(source, target, count, offset)

    def _do_link(self, source: str, target: str) -> None:
        os.link(source, target)
        if source in self._dirty:
            self._dirty.add(target)
        self._changed(target, lambda: _unlink(target))

    def _do_unlink(self, path: str, **kwargs: Any) -> None:
        before = None if kwargs else _read(path)
        os.unlink(path, **kwargs)
        if before is not None:
            self._changed(path, lambda: _write(path, before))

    def _do_mkdir(self, path: str, mode: int = 0o777) -> None:
        os.mkdir(path, mode)
        self._changed(path, lambda: shutil.rmtree(path, ignore_errors=True))

    def _do_rmdir(self, path: str, **kwargs: Any) -> None:
        os.rmdir(path, **kwargs)

    def _changed(self, path: str, undo: Callable[[], None]) -> None:
        self._undo.append((os.path.dirname(path.rstrip("/")), undo))


def _read(path: str) -> bytes | None:
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        return file.read()


def _write(path: str, data: bytes | None) -> None:
    if data is None:
        _unlink(path)
    elif os.path.isdir(os.path.dirname(path)):
        with open(path, "wb") as file:
            file.write(data)


def _unlink(path: str) -> None:
    if os.path.lexists(path):
        os.unlink(path)
