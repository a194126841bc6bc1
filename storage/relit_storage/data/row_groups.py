"""Whole row groups of Parquet objects, read once and kept under a byte budget.

Random rows of a compressed row group would decode it again for each (24 rows a second measured at
50 MB groups), so a group is the unit of reading and caching. One ranged read fetches one column
chunk; a file's footer is read once. Everything works on an ObjectStore: local folder or S3 alike.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from relit_storage.data.permutation import Ints
from relit_storage.errors import CorruptShardError
from relit_storage.stores.protocol import ObjectStore

Columns = dict[str, npt.NDArray[Any]]

DEFAULT_CACHE_BYTES = 256 << 20

# What pyarrow raises on damaged files. A store's own errors are none of these and pass through.
_DAMAGE = (pa.ArrowException, OSError, ValueError, LookupError, MemoryError)


class StoreFile(io.RawIOBase):
    """A read-only file over one object: a read is one `get_range`, nothing is read ahead."""

    def __init__(self, store: ObjectStore, key: str, num_bytes: int) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._num_bytes = num_bytes
        self._at = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Current offset in bytes."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move without reading."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        self._at = origin + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """`size` bytes from here, fewer only at the end."""
        left = max(self._num_bytes - self._at, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        data = self._store.get_range(self._key, self._at, wanted) if wanted else b""
        self._at += len(data)
        return data


class ParquetReader:
    """Reads row groups of the Parquet objects of one store. Safe from any thread."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._footers: dict[str, Any] = {}

    def footer(self, key: str, num_bytes: int) -> Any:
        """The file's metadata (pyarrow FileMetaData), read once. Raises CorruptShardError."""
        found = self._footers.get(key)
        if found is None:
            found = self._guarded(key, lambda: self._open(key, num_bytes, None).metadata)
            self._footers[key] = found
        return found

    def schema(self, key: str, num_bytes: int) -> Any:
        """The file's Arrow schema. Raises CorruptShardError."""
        return self.footer(key, num_bytes).schema.to_arrow_schema()

    def read_group(
        self, key: str, num_bytes: int, group: int, num_rows: int, columns: list[str]
    ) -> Any:
        """One row group as an Arrow table of `num_rows` and these columns. Blocks on the store.

        Raises CorruptShardError when a page's checksum, where it has one, does not fit, or when
        the group is not as said.
        """
        footer = self.footer(key, num_bytes)

        def read() -> Any:
            file = self._open(key, num_bytes, footer)
            table = file.read_row_group(group, columns=columns, use_threads=False)
            if (table.num_rows, table.num_columns) != (num_rows, len(columns)):
                raise ValueError(f"row group {group} is not {num_rows} rows of {columns}")
            return table

        return self._guarded(key, read)

    def _open(self, key: str, num_bytes: int, footer: Any) -> Any:
        source = StoreFile(self._store, key, num_bytes)
        return pq.ParquetFile(source, metadata=footer, page_checksum_verification=True)

    def _guarded(self, key: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except _DAMAGE as error:
            raise CorruptShardError(file=f"{self._store.url}/{key}", reason=str(error)) from error


class BlockCache:
    """Least recently used blocks within `budget_bytes`; a block wanted twice at once loads once.

    A block larger than the whole budget is handed out and not kept.
    """

    def __init__(self, load: Callable[[int], Columns], budget_bytes: int) -> None:
        self._load = load
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, Columns] = OrderedDict()
        self._loading: dict[int, Future[Columns]] = {}
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes held now; never above the budget."""
        return self._used_bytes

    def get(self, block: int) -> Columns:
        """The block's arrays, which the caller must not write to. Blocks while it loads."""
        with self._lock:
            held = self._blocks.get(block)
            if held is not None:
                self._blocks.move_to_end(block)
                return held
            pending = self._loading.get(block)
            ours = None if pending else self._loading.setdefault(block, Future())
        if pending is not None:
            return pending.result()
        assert ours is not None
        return self._load_and_keep(block, ours)

    def _load_and_keep(self, block: int, future: Future[Columns]) -> Columns:
        try:
            columns = self._load(block)
        except BaseException as error:
            with self._lock:
                del self._loading[block]
            future.set_exception(error)
            raise
        with self._lock:
            del self._loading[block]
            self._keep(block, columns)
        future.set_result(columns)
        return columns

    def _keep(self, block: int, columns: Columns) -> None:
        num_bytes = _num_bytes(columns)
        if num_bytes > self._budget_bytes:
            return
        while self._used_bytes + num_bytes > self._budget_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self._used_bytes -= _num_bytes(oldest)
        self._blocks[block] = columns
        self._used_bytes += num_bytes


def gather(cache: BlockCache, blocks: Ints, rows: Ints) -> Columns:
    """New arrays with one row per (block, row), in the order asked for; reads each block once."""
    out: Columns = {}
    for block, index in _by_block(blocks):
        for name, values in cache.get(block).items():
            if name not in out:
                out[name] = np.empty((len(blocks), *values.shape[1:]), values.dtype)
            out[name][index] = values[rows[index]]
    return out


def as_store(location: str | ObjectStore) -> ObjectStore:
    """The store of a path or URL; a store is handed through."""
    if not isinstance(location, str):
        return location
    # Imported late: opening pulls in fsspec, which a reader of an open store does not need.
    from relit_storage.stores.opening import open_store

    return open_store(location)


def _by_block(blocks: Ints) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """(block, indices of `blocks` that hold it) for each distinct block."""
    order = np.argsort(blocks, kind="stable")
    cuts = np.flatnonzero(np.diff(blocks[order])) + 1
    for index in np.split(order, cuts):
        if len(index):
            yield int(blocks[index[0]]), index


def _num_bytes(columns: Columns) -> int:
    return sum(values.nbytes for values in columns.values())
