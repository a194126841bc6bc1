"""Any Parquet table of fixed-size numbers is a data set; everything else is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relit_storage.data.table import Binding, TableDataset, prepare_table
from relit_storage.errors import CorruptShardError, DataError
from relit_storage.stores.memory import MemoryStore

ROWS = 50
COLUMNS = {
    "x": np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 2, 3),
    "y": np.arange(ROWS, dtype=np.int64),
    "flag": np.arange(ROWS) % 2 == 0,
    "half": np.arange(ROWS, dtype=np.float16),
}


def digits(store: MemoryStore, key: str = "table.parquet") -> MemoryStore:
    prepare_table(COLUMNS, store, key=key, rows_per_group=8)
    return store


def test_columns_come_back_as_they_went_in() -> None:
    data = TableDataset.open(digits(MemoryStore()))
    assert data.rows_per_block.tolist() == [8] * 6 + [2] and data.num_rows == ROWS
    assert data.row_bytes == 6 * 4 + 8 + 1 + 2
    ids = np.array([49, 0, 17, 16, 8, 0])
    batch = data.to_batch(data.gather(ids // 8, ids % 8))
    for name, values in COLUMNS.items():
        assert batch[name].dtype == values.dtype and batch[name].flags.c_contiguous
        assert np.array_equal(batch[name], values[ids])
    batch["x"][:] = 0
    assert np.array_equal(data.read(6, np.array([1]))["x"], COLUMNS["x"][[49]])


def test_file_folder_and_selection(tmp_path: Path) -> None:
    prepare_table(COLUMNS, str(tmp_path), key="b.parquet")
    prepare_table(COLUMNS, str(tmp_path), key="a.parquet")
    one = TableDataset.open(str(tmp_path / "a.parquet"), columns=["y"])
    two = TableDataset.open(str(tmp_path))
    assert (one.num_rows, two.num_rows) == (ROWS, 2 * ROWS)
    assert one.columns == ("y",) and list(one.read(0, np.array([0]))) == ["y"]
    assert one.fingerprint == TableDataset.open(str(tmp_path / "a.parquet")).fingerprint


def test_fixed_size_binary_is_bytes() -> None:
    store, sink = MemoryStore(), pa.BufferOutputStream()
    column = pa.array([b"abc", b"def", b"ghi"], pa.binary(3))
    pq.write_table(pa.table({"image": column}), sink)
    store.put("t.parquet", bytes(sink.getvalue()))
    data = TableDataset.open(store)
    assert data.read(0, np.array([1]))["image"].tobytes() == b"def"


REFUSED = [
    (pa.array(["a", "b"]), "column 'c' of type string"),
    (pa.array([[1], [2, 3]]), "column 'c' of type list"),
    (pa.array([0, 1], pa.timestamp("s")), "column 'c' of type timestamp"),
]


@pytest.mark.parametrize(("column", "message"), REFUSED)
def test_columns_without_a_fixed_numeric_shape_are_refused(column: pa.Array, message: str) -> None:
    store, sink = MemoryStore(), pa.BufferOutputStream()
    pq.write_table(pa.table({"c": column, "n": pa.array([1, 2])}), sink)
    store.put("t.parquet", bytes(sink.getvalue()))
    with pytest.raises(DataError, match=message):
        TableDataset.open(store)
    assert TableDataset.open(store, columns=["n"]).num_rows == 2


NULLS = [pa.array([1, None]), pa.array([[1.0, None], [2.0, 3.0]], pa.list_(pa.float32(), 2))]


@pytest.mark.parametrize("column", NULLS)
def test_nulls_are_refused(column: pa.Array) -> None:
    store, sink = MemoryStore(), pa.BufferOutputStream()
    pq.write_table(pa.table({"c": column}), sink)
    store.put("t.parquet", bytes(sink.getvalue()))
    with pytest.raises(DataError, match="column 'c' has 1 nulls"):
        TableDataset.open(store).read(0, np.array([0]))


def test_missing_columns_files_and_mixed_schemas_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no \.parquet file"):
        TableDataset.open(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"no file a\.parquet"):
        TableDataset.open(str(tmp_path / "a.parquet"))
    store = digits(MemoryStore())
    with pytest.raises(DataError, match=r"not \['z'\]"):
        TableDataset.open(store, columns=["y", "z"])
    prepare_table({"y": np.arange(3)}, store, key="other.parquet")
    with pytest.raises(DataError, match=r"table\.parquet has other columns"):
        TableDataset.open(store)


@pytest.mark.parametrize("binding", ["content", "footer"])
def test_fingerprint_follows_the_data(binding: Binding) -> None:
    store = digits(MemoryStore())
    first = TableDataset.open(store, binding=binding).fingerprint
    assert TableDataset.open(digits(MemoryStore()), binding=binding).fingerprint == first
    prepare_table(COLUMNS | {"y": COLUMNS["y"] + 1}, store, rows_per_group=8)
    assert TableDataset.open(store, binding=binding).fingerprint != first
    digits(store)
    digits(store, "more.parquet")
    assert TableDataset.open(store, binding=binding).fingerprint != first


def test_a_flipped_byte_changes_the_content_fingerprint_and_is_refused() -> None:
    store = digits(MemoryStore())
    data = TableDataset.open(store)
    raw = bytearray(store.get("table.parquet"))
    raw[60] ^= 1  # inside the first page
    store.put("table.parquet", bytes(raw))
    assert TableDataset.open(store).fingerprint != data.fingerprint
    with pytest.raises(CorruptShardError, match=r"table\.parquet refused"):
        data.read(0, np.array([0]))
