"""What is over on a node: epochs and generations that may write here no more.

A worker, a persist or a publication of the past may still be on its way when a newer generation
has formed. What is older than the seal is refused, whoever sends it: an agent does not know the
line of history. The manager of the newest epoch does. A step that generations began with and that
no later one has saved again is older than the seal, and all there is: that manager vouches for it.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from relit_storage.checkpoint.durable import read_file, write_file
from relit_storage.checkpoint.manifest_schema import check_types
from relit_storage.errors import FencedError

MAX_FENCE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Fence:
    """What is over on this node: epochs below `epoch`, generations below `generation`."""

    epoch: int = 0
    generation: int = 0

    def raised(self, epoch: int, generation: int) -> Fence:
        """The fence after sealing; it never goes down. Raises FencedError for an older epoch."""
        self.check_epoch(epoch)
        return Fence(epoch, max(generation, self.generation))

    def check_epoch(self, epoch: int) -> None:
        """Raises FencedError for an older epoch."""
        if epoch < self.epoch:
            raise FencedError(what="epoch", ours=epoch, newest=self.epoch)


def load_fence(path: str) -> Fence:
    """The fence that was saved, or the lowest one if it is damaged, too.

    The next epoch seals the node again; a node that cannot start would lose all that it holds.
    """
    try:
        saved = json.loads(read_file(path, MAX_FENCE_BYTES))
        check_types(saved, {"epoch": int, "generation": int}, "fence")
    except (OSError, ValueError, RecursionError):
        return Fence()
    return Fence(saved["epoch"], saved["generation"])


def save_fence(path: str, fence: Fence) -> None:
    """Make the fence outlive this process and this machine's power."""
    data = json.dumps({"epoch": fence.epoch, "generation": fence.generation})
    write_file(path, [data.encode()])


class NodeFence:
    """The fence of one node, in its file. Thread-safe. failed hears of a disk that takes nothing:
    the fence holds all the same, until this process ends.
    """

    def __init__(self, path: str, failed: Callable[[Exception], None]) -> None:
        self._path = path
        self._failed = failed
        self._fence = Fence()
        self._saved = True
        self._vouched: frozenset[tuple[int, int]] = frozenset()
        self._lock = threading.Lock()

    @property
    def epoch(self) -> int:
        """The epoch at which this node is sealed."""
        return self._fence.epoch

    @property
    def generation(self) -> int:
        """Generations below are over."""
        return self._fence.generation

    def load(self) -> None:
        """Go on with what an earlier process has saved."""
        self._fence = load_fence(self._path)

    def seal(self, epoch: int, generation: int) -> None:
        """Raise the fence; nobody has a manager's word any more. FencedError for an older epoch."""
        with self._lock:
            fence = self._fence.raised(epoch, generation)
            self._vouched = frozenset()
            if fence == self._fence and self._saved:
                return
            self._fence = fence
            try:
                save_fence(self._path, fence)
                self._saved = True
            except OSError as error:
                self._saved = False
                self._failed(error)

    @contextlib.contextmanager
    def entering(self, epoch: int) -> Iterator[None]:
        """While it lasts the node is not sealed. FencedError if the epoch is over."""
        with self._lock:
            self._fence.check_epoch(epoch)
            yield

    def vouch(self, epoch: int, step: int, generation: int) -> None:
        """The manager of this epoch says that the step is on the line: `check` lets it pass until
        the next seal. FencedError if the epoch is over. One step at a time is enough.
        """
        with self.entering(epoch):
            self._vouched = frozenset({(step, generation)})

    def check(self, step: int, generation: int) -> None:
        """FencedError if the generation is over and no manager vouches for this step of it."""
        newest = self._fence.generation
        if generation < newest and (step, generation) not in self._vouched:
            raise FencedError(what="generation", ours=generation, newest=newest)
