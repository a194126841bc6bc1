"""S3 and its kin: what errors mean, patience, lost answers, stale credentials."""

from __future__ import annotations

import copy
import errno
import os
import uuid
from typing import Any

import pytest

from relit_storage.errors import (
    StoreError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from relit_storage.stores.answers import Answer, classify
from relit_storage.stores.backoff import Backoff
from relit_storage.stores.fsspec_store import FsspecStore
from relit_storage.stores.opening import open_store


class _Client(Exception):
    """Looks like botocore's ClientError."""

    def __init__(self, code: str, status: int) -> None:
        self.response = {
            "Error": {"Code": code},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


def _caused(outer: Exception, cause: Exception) -> Exception:
    outer.__cause__ = cause
    return outer


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (FileNotFoundError("key"), Answer.MISSING),
        (_caused(FileNotFoundError("b"), _Client("NoSuchBucket", 404)), Answer.FINAL),
        (FileExistsError("key"), Answer.CONFLICT),
        (_caused(OSError(errno.EINVAL, "x"), _Client("PreconditionFailed", 412)), Answer.CONFLICT),
        (_caused(OSError(errno.EINVAL, "x"), _Client("InvalidRange", 416)), Answer.BEYOND),
        (_caused(OSError(errno.EINVAL, "x"), _Client("InvalidArgument", 400)), Answer.FINAL),
        (_caused(OSError(errno.EIO, "x"), _Client("ConditionalRequestConflict", 409)), Answer.BUSY),
        (_caused(PermissionError("x"), _Client("ExpiredToken", 400)), Answer.RENEW),
        (_caused(PermissionError("x"), _Client("AccessDenied", 403)), Answer.FINAL),
        (_caused(OSError(errno.EBUSY, "x"), _Client("SlowDown", 503)), Answer.BUSY),
        (_Client("Odd", 502), Answer.BUSY),
        (TimeoutError(), Answer.BUSY),
        (ConnectionResetError(), Answer.BUSY),
        (PermissionError("x"), Answer.FINAL),
        (ValueError("our bug"), Answer.FINAL),
    ],
)
def test_meaning_of_errors(error: Exception, answer: Answer) -> None:
    assert classify(error) is answer


class _FakeFs:
    """A file system without a network whose calls raise what the script says, then work."""

    async_impl = False
    retries = 0

    def __init__(self, script: list[tuple[str, Exception]]) -> None:
        self.script = script
        self.objects: dict[str, bytes] = {}

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite", **_: Any) -> None:
        when, error = self.script.pop(0) if self.script else ("", Exception())
        if when == "before":
            raise error
        if mode == "create" and path in self.objects:
            raise FileExistsError(path)
        self.objects[path] = data
        if when == "after":
            raise error

    def cat_file(self, path: str, **_: Any) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]


def _s3_over(fs: _FakeFs, monkeypatch: pytest.MonkeyPatch) -> tuple[FsspecStore, list[float]]:
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    backoff = Backoff(
        deadline_s=10, clock=lambda: now[0], sleep=sleep, uniform=lambda low, high: high
    )
    store = FsspecStore("s3://bucket/run", backoff=backoff)
    monkeypatch.setattr(store._client, "_make", lambda: fs)
    return store, pauses


BUSY = _caused(OSError(errno.EBUSY, "slow down"), _Client("SlowDown", 503))


def test_s3_lost_answer_to_a_create_is_settled_by_reading_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, pauses = _s3_over(_FakeFs([("after", ConnectionResetError())]), monkeypatch)
    assert store.put_if_absent("slot", b"nonce 1")
    assert not store.put_if_absent("slot", b"nonce 2")
    assert pauses == [0.2]


def test_s3_patience_grows_and_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    store, pauses = _s3_over(_FakeFs([("before", BUSY)] * 99), monkeypatch)
    with pytest.raises(StoreUnavailableError, match="SlowDown"):
        store.put("key", b"x")
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2]  # the next, 5 s, would pass the deadline of 10 s


def test_s3_final_errors_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = _caused(PermissionError("no"), _Client("AccessDenied", 403))
    store, pauses = _s3_over(_FakeFs([("before", denied)]), monkeypatch)
    with pytest.raises(StoreError, match="AccessDenied") as caught:
        store.put("key", b"x")
    assert not isinstance(caught.value, StoreUnavailableError)
    assert pauses == []


def test_s3_expired_credentials_open_the_client_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    expired = _caused(PermissionError("old"), _Client("ExpiredToken", 400))
    store, _ = _s3_over(fs := _FakeFs([("before", expired)]), monkeypatch)
    opened: list[_FakeFs] = []

    def open_again() -> _FakeFs:
        opened.append(fs)
        return fs

    monkeypatch.setattr(store._client, "_make", open_again)
    store.put("key", b"x")
    assert len(opened) == 2


def test_s3_missing_bucket_is_an_error_and_never_an_empty_listing(s3_endpoint: str) -> None:
    store = open_store(f"s3://no-bucket/x?endpoint_url={s3_endpoint}", deadline_s=2)
    for call in (lambda: store.list(""), lambda: store.get("a"), lambda: store.put("a", b"")):
        with pytest.raises(StoreError, match="NoSuchBucket"):
            call()


def test_s3_store_travels_and_survives_a_fork(s3_endpoint: str) -> None:
    store = open_store(f"s3://relit/{uuid.uuid4().hex}?endpoint_url={s3_endpoint}", deadline_s=5)
    store.put("key", b"1")
    assert copy.deepcopy(store).list("") == ["key"]
    pid = os.fork()
    if pid == 0:
        os._exit(0 if store.get("key") == b"1" else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_other_file_systems_cannot_create_exclusively() -> None:
    store = open_store("ftp://host/folder")
    with pytest.raises(UnsupportedStoreError, match="create-if-absent"):
        store.put_if_absent("key", b"")
