"""Preparing text loses no byte, is safe to repeat after a kill, and reading refuses other bytes."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relit_storage.data.corpus import stdlib_paths
from relit_storage.data.row_groups import BlockCache, Columns
from relit_storage.data.tokens import TokenDataset, TokenManifest, prepare_text
from relit_storage.errors import (
    CorruptShardError,
    DataError,
    DatasetChangedError,
    StoreUnavailableError,
)
from relit_storage.stores.memory import MemoryStore

TEXT = bytes(range(256)) * 8  # 2048 tokens; blocks of 16 make 127 rows and 15 tokens over


class Killed(RuntimeError):
    """Stands for a SIGKILL between two calls."""


class DyingStore(MemoryStore):
    """Dies before its n-th write."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.writes = writes

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self.writes == 0:
            raise Killed
        self.writes -= 1
        return super().put_if_absent(key, data)


class CountingStore(MemoryStore):
    """Counts ranged reads, and can be made to fail them."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []
        self.down = False

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes:
        if self.down:
            raise StoreUnavailableError(url=self.url, key=key, cause="down")
        self.ranges.append((key, start, num_bytes))
        return super().get_range(key, start, num_bytes)


def prepare(
    store: MemoryStore, text: bytes = TEXT, *, block_len: int = 16, rows_per_file: int = 25
) -> TokenManifest:
    return prepare_text(
        [text],
        store,
        block_len=block_len,
        rows_per_group=10,
        rows_per_file=rows_per_file,
        separator=b"",
    )


def all_tokens(data: TokenDataset) -> list[int]:
    """The token stream, put together again from the rows."""
    rows = [data.read(block, np.arange(num)) for block, num in enumerate(data.rows_per_block)]
    table = np.concatenate(rows)
    assert np.array_equal(table[1:, 0], table[:-1, -1])  # neighbours share one token
    return [*table[:, :-1].ravel().tolist(), int(table[-1, -1])]


@given(
    st.lists(st.binary(max_size=60), max_size=12),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 7),
)
@settings(max_examples=60, deadline=None)
def test_no_byte_is_lost(documents: list[bytes], block: int, group: int, file: int) -> None:
    text = b"".join(document + b"\0" for document in documents)
    store = MemoryStore()

    def run() -> TokenManifest:
        return prepare_text(
            documents, store, block_len=block, rows_per_group=group, rows_per_file=file
        )

    if len(text) < block + 1:
        with pytest.raises(DataError, match="do not fill"):
            run()
        return
    manifest = run()
    data = TokenDataset.open(store)
    assert manifest.num_tokens == len(text)
    assert bytes(all_tokens(data)) + text[len(text) - manifest.dropped_tokens :] == text
    assert data.num_rows == manifest.num_rows == (len(text) - 1) // block
    assert manifest.dropped_tokens < block


def test_paths_and_a_folder(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(TEXT)
    manifest = prepare_text([source, b"tail"], str(tmp_path / "out"), block_len=16)
    data = TokenDataset.open(str(tmp_path / "out"))
    assert data.fingerprint == manifest.fingerprint
    stored = bytes(all_tokens(data))
    assert (TEXT + b"\0tail\0").startswith(stored) and len(stored) > len(TEXT)


def test_batch_has_inputs_and_targets() -> None:
    store = MemoryStore()
    prepare(store)
    data = TokenDataset.open(store)
    stored = data.gather(np.array([3, 0, 3]), np.array([2, 1, 0]))
    batch = data.to_batch(stored)
    assert batch["x"].dtype == batch["y"].dtype == np.int64
    assert batch["x"].shape == batch["y"].shape == (3, 16)
    assert batch["x"].flags.c_contiguous and batch["y"].flags.c_contiguous
    assert np.array_equal(batch["x"][:, 1:], batch["y"][:, :-1])
    assert np.array_equal(batch["x"][0], data.read(3, np.array([2]))[0, :-1])
    batch["x"][:] = -1  # the user's own arrays: what is cached does not change
    assert np.array_equal(data.gather(np.array([3]), np.array([2]))["tokens"], stored["tokens"][:1])


def test_fingerprint_is_bound_to_content() -> None:
    same = prepare(MemoryStore()).fingerprint
    assert prepare(MemoryStore()).fingerprint == same
    assert prepare(MemoryStore(), rows_per_file=50).fingerprint != same  # rows lie elsewhere
    assert prepare(MemoryStore(), block_len=17).fingerprint != same
    for at in (0, 1000, 2000):
        changed = TEXT[:at] + bytes([TEXT[at] ^ 1]) + TEXT[at + 1 :]
        assert prepare(MemoryStore(), changed).fingerprint != same


@pytest.mark.parametrize("writes", range(7))
def test_killed_before_each_write_then_repeated(writes: int) -> None:
    store = DyingStore(writes)
    if writes < 7 - 1:
        with pytest.raises(Killed):
            prepare(store)
        with pytest.raises(DataError, match="no token data set"):
            TokenDataset.open(store)
    before = {key: store.get(key) for key in store.list("")}
    store.writes = 100
    assert prepare(store).fingerprint == prepare(MemoryStore()).fingerprint
    assert all(store.get(key) == data for key, data in before.items())
    assert store.writes == 100 - (7 - len(before))  # finished shards were not written again


def test_another_text_into_the_same_folder_is_refused() -> None:
    store = MemoryStore()
    prepare(store)
    with pytest.raises(DatasetChangedError, match=r"tokens-00000\.parquet holds other tokens"):
        prepare(store, TEXT[::-1])
    with pytest.raises(DatasetChangedError, match="127 rows"):
        prepare(store, TEXT[: 25 * 16 + 1])  # equal first shard, fewer shards


def flip(store: MemoryStore, key: str, at: int) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 0x10
    store.put(key, bytes(data))


def read_or_refuse(store: MemoryStore) -> list[int] | str:
    """All tokens, or the file that was refused."""
    try:
        return all_tokens(TokenDataset.open(store))
    except CorruptShardError as error:
        return str(error.file)


def test_every_flipped_byte_of_a_shard_is_refused_or_harmless() -> None:
    store = MemoryStore()
    prepare(store)
    key = "tokens-00001.parquet"
    clean, expected = store.get(key), all_tokens(TokenDataset.open(store))
    outcomes = []
    positions = range(0, len(clean), 9)
    for at in positions:
        flip(store, key, at)
        outcomes.append(read_or_refuse(store))
        store.put(key, clean)
    refused = outcomes.count(f"{store.url}/{key}")
    assert refused + outcomes.count(expected) == len(positions)  # never other tokens
    assert refused > len(positions) / 3


def test_a_page_that_is_valid_but_not_ours_is_refused() -> None:
    store, other = MemoryStore(), MemoryStore()
    prepare(store)
    prepare(other, TEXT[::-1])
    key = "tokens-00000.parquet"
    theirs = other.get(key)
    manifest = TokenManifest.from_bytes(store.get("manifest.json"))
    if len(theirs) == manifest.files[0].num_bytes:
        store.put(key, theirs)
        with pytest.raises(CorruptShardError, match="checksum of the manifest"):
            TokenDataset.open(store).read(0, np.array([0]))
    else:
        store.put(key, theirs)
        with pytest.raises(CorruptShardError, match="bytes, not"):
            TokenDataset.open(store)


def test_missing_and_short_files_are_named() -> None:
    store = MemoryStore()
    prepare(store)
    store.put("tokens-00002.parquet", store.get("tokens-00002.parquet")[:-1])
    with pytest.raises(CorruptShardError, match=r"tokens-00002\.parquet .* bytes, not"):
        TokenDataset.open(store)
    store.delete("tokens-00002.parquet")
    with pytest.raises(CorruptShardError, match=r"tokens-00002\.parquet .*missing"):
        TokenDataset.open(store)


BAD_MANIFESTS = [
    (b"", "not a token manifest"),
    (b"[]", "not a token manifest"),
    (b'{"kind":"tokens","fingerprint":"","files":[]}', "not a token manifest"),
]


@pytest.mark.parametrize(("data", "message"), BAD_MANIFESTS)
def test_garbage_manifests_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TokenManifest.from_bytes(data)


def test_an_altered_manifest_is_refused() -> None:
    data = prepare(MemoryStore()).to_bytes()
    assert TokenManifest.from_bytes(data).to_bytes() == data
    with pytest.raises(DataError, match="altered"):
        TokenManifest.from_bytes(data.replace(b'"block_len":16', b'"block_len":15'))
    with pytest.raises(DataError, match="kind 'table'"):
        TokenManifest.from_bytes(data.replace(b'"kind":"tokens"', b'"kind":"table"'))


def test_one_ranged_read_for_a_row_group_and_none_once_cached() -> None:
    store = CountingStore()
    prepare(store)
    data = TokenDataset.open(store)
    data.read(0, np.array([0]))
    store.ranges.clear()
    for _ in range(3):
        data.read(1, np.array([0]))  # the footer is known from block 0
    assert len(store.ranges) == 1


def test_a_store_that_is_down_is_no_corruption() -> None:
    store = CountingStore()
    prepare(store)
    data = TokenDataset.open(store)
    store.down = True
    with pytest.raises(StoreUnavailableError):
        data.read(0, np.array([0]))
    store.down = False
    assert data.read(0, np.array([0])).shape == (1, 17)  # a failed read is not remembered


def block(number: int) -> Columns:
    return {"a": np.full(100, number, np.uint8)}


def test_cache_keeps_its_budget() -> None:
    loads: list[int] = []

    def load(number: int) -> Columns:
        loads.append(number)
        return block(number)

    cache = BlockCache(load, 250)
    for number in (0, 1, 0, 2, 0, 1):  # 1 is the oldest when 2 comes
        assert cache.get(number)["a"][0] == number
        assert cache.used_bytes <= 250
    assert loads == [0, 1, 2, 1]
    assert BlockCache(load, 50).get(3)["a"][0] == 3  # larger than the budget: not kept


def test_cache_loads_once_for_many_threads() -> None:
    loads: list[int] = []
    release = threading.Event()

    def load(number: int) -> Columns:
        loads.append(number)
        release.wait(5)
        return block(number)

    cache = BlockCache(load, 1000)
    threads = [threading.Thread(target=cache.get, args=(7,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    release.set()
    for thread in threads:
        thread.join()
    assert loads == [7]


def test_corpus_is_the_library_without_its_tests() -> None:
    paths = stdlib_paths()
    names = [path.name for path in paths]
    assert len(paths) > 500 and paths == stdlib_paths()
    assert "dataclasses.py" in names
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:]) for path in paths)
    assert not any(name.startswith("_sysconfigdata") for name in names)
