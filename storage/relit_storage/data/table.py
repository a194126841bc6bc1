"""Parquet tables of numbers as data sets: any file or folder whose columns have a fixed size.

Numbers, booleans, fixed-size lists of them (nested: a shape) and fixed-size binary (bytes) become
NumPy columns. Strings and variable lists are refused by name; leave them out with `columns`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from relit_storage.data.permutation import Ints
from relit_storage.data.row_groups import (
    DEFAULT_CACHE_BYTES,
    BlockCache,
    Columns,
    ParquetReader,
    as_store,
    gather,
)
from relit_storage.errors import DataError
from relit_storage.stores.protocol import ObjectStore

Binding = Literal["content", "footer"]

_SUFFIX = ".parquet"
_HASH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TableFile:
    """One Parquet object and how its row groups are cut."""

    key: str
    num_bytes: int
    group_rows: tuple[int, ...]


class TableDataset:
    """Reads the numeric columns of Parquet files; safe from any thread. A block is a row group."""

    def __init__(
        self,
        reader: ParquetReader,
        files: Sequence[TableFile],
        shapes: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
        fingerprint: str,
        cache_bytes: int,
    ) -> None:
        self.fingerprint = fingerprint
        self.columns = tuple(shapes)
        self.row_bytes = sum(
            dtype.itemsize * int(np.prod(shape)) for dtype, shape in shapes.values()
        )
        self._shapes = dict(shapes)
        self._reader = reader
        self._groups = [(file, group) for file in files for group in range(len(file.group_rows))]
        self.rows_per_block: Ints = np.array(
            [file.group_rows[group] for file, group in self._groups], np.int64
        )
        self._cache = BlockCache(self._load, cache_bytes)

    @classmethod
    def open(
        cls,
        location: str | ObjectStore,
        *,
        columns: Sequence[str] | None = None,
        binding: Binding = "content",
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> TableDataset:
        """Open a .parquet file or a folder of them (by name, nested ones too), local or a URL.

        binding "content" reads every byte once to bind the fingerprint to it (10 GB/s from
        memory, else the disk's speed); "footer" hashes sizes and footers only: quick, but blind
        to bytes changed in place. Raises DataError naming the column or file at fault.
        """
        store, keys = _find(location)
        reader = ParquetReader(store)
        files = [_table_file(reader, store, key) for key in keys]
        schemas = [reader.schema(file.key, file.num_bytes) for file in files]
        shapes = [_shapes(schema, columns, key) for schema, key in zip(schemas, keys, strict=True)]
        for key, other in zip(keys, shapes, strict=True):
            if other != shapes[0]:
                raise DataError(f"{key} has other columns than {keys[0]}: {other}.")
        hashes = [_file_hash(store, file, binding) for file in files]
        rows = [list(file.group_rows) for file in files]
        # The whole files count: another selection of columns is the same data set.
        identity = json.dumps(["relit-table", 1, binding, rows, hashes])
        fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        return cls(reader, files, shapes[0], fingerprint, cache_bytes)

    @property
    def num_rows(self) -> int:
        """Samples in an epoch."""
        return int(self.rows_per_block.sum())

    def read(self, block: int, rows: Ints) -> Columns:
        """A copy of rows of one block. Raises CorruptShardError, DataError for nulls."""
        return {name: values[rows] for name, values in self._cache.get(block).items()}

    def gather(self, blocks: Ints, rows: Ints) -> Columns:
        """Samples of any blocks, in the order asked for. Raises as `read`."""
        return gather(self._cache, blocks, rows)

    def to_batch(self, columns: Columns) -> Columns:
        """The columns, freshly allocated and contiguous."""
        return {name: np.array(values, order="C") for name, values in columns.items()}

    def _load(self, block: int) -> Columns:
        file, group = self._groups[block]
        rows, columns = file.group_rows[group], list(self._shapes)
        table = self._reader.read_group(file.key, file.num_bytes, group, rows, columns)
        return {
            name: _to_numpy(table.column(name), name, dtype, shape)
            for name, (dtype, shape) in self._shapes.items()
        }


def prepare_table(
    columns: Mapping[str, npt.NDArray[Any]],
    out: str | ObjectStore,
    *,
    key: str = "table.parquet",
    rows_per_group: int = 1024,
) -> None:
    """Write arrays of equal length as one Parquet object `key` in the folder or URL `out`.

    Further dimensions become fixed-size lists; pages carry checksums. Replaces what is there.
    """
    arrays = {name: _to_arrow(np.ascontiguousarray(values)) for name, values in columns.items()}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(arrays), sink, row_group_size=rows_per_group, write_page_checksum=True)
    as_store(out).put(key, bytes(sink.getvalue()))


def _find(location: str | ObjectStore) -> tuple[ObjectStore, list[str]]:
    address, mark, options = location.partition("?") if isinstance(location, str) else ("", "", "")
    if address.endswith(_SUFFIX):
        folder, slash, name = address.rpartition("/")
        return as_store((folder or slash or ".") + mark + options), [name]
    store = as_store(location)
    keys = [key for key in store.list("") if key.endswith(_SUFFIX)]
    if not keys:
        raise DataError(f"{store.url} holds no {_SUFFIX} file.")
    return store, keys


def _table_file(reader: ParquetReader, store: ObjectStore, key: str) -> TableFile:
    num_bytes = store.size(key)
    if num_bytes is None:
        raise DataError(f"{store.url} has no file {key}.")
    footer = reader.footer(key, num_bytes)
    rows = tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
    return TableFile(key, num_bytes, rows)


def _file_hash(store: ObjectStore, file: TableFile, binding: Binding) -> str:
    """xxh3_128 of the object's bytes, or of its size and footer."""
    digest = xxhash.xxh3_128(str(file.num_bytes).encode())
    start = 0
    if binding == "footer":
        tail = store.get_range(file.key, max(file.num_bytes - 8, 0), 8)
        start = max(file.num_bytes - 8 - int.from_bytes(tail[:4], "little"), 0)
    for offset in range(start, file.num_bytes, _HASH_BYTES):
        size = min(_HASH_BYTES, file.num_bytes - offset)
        digest.update(store.get_range(file.key, offset, size))
    return str(digest.hexdigest())


def _shapes(
    schema: Any, columns: Sequence[str] | None, key: str
) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """NumPy dtype and shape of one row of each chosen column."""
    chosen = schema.names if columns is None else columns
    missing = [name for name in chosen if name not in schema.names]
    if missing or not chosen:
        raise DataError(f"{key} has the columns {schema.names}, not {missing or 'any'}.")
    return {name: _shape(schema.field(name).type, name) for name in chosen}


def _shape(arrow_type: Any, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    shape: list[int] = []
    while pa.types.is_fixed_size_list(arrow_type):
        shape.append(arrow_type.list_size)
        arrow_type = arrow_type.value_type
    if pa.types.is_fixed_size_binary(arrow_type):
        return np.dtype(np.uint8), (*shape, arrow_type.byte_width)
    numeric = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    if not any(test(arrow_type) for test in numeric):
        fix = "store numbers or fixed-size lists of them, or leave it out with columns=[...]"
        raise DataError(f"column {name!r} of type {arrow_type} has no fixed numeric shape; {fix}.")
    return np.dtype(arrow_type.to_pandas_dtype()), tuple(shape)


def _to_numpy(
    column: Any, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    num_rows = len(column)
    array = column.combine_chunks()
    while pa.types.is_fixed_size_list(array.type) and not array.null_count:
        array = array.flatten()
    if array.null_count:
        raise DataError(f"column {name!r} has {array.null_count} nulls; fill or drop them first.")
    if pa.types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        flat = np.frombuffer(array.buffers()[1], np.uint8)
        flat = flat[array.offset * width : (array.offset + len(array)) * width]
    else:
        flat = array.to_numpy(zero_copy_only=False)
    return flat.astype(dtype, copy=False).reshape(num_rows, *shape)


def _to_arrow(values: npt.NDArray[Any]) -> Any:
    array = pa.array(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array
