"""What a legal key is, the same for every store, so that a run directory can move between them."""

from __future__ import annotations

from relit_storage.errors import StoreError

MAX_KEY_BYTES = 1024  # the limit of S3; longer keys would be legal on one ground only
RESERVED_PART = ".tmp"  # LocalStore keeps unfinished files there


def check_key(url: str, key: str) -> str:
    """The key itself if it is legal, else StoreError that names the store and the key."""
    reason = _fault_of(key)
    if reason:
        raise StoreError(url=url, key=repr(key), cause=reason)
    return key


def check_prefix(url: str, prefix: str) -> str:
    """Like `check_key` for the argument of `list`: may be empty or end in a slash."""
    if prefix:
        check_key(url, prefix[:-1] if prefix.endswith("/") else prefix)
    return prefix


def check_range(url: str, key: str, start: int, num_bytes: int) -> None:
    """StoreError unless both numbers can be a byte range."""
    if start < 0 or num_bytes < 0:
        raise StoreError(url=url, key=key, cause=f"no byte range: {start}+{num_bytes}")


def _fault_of(key: str) -> str:
    if not key or len(key.encode()) > MAX_KEY_BYTES:
        return f"a key has 1 to {MAX_KEY_BYTES} bytes"
    if "\0" in key or "\\" in key:
        return "a key has no NUL and no backslash"
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "a key has no empty, '.' or '..' part"
    if parts[0] == RESERVED_PART:
        return f"the first part {RESERVED_PART!r} is reserved"
    return ""
