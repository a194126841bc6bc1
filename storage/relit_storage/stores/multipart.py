"""A large object on S3 in parts, sent by our own hand so that a killed process loses little.

The journal of a half-done upload is the store itself: it knows the uploads that are open under a
key, and their parts. Whoever puts the same bytes under the same key, in whatever process, finds
them, keeps each part whose size and MD5 agree with the file, sends the rest, and completes. So an
agent's death leaves nothing that the next one does not finish; and an upload that nobody finishes
is ended by `abandon`, or by a lifecycle rule AbortIncompleteMultipartUpload of the bucket.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from relit_storage.stores.answers import Answer, classify
from relit_storage.stores.backoff import Tries
from relit_storage.stores.byte_source import ByteSource
from relit_storage.stores.pace import Pace
from relit_storage.stores.part_sending import md5_of, send_part
from relit_storage.stores.s3_access import S3Access

PART_BYTES = 16 << 20
MAX_PARTS = 10_000  # the limit of S3; all parts but the last are of one size, some stores insist
T = TypeVar("T")
Span = tuple[int, int]  # start, count


class UploadGoneError(Exception):
    """The upload was ended under us: begin another."""


class _StoppedError(Exception):
    """A part that need not be sent any more; never leaves this module."""


def part_spans(num_bytes: int, part_bytes: int = PART_BYTES) -> list[Span]:
    """Where the parts of an object lie: of one size, whole MiB, except the last."""
    smallest = -(-num_bytes // MAX_PARTS)
    size = max(part_bytes, -(-smallest // (1 << 20)) << 20)
    return [(at, min(size, num_bytes - at)) for at in range(0, num_bytes, size)]


@dataclass(frozen=True, slots=True)
class PartUploader:
    """Uploads over one access; all uploads share the pace and the threads of `pool`.

    reopen is called when credentials went stale and gives the access to go on with.
    """

    access: Callable[[], S3Access]
    reopen: Callable[[], None]
    pool: Executor
    pace: Pace

    def upload(self, key: str, source: ByteSource, tries: Tries) -> None:
        """Put `source` under `key`, going on with what an earlier call left. Blocks.

        Raises whatever the clients raise once `tries` are over or the store refuses for good; a
        refused upload is ended, one that ran out of time is kept for the next call.
        """
        while True:
            try:
                self._once(key, source, tries)
                return
            except UploadGoneError as error:
                if not tries.again():
                    raise ConnectionError("its multipart upload was ended by someone") from error

    def _once(self, key: str, source: ByteSource, tries: Tries) -> None:
        spans = part_spans(source.num_bytes)
        others = self._open_uploads(key, tries)
        if others:
            upload_id, num_begun = others.pop(), 0
            etags = self._kept(key, upload_id, source, spans, tries)
        else:
            upload_id, num_begun = self._begin(key, tries)
            etags = {}
        try:
            self._send_missing(key, upload_id, source, spans, etags, tries)
            self._complete(key, upload_id, source.num_bytes, etags, tries)
        except Exception as error:
            if classify(error) is Answer.FINAL and not isinstance(error, UploadGoneError):
                self._end(key, [upload_id, *others])
            raise
        if num_begun > 1:  # an answer was lost, so there may be one that nobody knows
            others = self._open_uploads(key, tries)
        self._end(key, others)  # of dead uploaders: what they carried is in place

    def _begin(self, key: str, tries: Tries) -> tuple[str, int]:
        """The id of a new upload, and how often it was asked for."""
        num_begun = 0

        def begin(access: S3Access) -> str:
            nonlocal num_begun
            num_begun += 1
            answer = access.calls.create_multipart_upload(Bucket=access.bucket, Key=key)
            return str(answer["UploadId"])

        return self._repeat(begin, tries), num_begun

    def _open_uploads(self, key: str, tries: Tries) -> list[str]:
        """Uploads open under exactly this key, oldest first; none if we may not look."""
        try:
            found = self._repeat(lambda access: list(open_uploads(access, key)), tries)
        except Exception as error:
            if classify(error) is Answer.FINAL:
                return []  # a policy without ListBucketMultipartUploads costs only the resuming
            raise
        return [upload_id for _, name, upload_id in sorted(found) if name == key]

    def _kept(
        self, key: str, upload_id: str, source: ByteSource, spans: list[Span], tries: Tries
    ) -> dict[int, str]:
        """ETags by number of the stored parts that are the same bytes as ours."""

        def stored(access: S3Access) -> list[dict[str, Any]]:
            pages = access.calls.get_paginator("list_parts").paginate(
                Bucket=access.bucket, Key=key, UploadId=upload_id
            )
            return [part for page in pages for part in page.get("Parts", [])]

        def same(part: dict[str, Any]) -> bool:
            span = spans[part["PartNumber"] - 1]
            return bool(part["ETag"].strip('"') == md5_of(source, span))

        parts = [
            part
            for part in self._repeat(stored, tries)
            if part["PartNumber"] <= len(spans) and part["Size"] == spans[part["PartNumber"] - 1][1]
        ]
        agree = list(self.pool.map(same, parts))
        return {p["PartNumber"]: p["ETag"] for p, kept in zip(parts, agree, strict=True) if kept}

    def _send_missing(
        self,
        key: str,
        upload_id: str,
        source: ByteSource,
        spans: list[Span],
        etags: dict[int, str],
        tries: Tries,
    ) -> None:
        """Send the parts that `etags` lacks and note their ETags there; all or the first error."""
        stop = threading.Event()

        def send(number: int) -> str:
            def once(access: S3Access) -> str:
                if stop.is_set():
                    raise _StoppedError  # another part failed: its error is the one to tell
                span = spans[number - 1]
                return send_part(
                    access, key, upload_id, number, source, span, tries=tries, pace=self.pace
                )

            return self._repeat(once, tries.same_deadline())

        missing = [number for number in range(1, len(spans) + 1) if number not in etags]
        futures = {self.pool.submit(send, number): number for number in missing}
        finished, others = wait(futures, return_when=FIRST_EXCEPTION)
        stop.set()
        for future in others:
            future.cancel()
        wait(others)  # nobody may read the source once its caller has closed it
        for future in sorted(finished, key=lambda done: done.exception() is None):
            etags[futures[future]] = future.result()

    def _complete(
        self, key: str, upload_id: str, num_bytes: int, etags: dict[int, str], tries: Tries
    ) -> None:
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]

        def complete(access: S3Access) -> None:
            try:
                access.calls.complete_multipart_upload(
                    Bucket=access.bucket,
                    Key=key,
                    UploadId=upload_id,
                    MultipartUpload={"Parts": parts},
                )
            except Exception as error:
                # The answer may say no though the object is there: its first answer got lost.
                if _is_there(access, key, num_bytes, [etags[n] for n in sorted(etags)]):
                    return
                if _code(error) in ("NoSuchUpload", "InvalidPart"):
                    raise UploadGoneError from error
                raise

        self._repeat(complete, tries)

    def _end(self, key: str, upload_ids: list[str]) -> None:
        access = self.access()
        for upload_id in upload_ids:
            try:
                abort(access, key, upload_id)
            except Exception:
                return  # the error that brought us here says more; `abandon` takes it later

    def _repeat(self, call: Callable[[S3Access], T], tries: Tries) -> T:
        while True:
            try:
                return call(self.access())
            except Exception as error:
                if _code(error) == "NoSuchUpload":
                    raise UploadGoneError from error
                answer = classify(error)
                if answer is Answer.RENEW:
                    self.reopen()
                if answer not in (Answer.BUSY, Answer.RENEW) or not tries.again():
                    raise


def abandon(access: S3Access, prefix: str, older_than_s: float) -> int:
    """End the uploads below `prefix` that began so long ago; how many. Raises what botocore does.

    Ages are by this machine's clock, so choose an age that no upload and no clock skew reaches.
    """
    before = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=older_than_s)
    stale = [found for found in open_uploads(access, prefix) if found[0] <= before]
    for _, key, upload_id in stale:
        abort(access, key, upload_id)
    return len(stale)


def open_uploads(access: S3Access, prefix: str) -> Iterator[tuple[dt.datetime, str, str]]:
    """(begun, key, upload id) of every upload open below `prefix`."""
    pages = access.calls.get_paginator("list_multipart_uploads").paginate(
        Bucket=access.bucket, Prefix=prefix
    )
    for page in pages:
        for upload in page.get("Uploads", []):
            yield upload["Initiated"], upload["Key"], upload["UploadId"]


def abort(access: S3Access, key: str, upload_id: str) -> None:
    """End one upload; no error if it is gone."""
    try:
        access.calls.abort_multipart_upload(Bucket=access.bucket, Key=key, UploadId=upload_id)
    except Exception as error:
        if _code(error) != "NoSuchUpload":
            raise


def _is_there(access: S3Access, key: str, num_bytes: int, etags: list[str]) -> bool:
    """Whether the object is the one these parts make: its ETag is the MD5 of theirs."""
    try:
        head = access.calls.head_object(Bucket=access.bucket, Key=key)
        joined = hashlib.md5(
            b"".join(bytes.fromhex(etag.strip('"')) for etag in etags), usedforsecurity=False
        )
    except Exception:
        return False  # absent, or no answer, or ETags of another kind: then it is sent again
    expected = f"{joined.hexdigest()}-{len(etags)}"
    return bool(head["ContentLength"] == num_bytes and head["ETag"].strip('"') == expected)


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
