"""One part of a multipart upload as one signed request, straight from a file or a buffer.

botocore would copy each part and hash it in small steps; obstore can send parts only within
one call of its own, which a killed process cannot go on with. So the request is made by hand.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from relit_storage.stores.backoff import Tries
from relit_storage.stores.byte_source import ByteSource, FileSpan
from relit_storage.stores.pace import Pace
from relit_storage.stores.s3_access import S3Access


class PartRefusedError(Exception):
    """The server's answer to a part; `response` has the shape that botocore's errors have."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.response = {
            "Error": {"Code": code, "Message": message},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


def send_part(
    access: S3Access,
    key: str,
    upload_id: str,
    number: int,
    source: ByteSource,
    span: tuple[int, int],
    *,
    tries: Tries,
    pace: Pace,
) -> str:
    """Send bytes `span` (start, count) of `source` as part `number`; the ETag of the stored part.

    Blocks, at most until the deadline of `tries`; one try. PartRefusedError if the server says no,
    OSError for what happens to the connection. Over plain http the signature covers the bytes, so
    that a bit flipped on the way is refused; over https TLS does that.
    """
    import urllib3

    url = f"{access.object_url(key)}?partNumber={number}&uploadId={quote(upload_id, safe='-_.~')}"
    digest = "UNSIGNED-PAYLOAD" if access.encrypted else _sha256(source, span)
    # Not for the whole part but for each piece sent and for the answer: slow is not stalled.
    stall_s = min(access.timeout_s, tries.left_s)
    try:
        answer = access.pool.request(
            "PUT",
            url,
            body=_paced(source, span, tries, pace),
            headers=_signed(access, url, digest, span[1]),
            timeout=urllib3.Timeout(connect=stall_s, read=stall_s),
            redirect=False,
        )
    except urllib3.exceptions.HTTPError as error:
        raise ConnectionError(_without_address(error)) from None
    etag = str(answer.headers.get("ETag", ""))
    if answer.status != 200:
        raise _refusal(answer.status, answer.data)
    if not etag:
        raise ConnectionError("the answer to a part carries no ETag")
    return etag


def md5_of(source: ByteSource, span: tuple[int, int]) -> str:
    """The ETag a plain S3 server gives such a part, without quotes. Slow: 1.2 s a gibibyte."""
    digest = hashlib.md5(usedforsecurity=False)
    for piece in source.pieces(*span):
        digest.update(piece)
    return digest.hexdigest()


def _paced(
    source: ByteSource, span: tuple[int, int], tries: Tries, pace: Pace
) -> Iterator[memoryview | FileSpan]:
    for piece in source.sendable(*span):
        pace.take(len(piece))
        if tries.over:
            raise TimeoutError("the deadline passed while a part was sent")
        yield piece


def _sha256(source: ByteSource, span: tuple[int, int]) -> str:
    digest = hashlib.sha256()
    for piece in source.pieces(*span):
        digest.update(piece)
    return digest.hexdigest()


def _signed(access: S3Access, url: str, digest: str, num_bytes: int) -> dict[str, str]:
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest

    headers = {"Content-Length": str(num_bytes)}
    if access.credentials is None:
        return headers
    request = AWSRequest(method="PUT", url=url, headers=headers)
    signer = S3SigV4Auth(access.credentials.get_frozen_credentials(), "s3", access.region)
    signer.payload = lambda request: digest  # it would read the whole body to hash it
    signer.add_auth(request)
    return dict(request.headers.items())


def _refusal(status: int, body: bytes) -> PartRefusedError:
    text = body.decode("utf-8", "replace")
    code = re.search(r"<Code>(\w+)</Code>", text)
    message = re.search(r"<Message>([^<]*)</Message>", text)
    return PartRefusedError(
        status, code[1] if code else str(status), message[1] if message else f"HTTP {status}"
    )


def _without_address(error: Any) -> str:
    """What happened, without the upload's signed address that urllib3 puts into its texts."""
    reason = getattr(error, "reason", None) or error
    words = str(reason).rpartition(": ")[2]
    return f"{type(error).__name__}: {words[:200]}"
