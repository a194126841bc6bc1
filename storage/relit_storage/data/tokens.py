"""Reading a prepared token data set: whole row groups, each checked against the manifest.

`prepare_text` (token_writing.py) writes one; its layout is in token_manifest.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from relit_storage.data.permutation import Ints
from relit_storage.data.row_groups import (
    DEFAULT_CACHE_BYTES,
    BlockCache,
    Columns,
    ParquetReader,
    as_store,
    gather,
)
from relit_storage.data.token_manifest import (
    COLUMN,
    MANIFEST_KEY,
    TOKEN_DTYPE,
    TokenManifest,
    checksum,
)
from relit_storage.data.token_writing import prepare_text
from relit_storage.errors import CorruptShardError, DataError, ObjectMissingError
from relit_storage.stores.protocol import ObjectStore

__all__ = ["TokenDataset", "TokenManifest", "prepare_text"]


class TokenDataset:
    """Reads a prepared token data set; safe from any thread.

    A block is a row group. `fingerprint`, `rows_per_block` and `row_bytes` are what a Loader
    needs beside `gather` and `to_batch`.
    """

    def __init__(self, store: ObjectStore, manifest: TokenManifest, cache_bytes: int) -> None:
        self.manifest = manifest
        self.fingerprint = manifest.fingerprint
        self.block_len = manifest.block_len
        self.vocab_size = manifest.vocab_size
        self.row_bytes = (manifest.block_len + 1) * TOKEN_DTYPE.itemsize
        self._url = store.url
        self._groups = [
            (file, group) for file in manifest.files for group in range(len(file.group_rows))
        ]
        self.rows_per_block: Ints = np.array(
            [file.group_rows[group] for file, group in self._groups], np.int64
        )
        self._reader = ParquetReader(store)
        self._cache = BlockCache(self._load, cache_bytes)

    @classmethod
    def open(
        cls, location: str | ObjectStore, *, cache_bytes: int = DEFAULT_CACHE_BYTES
    ) -> TokenDataset:
        """Open a folder or URL that `prepare_text` wrote; reads the manifest and every size.

        Raises DataError if there is no whole data set, CorruptShardError if a file's size is
        not the manifest's.
        """
        store = as_store(location)
        try:
            manifest = TokenManifest.from_bytes(store.get(MANIFEST_KEY), store.url)
        except ObjectMissingError as error:
            raise DataError(f"{store.url} holds no token data set (no {MANIFEST_KEY}).") from error
        for file in manifest.files:
            size = store.size(file.name)
            if size != file.num_bytes:
                reason = "missing" if size is None else f"{size} bytes, not {file.num_bytes}"
                raise CorruptShardError(file=f"{store.url}/{file.name}", reason=reason)
        return cls(store, manifest, cache_bytes)

    @property
    def num_rows(self) -> int:
        """Samples in an epoch."""
        return int(self.rows_per_block.sum())

    def read(self, block: int, rows: Ints) -> npt.NDArray[np.uint16]:
        """A copy of rows of a block, [len(rows), block_len + 1]. Raises CorruptShardError."""
        return self._cache.get(block)[COLUMN][rows]

    def gather(self, blocks: Ints, rows: Ints) -> Columns:
        """Samples of any blocks as stored, in the order asked for. Raises CorruptShardError."""
        return gather(self._cache, blocks, rows)

    def to_batch(self, columns: Columns) -> Columns:
        """Inputs "x" and targets "y", int64 [n, block_len], freshly allocated, contiguous."""
        tokens = columns[COLUMN]
        return {"x": tokens[:, :-1].astype(np.int64), "y": tokens[:, 1:].astype(np.int64)}

    def _load(self, block: int) -> Columns:
        file, group = self._groups[block]
        rows = file.group_rows[group]
        table = self._reader.read_group(file.name, file.num_bytes, group, rows, [COLUMN])
        tokens = self._decode(table)
        if tokens is None or checksum(tokens) != file.group_checksums[group]:
            reason = f"row group {group} does not have the checksum of the manifest"
            raise CorruptShardError(file=f"{self._url}/{file.name}", reason=reason)
        return {COLUMN: tokens}

    def _decode(self, table: Any) -> npt.NDArray[np.uint16] | None:
        """Rows as tokens without a copy; None if the column is of another type."""
        column = table.column(0)
        if column.type != pa.binary(self.row_bytes) or column.num_chunks != 1:
            return None
        array, width = column.chunk(0), self.block_len + 1
        tokens = np.frombuffer(
            array.buffers()[1],
            TOKEN_DTYPE,
            count=len(array) * width,
            offset=array.offset * self.row_bytes,
        )
        return tokens.reshape(len(array), width)
