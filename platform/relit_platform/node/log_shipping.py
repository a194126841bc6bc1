"""Workers' log files, shipped to the run directory while they grow.

Segment n of `logs/<worker_id>/` is bytes [n * SEGMENT_BYTES, ...) of the file, put again until it
is full: where to go on after a restart follows from the number of segments that are there.
"""

from __future__ import annotations

import os

from relit_platform.errors import UsageError
from relit_platform.node.paths import check_name
from relit_storage.errors import StoreError
from relit_storage.stores.protocol import ObjectStore

SEGMENT_BYTES = 256 << 10
MAX_BYTES = 64 << 20
SEGMENTS_PER_ROUND = 32  # of one file, so that a flood does not starve the other files
SUFFIX = ".log"


class LogShipper:
    """Ships all `<worker_id>.log` of a folder. One thread calls `ship`."""

    def __init__(self, folder: str, store: ObjectStore) -> None:
        self._folder = folder
        self._store = store
        self._shipped: dict[str, int] = {}  # bytes by worker id

    def ship(self) -> int:
        """Put what is new; answers how many files failed this time (they stay due)."""
        failed = 0
        for name in sorted(os.listdir(self._folder)):
            if not name.endswith(SUFFIX):
                continue
            worker_id = name[: -len(SUFFIX)]
            try:
                check_name(worker_id)
                self._ship_file(worker_id, os.path.join(self._folder, name))
            except (StoreError, OSError, UsageError):
                failed += 1
        return failed

    def _ship_file(self, worker_id: str, path: str) -> None:
        size = min(os.stat(path).st_size, MAX_BYTES + 1)
        shipped = self._shipped.get(worker_id)
        if shipped is None:
            shipped = self._shipped_before(worker_id)
        with open(path, "rb") as file:
            for _ in range(SEGMENTS_PER_ROUND):
                if shipped >= size:
                    break
                shipped = self._ship_segment(worker_id, file.fileno(), shipped)
                self._shipped[worker_id] = shipped

    def _ship_segment(self, worker_id: str, fd: int, shipped: int) -> int:
        number = shipped // SEGMENT_BYTES
        start = number * SEGMENT_BYTES
        if start >= MAX_BYTES:
            note = f"\n[relit: this worker's log is cut at {MAX_BYTES} bytes]\n"
            self._store.put(segment_key(worker_id, number), note.encode())
            return MAX_BYTES + 1
        data = os.pread(fd, SEGMENT_BYTES, start)
        self._store.put(segment_key(worker_id, number), data)
        return start + len(data)

    def _shipped_before(self, worker_id: str) -> int:
        segments = len(self._store.list(f"logs/{worker_id}/"))
        return max(0, segments - 1) * SEGMENT_BYTES


def segment_key(worker_id: str, number: int) -> str:
    """Key of one segment of a worker's log below the run directory."""
    return f"logs/{worker_id}/{number:06d}.log"
