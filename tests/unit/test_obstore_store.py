"""The fast S3 backend: patience, parts, resuming what a killed process left, no mixed reads."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from relit_storage.errors import ObjectMissingError, StoreError, StoreUnavailableError
from relit_storage.stores import multipart, obstore_verbs, part_sending, s3_access
from relit_storage.stores.answers import Answer, classify, describe
from relit_storage.stores.backoff import Backoff
from relit_storage.stores.byte_source import FileSource
from relit_storage.stores.fsspec_store import FsspecStore
from relit_storage.stores.multipart import part_spans
from relit_storage.stores.obstore_store import ObstoreStore
from relit_storage.stores.opening import open_store
from relit_storage.stores.pace import Pace
from relit_storage.stores.prefixed import PrefixedStore

MIB = 1 << 20
PART = 5 * MIB  # the smallest that S3 takes


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = part_spans
    monkeypatch.setattr(multipart, "part_spans", lambda num_bytes: real(num_bytes, PART))
    monkeypatch.setattr(obstore_verbs, "WHOLE_BYTES", MIB)
    monkeypatch.setattr(obstore_verbs, "PIECE_BYTES", MIB)


class Bucket:
    """A store below a fresh prefix, and a plain client that looks at the same bucket."""

    def __init__(self, endpoint: str) -> None:
        self.prefix = uuid.uuid4().hex
        url = f"s3://relit/{self.prefix}?endpoint_url={endpoint}"
        store = open_store(url, deadline_s=4)
        assert isinstance(store, ObstoreStore)
        self.store = store
        self.client: Any = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")

    def open_uploads(self) -> list[str]:
        listed = self.client.list_multipart_uploads(Bucket="relit", Prefix=self.prefix)
        return [upload["UploadId"] for upload in listed.get("Uploads", [])]

    def begin(self, key: str, parts: dict[int, bytes]) -> str:
        """What a process leaves that is killed after it has sent these parts."""
        where = {"Bucket": "relit", "Key": f"{self.prefix}/{key}"}
        upload_id = str(self.client.create_multipart_upload(**where)["UploadId"])
        for number, body in parts.items():
            self.client.upload_part(**where, UploadId=upload_id, PartNumber=number, Body=body)
        return upload_id


@pytest.fixture
def bucket(s3_endpoint: str, small_parts: None) -> Bucket:
    return Bucket(s3_endpoint)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the parts that were sent, in order of their sending."""
    numbers: list[int] = []
    real = part_sending.send_part

    def spy(access: Any, key: str, upload_id: str, number: int, *args: Any, **more: Any) -> str:
        numbers.append(number)
        return real(access, key, upload_id, number, *args, **more)

    monkeypatch.setattr(multipart, "send_part", spy)
    return numbers


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(MIB) * 12 + b"the end")  # two whole parts and a last one
    return path


@pytest.mark.parametrize(
    ("num_bytes", "part_bytes", "expected"),
    [
        (1, 16, [(0, 1)]),
        (16 * MIB, 16 * MIB, [(0, 16 * MIB)]),
        (16 * MIB + 1, 16 * MIB, [(0, 16 * MIB), (16 * MIB, 1)]),
    ],
)
def test_parts_cover_the_object(
    num_bytes: int, part_bytes: int, expected: list[tuple[int, int]]
) -> None:
    assert part_spans(num_bytes, part_bytes) == expected


def test_a_huge_object_keeps_below_ten_thousand_equal_parts() -> None:
    spans = part_spans(5 << 40)
    assert len(spans) <= 10_000
    assert len({count for _, count in spans[:-1]}) == 1, "some stores refuse unequal parts"
    assert sum(count for _, count in spans) == 5 << 40
    assert spans[0][1] % MIB == 0


def test_a_killed_upload_is_gone_on_with(bucket: Bucket, shard: Path, sent: list[int]) -> None:
    data = shard.read_bytes()
    bucket.begin("shard", {1: data[:PART]})
    bucket.store.put_file("shard", str(shard))
    assert sorted(sent) == [2, 3]
    assert bucket.store.get("shard") == data
    assert bucket.open_uploads() == []


@pytest.mark.parametrize("damage", ["other bytes", "other length"])
def test_a_part_that_differs_is_sent_again(
    bucket: Bucket, shard: Path, sent: list[int], damage: str
) -> None:
    data = shard.read_bytes()
    wrong = b"x" * PART if damage == "other bytes" else data[: PART + 1]
    bucket.begin("shard", {1: wrong, 2: data[PART : 2 * PART], 9: b"of a longer file"})
    bucket.store.put_file("shard", str(shard))
    assert sorted(sent) == [1, 3]
    assert bucket.store.get("shard") == data


def test_of_several_dead_uploads_one_is_finished_and_none_is_left(
    bucket: Bucket, shard: Path
) -> None:
    for _ in range(3):
        bucket.begin("shard", {})
    neighbour = bucket.begin("shard-2", {})
    bucket.store.put_file("shard", str(shard))
    assert bucket.open_uploads() == [neighbour], "another key's upload is not ours to end"


def test_an_upload_that_someone_ends_under_us_begins_anew(
    bucket: Bucket, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ended = part_sending.send_part, list[str]()

    def end_first(access: Any, key: str, upload_id: str, *args: Any, **more: Any) -> str:
        if not ended:
            ended.append(upload_id)
            multipart.abort(access, key, upload_id)
            raise multipart_refusal("NoSuchUpload", 404)  # moto answers otherwise
        return real(access, key, upload_id, *args, **more)

    monkeypatch.setattr(multipart, "send_part", end_first)
    bucket.store.put_file("shard", str(shard))
    assert bucket.store.get("shard") == shard.read_bytes()
    assert bucket.open_uploads() == []


def test_a_refused_upload_is_ended_and_publishes_nothing(
    bucket: Bucket, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **more: Any) -> str:
        raise multipart_refusal("AccessDenied", 403)

    monkeypatch.setattr(multipart, "send_part", refuse)
    with pytest.raises(StoreError, match="AccessDenied"):
        bucket.store.put_file("shard", str(shard))
    assert bucket.store.size("shard") is None
    assert bucket.open_uploads() == []


def multipart_refusal(code: str, status: int) -> Exception:
    return part_sending.PartRefusedError(status, code, "no")


def test_an_upload_out_of_time_is_kept_for_the_next_try(
    bucket: Bucket, shard: Path, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    spy, two_are_in, now = vars(multipart)["send_part"], threading.Barrier(3), [0.0]

    def busy(access: Any, key: str, upload_id: str, number: int, *args: Any, **more: Any) -> str:
        etag = "" if number == 3 else spy(access, key, upload_id, number, *args, **more)
        if now[0] == 0:
            two_are_in.wait(10)
        if number == 3:
            raise multipart_refusal("SlowDown", 503)
        return etag

    def sleep(seconds: float) -> None:
        now[0] += seconds

    backoff = Backoff(deadline_s=4, clock=lambda: now[0], sleep=sleep, uniform=lambda low, high: 1)
    store = ObstoreStore(bucket.store.url, backoff=backoff)
    with monkeypatch.context() as patch:
        patch.setattr(multipart, "send_part", busy)
        with pytest.raises(StoreUnavailableError, match="SlowDown"):
            store.put_file("shard", str(shard))
    assert bucket.store.size("shard") is None
    bucket.store.put_file("shard", str(shard))
    assert sorted(sent) == [1, 2, 3], "two parts were in place"
    assert bucket.open_uploads() == []


def test_a_file_that_shrinks_is_an_error_and_leaves_nothing(
    bucket: Bucket, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FileSource.pieces

    def shrink(self: FileSource, start: int, num_bytes: int) -> Iterator[memoryview]:
        os.truncate(shard, PART)
        return real(self, start, num_bytes)

    monkeypatch.setattr(FileSource, "pieces", shrink)
    with pytest.raises(StoreError, match="shrank"):
        bucket.store.put_file("shard", str(shard))
    assert bucket.store.size("shard") is None
    assert bucket.open_uploads() == []


def test_abandoned_uploads_are_ended_by_age_and_prefix(bucket: Bucket) -> None:
    for key in ("run-1/a", "run-1/b", "run-2/a"):
        bucket.begin(key, {})
    run = PrefixedStore(bucket.store, "run-1")
    # moto says of every upload that it began in 2010.
    assert run.abandon_uploads("", older_than_s=100 * 365 * 86400) == 0
    assert run.abandon_uploads("", older_than_s=86400) == 2
    assert len(bucket.open_uploads()) == 1


def test_a_large_buffer_goes_in_parts_and_comes_back_in_pieces(
    bucket: Bucket, shard: Path, sent: list[int]
) -> None:
    data = shard.read_bytes()
    bucket.store.put("big", data)
    assert sorted(sent) == [1, 2, 3]
    assert bucket.store.get("big") == data
    for start, count in ((0, len(data)), (7, 3 * MIB), (11 * MIB, 9 * MIB), (MIB, 2 * MIB)):
        assert bucket.store.get_range("big", start, count) == data[start : start + count]


@pytest.mark.parametrize("whole", [True, False])
def test_a_read_is_never_a_mixture_of_two_versions(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    import obstore

    old, new = b"o" * (4 * MIB), b"n" * (4 * MIB)
    bucket.store.put("key", old)
    real, calls = obstore.get, list[Any]()

    def replace_after_the_first(store: Any, path: str, **options: Any) -> Any:
        answer = real(store, path, **options)
        calls.append(path)
        if len(calls) == 1:
            bucket.store.put("key", new)
        return answer

    monkeypatch.setattr(obstore, "get", replace_after_the_first)
    found = bucket.store.get("key") if whole else bucket.store.get_range("key", 0, 4 * MIB)
    assert found == new


def test_stale_credentials_open_the_clients_anew(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore

    real, opened = obstore.put, list[float]()
    real_open = s3_access.open_access

    def count(url: str, timeout_s: float) -> Any:
        opened.append(timeout_s)
        return real_open(url, timeout_s)

    def expired_once(*args: Any, **options: Any) -> Any:
        if len(opened) == 1:
            raise _answer(400, "ExpiredToken")
        return real(*args, **options)

    monkeypatch.setattr(obstore_verbs, "open_access", count)
    monkeypatch.setattr(obstore, "put", expired_once)
    bucket.store.put("key", b"1")
    assert len(opened) == 2


@pytest.mark.parametrize("landed", [True, False])
def test_a_create_whose_answers_are_all_lost_is_settled_by_a_look(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    import obstore

    real = obstore.put

    def lost(*args: Any, **options: Any) -> Any:
        if landed:
            try:
                real(*args, **options)
            except obstore.exceptions.AlreadyExistsError:
                pass
        raise obstore.exceptions.GenericError("connection reset")

    monkeypatch.setattr(obstore, "put", lost)
    if landed:
        assert bucket.store.put_if_absent("slot", b"nonce 1")
        return
    with pytest.raises(StoreUnavailableError, match="connection reset"):
        bucket.store.put_if_absent("slot", b"nonce 1")


def _answer(status: int, code: str, kind: str = "GenericError") -> Exception:
    """An error as obstore words it."""
    import obstore

    body = (
        f"<Error><Code>{code}</Code><Message>words</Message>"
        "<AWSAccessKeyId>AKIAEXAMPLE</AWSAccessKeyId><StringToSign>s3cret</StringToSign></Error>"
    )
    text = (
        "Generic S3 error: Error performing GET http://host/b/k in 1ms - Server returned non-2xx "
        f"status code: {status} Something: {body if code else ''}\n\nDebug source:\nGeneric {{ }}"
    )
    if kind == "FileNotFoundError":
        return FileNotFoundError(text)
    error: Exception = getattr(obstore.exceptions, kind)(text)
    return error


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (lambda: _answer(404, "NoSuchKey", "FileNotFoundError"), Answer.MISSING),
        (lambda: _answer(404, "", "FileNotFoundError"), Answer.MISSING),
        (lambda: _answer(404, "NoSuchBucket", "FileNotFoundError"), Answer.FINAL),
        (lambda: _answer(412, "PreconditionFailed", "AlreadyExistsError"), Answer.CONFLICT),
        (lambda: _answer(409, "ConditionalRequestConflict"), Answer.BUSY),
        (lambda: _answer(416, "InvalidRange"), Answer.BEYOND),
        (lambda: _answer(400, "ExpiredToken"), Answer.RENEW),
        (lambda: _answer(400, ""), Answer.RENEW),
        (lambda: _answer(403, "AccessDenied", "PermissionDeniedError"), Answer.FINAL),
        (lambda: _answer(403, "", "PermissionDeniedError"), Answer.FINAL),
        (lambda: _answer(503, "SlowDown"), Answer.BUSY),
        (lambda: _answer(500, ""), Answer.BUSY),
        (lambda: _answer(429, "TooManyRequests"), Answer.BUSY),
    ],
)
def test_meaning_of_what_obstore_says(error: Callable[[], Exception], answer: Answer) -> None:
    assert classify(error()) is answer


def test_an_error_repeats_nothing_that_was_signed() -> None:
    text = describe(_answer(403, "SignatureDoesNotMatch", "PermissionDeniedError"))
    assert text == "SignatureDoesNotMatch: words"


def test_errors_carry_no_cause_with_the_servers_whole_answer(bucket: Bucket) -> None:
    with pytest.raises(ObjectMissingError) as caught:
        bucket.store.get("absent")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_the_cap_is_kept_over_all_pieces_of_all_threads() -> None:
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)

    pace = Pace(100.0, clock=lambda: now[0], sleep=sleep)
    for _ in range(4):  # four threads that come in the same instant
        pace.take(50)
    assert slept == [0.5, 1.0, 1.5]
    now[0] = 10.0
    pace.take(50)
    assert len(slept) == 3, "time that was not used is not saved up, and not waited for either"
    Pace(None, sleep=sleep).take(1 << 40)
    assert len(slept) == 3


def test_the_cap_of_the_url_reaches_each_piece_sent(
    s3_endpoint: str, small_parts: None, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(Pace, "take", lambda self, num_bytes: taken.append(num_bytes))
    options = f"endpoint_url={s3_endpoint}&upload_bytes_per_s=1e6"
    store = open_store(f"s3://relit/{uuid.uuid4().hex}?{options}", deadline_s=4)
    store.put_file("shard", str(shard))
    store.put("small", b"12345")
    assert sum(taken) == shard.stat().st_size + 5
    assert max(taken) <= MIB


def test_the_store_travels_without_its_clients(bucket: Bucket) -> None:
    bucket.store.put("key", b"1")
    for other in (copy.deepcopy(bucket.store), pickle.loads(pickle.dumps(bucket.store))):
        assert other.get("key") == b"1"


def test_a_forked_child_is_served_by_the_portable_backend(bucket: Bucket) -> None:
    bucket.store.put("key", b"1")
    assert bucket.store.backend == "obstore"
    pid = os.fork()
    if pid == 0:
        right = bucket.store.backend == "fsspec" and bucket.store.get("key") == b"1"
        os._exit(0 if right else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_the_portable_backend_can_be_asked_for(s3_endpoint: str) -> None:
    url = f"s3://relit/{uuid.uuid4().hex}?endpoint_url={s3_endpoint}&backend=fsspec"
    store = open_store(url, deadline_s=4)
    assert isinstance(store, FsspecStore)
    store.put("key", b"1")
    assert store.list("") == ["key"]
