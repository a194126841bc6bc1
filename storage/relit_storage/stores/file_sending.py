"""Connections of urllib3 that send spans of a file by sendfile: from the page cache to the socket.

The processor then never touches the bytes between their signature and the network card, on
loopback between their signature and the reader. What changes in the file after it was signed, or
on its way, is what the server refuses, as with bytes that are copied first.

Imports urllib3: to be imported when a store is opened, not before.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from typing import Any

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from relit_storage.stores.byte_source import FileSpan

# File systems that sendfile cannot read from, and kernels that forbid it: then it is copied.
_NO_SENDFILE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class _Connection(HTTPConnection):
    def send(self, data: Any) -> None:
        # Any other kind of socket encrypts, and the kernel would send past it.
        if isinstance(data, FileSpan) and type(self.sock) is socket.socket:
            num_sent = send_span(self.sock, data)
            data = FileSpan(data.fd, data.name, data.start + num_sent, data.num_bytes - num_sent)
        if isinstance(data, FileSpan):
            for piece in data:
                super().send(piece)
        else:
            super().send(data)


class _TlsConnection(_Connection, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


POOLS = {"http": _Pool, "https": _TlsPool}  # for `pool_classes_by_scheme` of a PoolManager


def send_span(sock: socket.socket, span: FileSpan) -> int:
    """Send `span`; how many of its bytes went: all, or none where it must be read to be sent.

    Blocks, for the whole span at most for the timeout of `sock`, as sendall does: TimeoutError.
    FileShrankError if the file ends before it.
    """
    timeout_s = sock.gettimeout()
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    num_sent = 0
    while num_sent < span.num_bytes:
        at = span.start + num_sent
        try:
            count = os.sendfile(sock.fileno(), span.fd, at, span.num_bytes - num_sent)
        except BlockingIOError:
            _wait_for_room(sock, end_s)
            continue
        except OSError as error:
            if num_sent or error.errno not in _NO_SENDFILE:
                raise
            return 0
        if count == 0:
            raise span.shrank(at)
        num_sent += count
    return num_sent


def _wait_for_room(sock: socket.socket, end_s: float | None) -> None:
    left_ms = None if end_s is None else max(0.0, end_s - time.monotonic()) * 1000
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(left_ms):
        raise TimeoutError("timed out")
