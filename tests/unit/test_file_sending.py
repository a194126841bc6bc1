"""Parts sent by the kernel out of a file: the signed bytes, in time, by a copy where it must be."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relit_storage.stores import file_sending, part_sending, s3_access
from relit_storage.stores.backoff import Backoff
from relit_storage.stores.byte_source import (
    PIECE_BYTES,
    BufferSource,
    ByteSource,
    FileShrankError,
    FileSource,
    FileSpan,
)
from relit_storage.stores.pace import Pace
from relit_storage.stores.part_sending import PartRefusedError, send_part
from relit_storage.stores.s3_access import S3Access

FILE_BYTES = 3 * PIECE_BYTES + 7


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(FILE_BYTES))
    return path


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


class StrictServer(ThreadingHTTPServer):
    """Keeps the parts whose bytes are those that were signed, refuses others as S3 does."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Parts)


class _Parts(BaseHTTPRequestHandler):
    server: StrictServer
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        right = self.headers["x-amz-content-sha256"] == hashlib.sha256(body).hexdigest()
        answer = b"" if right else b"<Error><Code>XAmzContentSHA256Mismatch</Code></Error>"
        if right:
            self.server.parts.append(body)
        self.send_response(200 if right else 400)
        self.send_header("ETag", '"etag"')
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[StrictServer]:
    with StrictServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def access(server: StrictServer, monkeypatch: pytest.MonkeyPatch) -> S3Access:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    url = f"s3://bucket?endpoint_url=http://127.0.0.1:{server.server_port}"
    return s3_access.open_access(url, timeout_s=10)


def send(access: S3Access, source: ByteSource, span: tuple[int, int]) -> str:
    tries = Backoff(deadline_s=30).start()
    return send_part(access, "key", "upload", 1, source, span, tries=tries, pace=Pace())


@pytest.mark.parametrize("span", [(0, 1), (5, PIECE_BYTES), (PIECE_BYTES - 1, 2 * PIECE_BYTES + 8)])
@pytest.mark.parametrize("by", ["kernel", "copy", "buffer"])
def test_the_bytes_that_were_signed_arrive(
    access: S3Access,
    server: StrictServer,
    path: Path,
    fd: int,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
    span: tuple[int, int],
) -> None:
    real, sent = os.sendfile, list[int]()

    def sendfile(out: int, source: int, at: int, count: int) -> int:
        if by == "copy":
            raise OSError(errno.EINVAL, "this file system cannot")
        sent.append(real(out, source, at, count))
        return sent[-1]

    monkeypatch.setattr(os, "sendfile", sendfile)
    data = path.read_bytes()
    source = BufferSource(data) if by == "buffer" else FileSource(fd, "shard")
    assert send(access, source, span) == '"etag"'
    assert server.parts == [data[span[0] : sum(span)]]
    assert sum(sent) == (span[1] if by == "kernel" else 0)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(PIECE_BYTES + 3)
        byte = file.read(1)[0] ^ 1
        file.seek(PIECE_BYTES + 3)
        file.write(bytes([byte]))


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (flip, PartRefusedError, "HTTP 400"),
        (lambda path: os.truncate(path, PIECE_BYTES), FileShrankError, f"shrank to {PIECE_BYTES}"),
    ],
    ids=["flipped", "shrunk"],
)
def test_what_changes_after_it_was_signed_is_never_stored(
    access: S3Access,
    server: StrictServer,
    path: Path,
    fd: int,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    error: type[Exception],
    words: str,
) -> None:
    real = part_sending._sha256

    def sign_then_damage(source: ByteSource, span: tuple[int, int]) -> str:
        digest = real(source, span)
        damage(path)
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(part_sending, "_sha256", sign_then_damage)
        with pytest.raises(error, match=words):
            send(access, FileSource(fd, "shard"), (0, FILE_BYTES))
    assert server.parts == []
    source = FileSource(fd, "shard")
    send(access, source, (0, source.num_bytes))  # the connection is whole, or another one
    assert server.parts == [path.read_bytes()]


@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:1"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_every_pool_has_our_connections(
    monkeypatch: pytest.MonkeyPatch, scheme: str, proxy: str
) -> None:
    import urllib3

    for name in ("no_proxy", "NO_PROXY", f"{scheme}_proxy", f"{scheme.upper()}_PROXY"):
        monkeypatch.delenv(name, raising=False)
    if proxy:
        monkeypatch.setenv(f"{scheme}_proxy", proxy)
    manager = s3_access._connections(urllib3, f"{scheme}://store.example", None)
    assert isinstance(manager, urllib3.ProxyManager) == bool(proxy)
    pool = manager.connection_from_url(f"{scheme}://store.example/bucket")
    assert issubclass(pool.ConnectionCls, file_sending._Connection)


class Encrypting(socket.socket):
    """Stands for TLS: bytes that the kernel sent past it would be wrong."""

    def sendall(self, data: Any, *more: Any) -> None:
        super().sendall(bytes(byte ^ 0xFF for byte in data))


def test_nothing_is_sent_past_a_socket_that_encrypts(path: Path, fd: int) -> None:
    ours, theirs = socket.socketpair()
    with Encrypting(fileno=ours.detach()) as encrypting, theirs:
        connection = file_sending._Connection("store.example")
        connection.sock = encrypting
        connection.send(FileSpan(fd, "shard", 10, 4000))
        found = theirs.recv(5000, socket.MSG_WAITALL | socket.MSG_DONTWAIT)
    assert bytes(byte ^ 0xFF for byte in found) == path.read_bytes()[10:4010]


class Kernel:
    """os.sendfile by a table of its answers, the poll after it, and the clock they move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: int | OSError) -> None:
        self.answers = list(answers)
        self.now_s = 0.0
        self.ready = True
        monkeypatch.setattr(os, "sendfile", self.sendfile)
        select = SimpleNamespace(poll=lambda: self, POLLOUT=4)
        monkeypatch.setattr(file_sending, "select", select)
        monkeypatch.setattr(file_sending, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def sendfile(self, out: int, source: int, at: int, count: int) -> int:
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def register(self, sock: socket.socket, mask: int) -> None:
        pass

    def poll(self, timeout_ms: float | None) -> list[int]:
        """The peer takes a second for whatever it takes."""
        if not self.ready or (timeout_ms is not None and timeout_ms < 1000):
            return []
        self.now_s += 1.0
        return [1]


FULL = BlockingIOError(errno.EAGAIN, "full")
GONE = BrokenPipeError(errno.EPIPE, "gone")


@pytest.mark.parametrize(
    ("answers", "timeout_s", "expected"),
    [
        ([4, FULL, 6], 5.0, 10),
        ([4, FULL, 6], None, 10),
        ([FULL, 10], 0.5, TimeoutError),
        ([1, FULL, 1, FULL, 1, FULL, 7], 2.5, TimeoutError),  # progress, but too little of it
        ([4, 0], 5.0, FileShrankError),
        ([GONE], 5.0, BrokenPipeError),
        ([4, GONE], 5.0, BrokenPipeError),
        ([OSError(errno.EIO, "disk")], 5.0, OSError),
        ([OSError(errno.EINVAL, "no")], 5.0, 0),
        ([OSError(errno.ENOSYS, "no")], 5.0, 0),
        ([OSError(errno.EOPNOTSUPP, "no")], 5.0, 0),
        ([4, OSError(errno.EINVAL, "no more")], 5.0, OSError),
    ],
)
def test_what_the_kernel_answers(
    monkeypatch: pytest.MonkeyPatch,
    answers: list[int | OSError],
    timeout_s: float | None,
    expected: int | type[Exception],
) -> None:
    kernel = Kernel(monkeypatch, *answers)
    with socket.socket() as sock:
        sock.settimeout(timeout_s)
        if isinstance(expected, int):
            assert file_sending.send_span(sock, FileSpan(0, "shard", 0, 10)) == expected
            assert kernel.answers == []
        else:
            with pytest.raises(expected):
                file_sending.send_span(sock, FileSpan(0, "shard", 0, 10))


def test_a_reader_that_takes_nothing_is_left_in_time(fd: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.05)
        with pytest.raises(TimeoutError):
            file_sending.send_span(ours, FileSpan(fd, "shard", 0, FILE_BYTES))
