"""Checksums of chunks: xxh3_128, which costs 0.04 s/GB where sha256 costs 0.5.

They tell damage (a torn write, a flipped bit, a file of another step), not malice; the manifest
that lists them is bound by sha256.
"""

from __future__ import annotations

import xxhash


def checksum(view: bytes | memoryview) -> str:
    """xxh3_128 of a whole buffer as 32 hex digits. Releases the GIL while it runs."""
    return str(xxhash.xxh3_128_hexdigest(view))


def chunk_checksums(view: bytes | memoryview, chunk_bytes: int) -> tuple[str, ...]:
    """One checksum per chunk of `chunk_bytes`; the last chunk may be shorter, none if empty."""
    flat = memoryview(view).cast("B")
    return tuple(checksum(flat[at : at + chunk_bytes]) for at in range(0, len(flat), chunk_bytes))


def num_chunks(num_bytes: int, chunk_bytes: int) -> int:
    """How many checksums a file of `num_bytes` has."""
    return -(-num_bytes // chunk_bytes)
