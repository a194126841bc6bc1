"""Files that are whole or absent, on a local file system.

A file is written under a temporary name in its own directory, synced, moved to its name by one
system call, and the directory is synced. A failed sync is never repeated on the same file (the
kernel has dropped the pages and the second sync would lie): the temporary file is removed and the
caller writes a new one. After a crash, names that `is_temporary` accepts are rubbish.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterable

TEMPORARY_SUFFIX = ".tmp"
BLOCK_BYTES = 4096  # direct I/O wants lengths and addresses in whole ones


def write_file(path: str, parts: Iterable[bytes | memoryview], *, direct: bool = False) -> None:
    """Create or replace a file by the concatenation of `parts`; durable on return.

    The directory must exist. OSError (a full disk, say) leaves what was there before. direct: by
    direct I/O as far as the file system and the parts allow (page-aligned, whole blocks): no copy
    into the page cache, so none of what training has there is pushed out.
    """
    _publish(path, parts, exclusive=False, direct=direct)


def create_file(path: str, data: bytes) -> bool:
    """Create a file unless it exists: True if a file with exactly these bytes is now there.

    Of racing callers with different bytes exactly one gets True. Durable on return.
    """
    try:
        _publish(path, [data], exclusive=True)
    except FileExistsError:
        with open(path, "rb") as file:
            if file.read() != data:
                return False
        sync_dir(os.path.dirname(path))  # an earlier call may have failed just before its sync
    return True


def open_regular(path: str) -> int:
    """A descriptor of a regular file, for reading; never waits, as opening a pipe would.

    Raises OSError, also for whatever else lies under that name.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no regular file", path)
    return fd


def read_file(path: str, max_bytes: int) -> bytes:
    """The whole of a file that somebody else may have damaged. Blocks for the disk.

    Raises OSError, also for a file of more than `max_bytes` and for what is no regular file.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"has {size} bytes, {max_bytes} is the limit", path)
        return file.read(size)


def make_dirs(path: str) -> None:
    """Create a directory and its missing parents, 0700, each durable in its parent."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_dirs(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass  # another thread was first; syncing once more does no harm
    sync_dir(parent)


def sync_dir(path: str) -> None:
    """Make creations, renames and removals in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_temporary(name: str) -> bool:
    """True for the file name of an unfinished write."""
    return name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)


def _publish(
    path: str, parts: Iterable[bytes | memoryview], exclusive: bool, direct: bool = False
) -> None:
    folder, name = os.path.split(path)
    pending = os.path.join(folder, f".{name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        _write_synced(pending, parts, direct)
        if exclusive:
            os.link(pending, path)
            os.unlink(pending)
        else:
            os.rename(pending, path)
    except BaseException:
        _unlink_if_there(pending)
        raise
    sync_dir(folder)


def _write_synced(path: str, parts: Iterable[bytes | memoryview], direct: bool) -> None:
    fd, direct = _create(path, direct)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                blocks = len(rest) - len(rest) % BLOCK_BYTES
                if direct and not blocks:
                    direct = _buffered(fd)  # the file's tail
                try:
                    rest = rest[os.write(fd, rest[:blocks] if direct else rest) :]
                except OSError as error:
                    if not direct or error.errno != errno.EINVAL:
                        raise
                    direct = _buffered(fd)  # address or, after a short write, place not aligned
        os.fsync(fd)
    finally:
        os.close(fd)


def _create(path: str, direct: bool) -> tuple[int, bool]:
    """A new file's descriptor, and whether it is open for direct I/O."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _unlink_if_there(path)  # some file systems create it before they refuse
    return os.open(path, flags, 0o600), False


def _buffered(fd: int) -> bool:
    """Go on through the page cache; returns False, for `direct`."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False


def _unlink_if_there(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # never created, or the disk is beyond help; the first error is the one to report
