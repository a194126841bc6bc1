"""A directory as a store: the default ground, also a shared file system.

Every object is written to `<root>/.tmp/`, synced, then moved into place by one system call, and
its directory is synced: a reader, a crash or a power cut sees the old object or the new one.
`put` moves by rename, `put_if_absent` by link, which is the exclusive create that also carries
the whole content. A process killed in between leaves a file in `.tmp`, invisible to `list`, which
the next writer sweeps away once it is an hour old.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from urllib.parse import quote

from relit_storage.errors import (
    ObjectMissingError,
    StoreError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from relit_storage.stores.keys import RESERVED_PART, check_key, check_prefix, check_range

STALE_TMP_S = 3600.0  # an upload touches its file all the time, so an hour of silence is a corpse
PLACE_TRIES = 16  # a parent may vanish under us when another writer deletes its last object
COPY_BYTES = 64 << 20

Fill = Callable[[int], None]
Place = Callable[[str, str], None]
# Whatever else has the name of an object (a folder, a pipe, a link to nowhere) is none.
_NO_OBJECT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)
_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_COPY_RANGE = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


class LocalStore:
    """Objects are files below `root`, which is created by the first write."""

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(os.path.expanduser(root))
        self._swept = False

    @property
    def url(self) -> str:
        """`file:///absolute/path`, percent-encoded."""
        return "file://" + quote(self._root)

    @property
    def root(self) -> str:
        """The absolute path of the directory."""
        return self._root

    def put(self, key: str, data: bytes) -> None:
        """Create or replace; returns when the object is on disk."""
        self._publish(key, lambda fd: _write_all(fd, data), os.replace)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create unless the key exists; True also if it exists with exactly these bytes."""
        try:
            self._publish(key, lambda fd: _write_all(fd, data), os.link)
        except FileExistsError:
            return self._is_ours(key, data)
        return True

    def put_file(self, key: str, path: str) -> None:
        """Copy a local file in, by reflink or inside the kernel where the file system can."""
        self._publish(key, lambda fd: _copy_file(path, fd), os.replace)

    def get(self, key: str) -> bytes:
        """The whole object; ObjectMissingError if there is none."""
        return self._read(key, 0, None)

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes:
        """`num_bytes` from `start`; fewer only at the end of the object."""
        check_range(self.url, key, start, num_bytes)
        return self._read(key, start, num_bytes)

    def size(self, key: str) -> int | None:
        """Size in bytes, or None."""
        try:
            found = os.stat(self._path(key))
        except OSError as error:
            if error.errno in _NO_OBJECT:
                return None
            raise self._error(key, error) from error
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def list(self, prefix: str) -> list[str]:
        """Sorted keys that begin with `prefix`; unfinished files are no objects."""
        check_prefix(self.url, prefix)
        folder = prefix.rpartition("/")[0]
        if os.path.isfile(self._root):
            raise StoreError(url=self.url, key=prefix, cause="it is a file, not a directory")
        try:
            return sorted(key for key in self._walk(folder) if key.startswith(prefix))
        except OSError as error:
            raise self._error(prefix, error) from error

    def delete(self, key: str) -> None:
        """Remove the object and the directories it leaves empty."""
        path = self._path(key)
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._error(key, error) from error
        self._prune(os.path.dirname(path))

    def _path(self, key: str) -> str:
        return os.path.join(self._root, check_key(self.url, key))

    def _error(self, key: str, error: OSError) -> StoreError:
        return StoreError(url=self.url, key=key, cause=f"{error.strerror or error}")

    def _publish(self, key: str, fill: Fill, place: Place) -> None:
        final = self._path(key)
        try:
            tmp = self._temporary()
            try:
                _write_file(tmp, fill)
                _place(tmp, final, place)
            finally:
                _unlink_quietly(tmp)  # gone already if it was renamed
        except OSError as error:
            if place is os.link and isinstance(error, FileExistsError):
                raise  # the answer "no" of put_if_absent
            if place is os.link and error.errno in _NO_LINK:
                raise UnsupportedStoreError(url=self.url, guarantee="hard links") from error
            raise self._error(key, error) from error

    def _temporary(self) -> str:
        folder = os.path.join(self._root, RESERVED_PART)
        _make_dirs(folder)
        if not self._swept:
            self._swept = True
            _sweep(folder, time.time() - STALE_TMP_S)
        return os.path.join(folder, secrets.token_hex(12))

    def _is_ours(self, key: str, data: bytes) -> bool:
        # Ours after all when an earlier call linked it and then failed to sync: sync again.
        try:
            if self.get(key) != data:
                return False
            _sync_dir(os.path.dirname(self._path(key)))
        except (ObjectMissingError, FileNotFoundError) as error:
            cause = "another writer's object came and went"
            raise StoreUnavailableError(url=self.url, key=key, cause=cause) from error
        except OSError as error:
            raise self._error(key, error) from error
        return True

    def _read(self, key: str, start: int, num_bytes: int | None) -> bytes:
        try:
            with open(self._path(key), "rb", buffering=0, opener=_open_at_once) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ObjectMissingError(url=self.url, key=key)
                left = os.fstat(file.fileno()).st_size - start
                want = left if num_bytes is None else min(left, num_bytes)
                return _read_at(file.fileno(), start, max(want, 0))
        except OSError as error:
            if error.errno in _NO_OBJECT:
                raise ObjectMissingError(url=self.url, key=key) from None
            raise self._error(key, error) from error

    def _walk(self, folder: str) -> Iterator[str]:
        top = os.path.join(self._root, folder) if folder else self._root
        for path, folders, files in os.walk(top, onerror=_raise_unless_gone):
            if path == self._root and RESERVED_PART in folders:
                folders.remove(RESERVED_PART)
            below = os.path.relpath(path, self._root)
            for name in files:
                yield name if below == "." else f"{below}/{name}"

    def _prune(self, folder: str) -> None:
        while folder != self._root:
            try:
                os.rmdir(folder)
            except OSError:
                return  # not empty, or gone: someone else's business
            folder = os.path.dirname(folder)


def _write_file(path: str, fill: Fill) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        fill(fd)
        os.fsync(fd)
    finally:
        os.close(fd)


def _place(tmp: str, final: str, place: Place) -> None:
    folder = os.path.dirname(final)
    for last in [False] * (PLACE_TRIES - 1) + [True]:
        try:
            _make_dirs(folder)
            place(tmp, final)
            break
        except FileNotFoundError:
            if last or not os.path.exists(tmp):
                raise
    try:
        _sync_dir(folder)
    except FileNotFoundError:
        pass  # published, and already deleted again by someone else


def _make_dirs(path: str) -> None:
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:
            # One look: between two, another writer's folder may go and come. Gone is not found,
            # and the caller tries again.
            if not stat.S_ISDIR(os.stat(folder).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "an object is in the way") from None
        _sync_dir(os.path.dirname(folder))


def _sync_dir(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe in an object's place would wait for ever


def _read_at(fd: int, start: int, num_bytes: int) -> bytes:
    parts: list[bytes] = []
    while num_bytes > 0:
        part = os.pread(fd, min(num_bytes, COPY_BYTES), start)
        if not part:
            break
        parts.append(part)
        start += len(part)
        num_bytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _copy_file(path: str, target: int) -> None:
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size, done = os.fstat(source).st_size, 0
        copy = _copy_range
        while done < size:
            try:
                moved = copy(source, target, size - done, done)
            except OSError as error:
                if copy is not _copy_range or done or error.errno not in _NO_COPY_RANGE:
                    raise
                copy = _send_range  # another file system, or an old kernel
                continue
            if moved == 0:
                raise OSError(errno.EIO, f"{path} shrank while it was copied")
            done += moved
    finally:
        os.close(source)


def _copy_range(source: int, target: int, count: int, offset: int) -> int:
    return os.copy_file_range(source, target, min(count, COPY_BYTES), offset)


def _send_range(source: int, target: int, count: int, offset: int) -> int:
    return os.sendfile(target, source, offset, min(count, COPY_BYTES))


def _sweep(folder: str, before_s: float) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.stat(follow_symlinks=False).st_mtime < before_s:
                    os.unlink(entry.path)
            except FileNotFoundError:
                pass  # its writer finished, or another sweeper was faster


def _unlink_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # the sweep takes it later; the error that brought us here matters more


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
