"""From this node's disk to the object tier: a persisted shard, image and extras, as they are.

The manager publishes the manifest there when every shard has arrived.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from relit_platform.facts import ShardPersisted
from relit_storage.checkpoint.checksum import checksum
from relit_storage.checkpoint.durable import read_file
from relit_storage.checkpoint.shard import ShardRef, verify_shard
from relit_storage.errors import CorruptShardError, StoreError
from relit_storage.stores.protocol import AbandonsUploads, ObjectStore

TRIES = 6
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0
STALE_UPLOAD_S = 86400.0  # no upload takes a day, and no clock is wrong by one


@dataclass(frozen=True, slots=True)
class Uploader:
    """Copies files into a store that is rooted at the run.

    pause waits that many seconds, or less when the agent closes: True then ends the tries.
    """

    root: str
    store: ObjectStore
    pause: Callable[[float], bool]
    rng: random.Random = field(default_factory=random.Random)

    def upload(self, record: ShardPersisted) -> None:
        """Put both files and read their sizes back; repeatable, because bytes are the same.

        Blocks for the store, at most TRIES times with full jitter between. Raises StoreError when
        the tries are used up, CorruptShardError if the files on disk are not what was persisted:
        damage is never carried on.
        """
        self._verify(record)
        for number in range(TRIES):
            try:
                self._put(record.file, record.num_bytes)
                self._put(record.extras_file, record.extras_bytes)
                return
            except StoreError:
                longest_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**number)
                if number == TRIES - 1 or self.pause(self.rng.uniform(0, longest_s)):
                    raise

    def sweep(self) -> None:
        """End this run's uploads that a killed agent left a day ago or before. Blocks.

        One that was killed since then is gone on with when its shard is uploaded again. An error
        of the store is let be: the next agent's sweep, or the bucket's own rule, does it.
        """
        if isinstance(self.store, AbandonsUploads):
            try:
                self.store.abandon_uploads("", STALE_UPLOAD_S)
            except StoreError:
                pass

    def _verify(self, record: ShardPersisted) -> None:
        ref = ShardRef(
            num_bytes=record.num_bytes,
            chunk_bytes=record.chunk_bytes,
            checksums=record.checksums,
        )
        verify_shard(os.path.join(self.root, record.file), ref)
        path = os.path.join(self.root, record.extras_file)
        try:
            found = checksum(read_file(path, record.extras_bytes))
        except OSError as error:
            raise CorruptShardError(file=path, reason=f"{error.strerror}") from error
        if found != record.extras_checksum:
            raise CorruptShardError(file=path, reason="extras fail their checksum")

    def _put(self, key: str, num_bytes: int) -> None:
        self.store.put_file(key, os.path.join(self.root, key))
        found = self.store.size(key)
        if found != num_bytes:
            cause = f"has {found} bytes after the upload of {num_bytes}"
            raise StoreError(url=self.store.url, key=key, cause=cause)
