"""Reading many small objects: one round trip each, so eight at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from relit_storage.stores.protocol import ObjectStore

NUM_READERS = 8


def get_many(store: ObjectStore, keys: Sequence[str]) -> list[bytes]:
    """The objects in the order of `keys`; raises the first error of any. Blocks.

    All of them are in memory at once: for logs and records, never for shards.
    """
    if len(keys) <= 2:
        return [store.get(key) for key in keys]
    with ThreadPoolExecutor(min(NUM_READERS, len(keys)), "relit-read") as pool:
        return list(pool.map(store.get, keys))
