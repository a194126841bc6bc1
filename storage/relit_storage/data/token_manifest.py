"""The manifest of a token data set: what its shards hold, bound to their content.

    manifest.json            TokenManifest, published last: without it the data set does not exist
    tokens-00000.parquet     one column "tokens": fixed-size binary of (block_len + 1) uint16 values

A row carries block_len + 1 tokens, its last one being the next row's first, so that inputs and
targets need no neighbour. The fingerprint is a SHA-256 over the checksums of all row groups'
tokens, not over names, sizes or encoding: equal fingerprints mean equal samples in equal order.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from relit_storage.errors import DataError

MANIFEST_KEY = "manifest.json"
COLUMN = "tokens"
TOKEN_DTYPE = np.dtype("<u2")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """One shard: rows and xxh3_128 of the raw token bytes of each of its row groups."""

    name: str
    num_bytes: int
    group_rows: tuple[int, ...]
    group_checksums: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenManifest:
    """What a token data set holds. dropped_tokens did not fill a last block."""

    tokenizer: str
    vocab_size: int
    block_len: int
    num_tokens: int
    dropped_tokens: int
    files: tuple[TokenFile, ...]
    v: int = 1

    @property
    def num_rows(self) -> int:
        """Samples in an epoch."""
        return sum(sum(file.group_rows) for file in self.files)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the content: tokenizer, block length and every row group's checksum."""
        groups = [[list(file.group_rows), list(file.group_checksums)] for file in self.files]
        identity = ["relit-tokens", self.v, self.tokenizer, self.block_len, groups]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def to_bytes(self) -> bytes:
        """Canonical JSON, with the fingerprint beside the fields."""
        body = asdict(self) | {"kind": "tokens", "fingerprint": self.fingerprint}
        return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str = MANIFEST_KEY) -> Self:
        """Parse strictly. Raises DataError naming `where` if it is not such a manifest, whole."""
        try:
            body = json.loads(data)
            kind, stated = body.pop("kind"), body.pop("fingerprint")
            body["files"] = tuple(_token_file(file) for file in body["files"])
            manifest = cls(**body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where} is not a token manifest: {error}.") from error
        if kind != "tokens" or manifest.v != 1:
            raise DataError(f"{where} is of kind {kind!r} version {manifest.v}, not tokens 1.")
        if stated != manifest.fingerprint:
            raise DataError(f"{where} was altered: its fingerprint does not fit its content.")
        return manifest


def checksum(tokens: npt.NDArray[Any]) -> str:
    """xxh3_128 of an array's bytes, as hex."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(tokens).data)


def _token_file(body: dict[str, Any]) -> TokenFile:
    rows, sums = tuple(body.pop("group_rows")), tuple(body.pop("group_checksums"))
    if len(rows) != len(sums):
        raise ValueError("a file has another number of row groups than of checksums")
    return TokenFile(group_rows=rows, group_checksums=sums, **body)
