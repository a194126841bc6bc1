"""What an exception from a store's client means for the caller.

s3fs turns S3 error codes into OSErrors that overlap (a lost condition and a bad argument are both
EINVAL), so the original code is read from the exception's cause where there is one. obstore keeps
the server's answer in its text only, so there the code is read from that.

    MISSING   no such object                          CONFLICT  the object exists already
    BEYOND    a range past the end                    RENEW     credentials or clock went stale
    BUSY      try again later                         FINAL     trying again cannot help
"""

from __future__ import annotations

import enum
import errno
import re

from relit_storage.errors import ObjectMissingError, StoreError, StoreUnavailableError


class KeyTakenError(StoreError):
    """The key exists already. Raised by one conditional request; no verb of a store lets it out."""


class BeyondError(StoreError):
    """The range begins past the end. No verb of a store lets it out."""


class Answer(enum.Enum):
    """The meanings above."""

    MISSING = "missing"
    CONFLICT = "conflict"
    BEYOND = "beyond"
    RENEW = "renew"
    BUSY = "busy"
    FINAL = "final"


_BY_CODE = {
    "NoSuchKey": Answer.MISSING,
    "404": Answer.MISSING,
    "NoSuchBucket": Answer.FINAL,
    "PreconditionFailed": Answer.CONFLICT,
    "412": Answer.CONFLICT,
    "InvalidRange": Answer.BEYOND,
    "416": Answer.BEYOND,
    # An answer to HEAD has no body, so an expired token shows as a bare 400 there.
    "400": Answer.RENEW,
    "ExpiredToken": Answer.RENEW,
    "InvalidToken": Answer.RENEW,
    "TokenRefreshRequired": Answer.RENEW,
    "RequestTimeTooSkewed": Answer.RENEW,
    # 409 to a conditional write means that another one is in flight, not that it won.
    "ConditionalRequestConflict": Answer.BUSY,
    "OperationAborted": Answer.BUSY,
    "409": Answer.BUSY,
    "SlowDown": Answer.BUSY,
    "RequestTimeout": Answer.BUSY,
    "IncompleteBody": Answer.BUSY,
    "BadDigest": Answer.BUSY,  # a bit flipped on the wire; the bytes we hold are checked elsewhere
    "XAmzContentSHA256Mismatch": Answer.BUSY,
    "NoSuchUpload": Answer.BUSY,  # our multipart upload was aborted under us: begin another
}
_FINAL_ERRNO = {errno.EINVAL, errno.ENOSYS, errno.ENAMETOOLONG, errno.EPERM, errno.ENOSPC}
# By name, so that this module needs no S3 library: botocore's and aiohttp's connection troubles.
_BUSY_NAMES = {
    "HTTPClientError",
    "ConnectionError",
    "ClientPayloadError",
    "ClientConnectionError",
    "IncompleteReadError",
    "IncompleteRead",
    "ResponseParserError",
    "GenericError",  # obstore's, for whatever has no answer of the server: resets, timeouts
    "JoinError",
    "CredentialRetrievalError",
}
_STATUS = re.compile(r"returned non-2xx status code: (\d{3})")
_XML_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_XML_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")


def classify(error: BaseException) -> Answer:
    """The meaning of `error`; FINAL for whatever is not known to be anything else."""
    code, status = _code_of(error)
    if code in _BY_CODE:
        return _BY_CODE[code]
    if code:
        again = status >= 500 or status == 429 or code.startswith("5")
        return Answer.BUSY if again else Answer.FINAL
    if isinstance(error, FileNotFoundError):
        return Answer.MISSING
    if isinstance(error, FileExistsError):
        return Answer.CONFLICT
    if isinstance(error, PermissionError):
        return Answer.FINAL
    if isinstance(error, OSError):
        return Answer.FINAL if error.errno in _FINAL_ERRNO else Answer.BUSY
    if "incorrectly configured region" in str(error):
        return Answer.FINAL  # obstore follows no redirect to another region
    names = {parent.__name__ for parent in type(error).__mro__}
    return Answer.BUSY if names & _BUSY_NAMES else Answer.FINAL


def to_error(url: str, key: str, answer: Answer, error: BaseException) -> StoreError:
    """The error of ours that says the same, to be raised."""
    if answer is Answer.MISSING:
        return ObjectMissingError(url=url, key=key)
    kinds = {Answer.CONFLICT: KeyTakenError, Answer.BEYOND: BeyondError}
    busy = answer in (Answer.BUSY, Answer.RENEW)
    kind = kinds.get(answer, StoreUnavailableError if busy else StoreError)
    return kind(url=url, key=key, cause=describe(error))


def describe(error: BaseException) -> str:
    """One line for humans: the store's own code and words.

    Of an answer in XML only those two: the rest may repeat the key id and what was signed.
    """
    code, _ = _code_of(error)
    text = str(error)
    words = _XML_MESSAGE.search(text)
    if words or "<" in text:
        text = words[1] if words else text.partition("<")[0]
    text = " ".join(text.partition("Debug source:")[0].split())[:300] or type(error).__name__
    return f"{code}: {text}" if code and code not in text else text


def _code_of(error: BaseException) -> tuple[str, int]:
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return str(response.get("Error", {}).get("Code", "")), int(status)
    status_text = _STATUS.search(str(error))
    if status_text is None:
        return "", 0
    code = _XML_CODE.search(str(error))
    return code[1] if code else status_text[1], int(status_text[1])
