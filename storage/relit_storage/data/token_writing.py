"""Writing a token data set: text to byte tokens, cut into fixed blocks, stored as Parquet shards.

Shards are created, never replaced, and the manifest is created last, so a preparation that was
killed is finished by running it again (a shard that is there is recognised by the checksums in
its footer and not written twice), and two that run at once agree or one is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from relit_storage.data.row_groups import ParquetReader, as_store
from relit_storage.data.token_manifest import (
    COLUMN,
    MANIFEST_KEY,
    TOKEN_DTYPE,
    TokenFile,
    TokenManifest,
    checksum,
)
from relit_storage.errors import CorruptShardError, DataError, DatasetChangedError
from relit_storage.stores.protocol import ObjectStore

GROUP_BYTES = 1 << 20  # raw; large enough for one object read, small enough for many open lanes
FILE_BYTES = 64 << 20
_CHECKSUMS = b"relit.checksums"

Tokens = npt.NDArray[np.uint16]


def prepare_text(
    source: Iterable[bytes | str | Path],
    out: str | ObjectStore,
    *,
    block_len: int,
    rows_per_group: int | None = None,
    rows_per_file: int | None = None,
    separator: bytes = b"\0",
) -> TokenManifest:
    """Prepare documents into `out`, a folder or URL; safe to repeat, also after a kill.

    Each item is a document: bytes as they are, or the path of a file. Its bytes are its tokens
    (0 to 255), followed by `separator`'s. Holds one shard in memory. Sizes default to 1 MiB row
    groups and 64 MiB shards. Raises DatasetChangedError if `out` holds another data set,
    DataError if the text does not fill one block.
    """
    if block_len < 1:
        raise ValueError(f"block_len must be at least 1, not {block_len}")
    store = as_store(out)
    row_bytes = (block_len + 1) * TOKEN_DTYPE.itemsize
    group_rows = rows_per_group or max(1, GROUP_BYTES // row_bytes)
    file_rows = rows_per_file or max(group_rows, FILE_BYTES // row_bytes)
    files: list[TokenFile] = []
    num_tokens = 0
    for tokens in _shards(_documents(source, separator), block_len, file_rows):
        num_tokens += len(tokens) - bool(files)  # the first of a later shard was counted already
        rows = _rows(tokens, block_len)
        if len(rows):
            files.append(_write_shard(store, len(files), rows, group_rows))
    num_rows = sum(sum(file.group_rows) for file in files)
    if not num_rows:
        raise DataError(f"{num_tokens} bytes of text do not fill a block of {block_len} + 1.")
    manifest = TokenManifest(
        tokenizer="bytes" + (f"+{separator.hex()}" if separator else ""),
        vocab_size=256,
        block_len=block_len,
        num_tokens=num_tokens,
        dropped_tokens=num_tokens - (num_rows * block_len + 1),
        files=tuple(files),
    )
    return _publish(store, manifest)


def _documents(source: Iterable[bytes | str | Path], separator: bytes) -> Iterator[bytes]:
    for item in source:
        yield item if isinstance(item, bytes) else Path(item).read_bytes()
        yield separator


def _shards(texts: Iterable[bytes], block_len: int, file_rows: int) -> Iterator[Tokens]:
    """The token stream in pieces of `file_rows` blocks and one more token, the next one's first."""
    held = bytearray()
    step = file_rows * block_len
    for text in texts:
        held += text
        while len(held) > step:
            yield np.frombuffer(held[: step + 1], np.uint8).astype(TOKEN_DTYPE)
            del held[:step]
    if held:
        yield np.frombuffer(bytes(held), np.uint8).astype(TOKEN_DTYPE)


def _rows(tokens: Tokens, block_len: int) -> Tokens:
    """All whole rows of block_len + 1 tokens; neighbours share one token."""
    if len(tokens) <= block_len:
        return np.empty((0, block_len + 1), TOKEN_DTYPE)
    view = np.lib.stride_tricks.sliding_window_view(tokens, block_len + 1)
    return np.ascontiguousarray(view[::block_len])


def _write_shard(store: ObjectStore, number: int, rows: Tokens, group_rows: int) -> TokenFile:
    name = f"tokens-{number:05d}.parquet"
    groups = [rows[lo : lo + group_rows] for lo in range(0, len(rows), group_rows)]
    checksums = tuple(checksum(group) for group in groups)
    num_bytes = store.size(name)
    if num_bytes is None:
        data = _encode(groups, checksums)
        num_bytes = len(data) if store.put_if_absent(name, data) else store.size(name)
    stored = None if num_bytes is None else _stored_checksums(store, name, num_bytes)
    if num_bytes is None or stored != checksums:
        diff = [f"{store.url}/{name} holds other tokens; prepare into an empty folder"]
        raise DatasetChangedError(expected=_digest(checksums), found=_digest(stored), diff=diff)
    return TokenFile(
        name=name,
        num_bytes=num_bytes,
        group_rows=tuple(len(group) for group in groups),
        group_checksums=checksums,
    )


def _encode(groups: list[Tokens], checksums: tuple[str, ...]) -> bytes:
    """One Parquet file, a row group per group, with page checksums.

    Fixed-size binary, because Parquet stores a list of uint16 as int32 with levels and reads it
    4-5 times slower; no dictionary and no statistics, which tokens do not profit from.
    """
    width = groups[0].shape[1] * TOKEN_DTYPE.itemsize
    schema = pa.schema([pa.field(COLUMN, pa.binary(width), nullable=False)])
    sink = pa.BufferOutputStream()
    options = {"use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    with pq.ParquetWriter(sink, schema, compression="zstd", **options) as writer:
        for group in groups:
            buffers = [None, pa.py_buffer(np.ascontiguousarray(group))]
            array = pa.Array.from_buffers(pa.binary(width), len(group), buffers)
            writer.write_table(pa.table([array], schema=schema), row_group_size=len(group))
        writer.add_key_value_metadata({_CHECKSUMS: json.dumps(checksums).encode()})
    return bytes(sink.getvalue())


def _stored_checksums(store: ObjectStore, name: str, num_bytes: int) -> tuple[str, ...] | None:
    """What the footer of a finished shard says of its row groups; None if it says nothing."""
    try:
        metadata = ParquetReader(store).footer(name, num_bytes).metadata or {}
    except CorruptShardError:
        return None
    return tuple(json.loads(metadata.get(_CHECKSUMS, b"[]")))


def _digest(checksums: tuple[str, ...] | None) -> str:
    return hashlib.sha256(json.dumps(checksums).encode()).hexdigest()


def _publish(store: ObjectStore, manifest: TokenManifest) -> TokenManifest:
    """Create the manifest. An equal one that is there already is as good."""
    if store.put_if_absent(MANIFEST_KEY, manifest.to_bytes()):
        return manifest
    found = TokenManifest.from_bytes(store.get(MANIFEST_KEY), store.url)
    if found.fingerprint == manifest.fingerprint:
        return found
    diff = [f"{store.url} holds {found.num_rows} rows, the text gives {manifest.num_rows}"]
    raise DatasetChangedError(expected=manifest.fingerprint, found=found.fingerprint, diff=diff)
