"""Every I/O call of a checkpoint's life is the last one: what is restored is whole and newest.

    disk      persist of both ranks, publish, drop of the older step: the power goes at the n-th
              system call, with what was not synced torn and, in one variant, gone
    object    upload of both ranks, commit, retirement of the older step: the process ends at the
              n-th call of the store, before it, after it, or in the middle of it; and the n-th
              system call of a store in a directory

For all n; then a second life does it again and must come to the end. What the first life was told
is done stays done. Beside it: test_persist (the n-th call fails, the process is killed there),
test_commit_log, test_lease and test_stores (each call of a store fails, tears or loses its answer),
test_adoption (each rename), test_slots (a rank killed in its copy), tests/sim (all together).
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import pytest
import stopped_run
from faulty_store import Fault, FaultyStore, every_call
from power_cut import VARIANTS, PowerCut, PowerCutError, Variant
from stopped_run import NODE, WORLD
from test_corruption import copy_tree, difference, folder_of, resume

from relit_platform.control.object_tier import ObjectTier
from relit_platform.facts import ShardPersisted
from relit_platform.node import disk_tier, persist
from relit_platform.node.disk_tier import DiskTier
from relit_platform.node.slots import Slot, create_slot
from relit_platform.node.uploads import Uploader
from relit_storage.checkpoint import durable
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.errors import CommitConflictError, StoreError
from relit_storage.stores import local
from relit_storage.stores.local import LocalStore
from relit_storage.stores.memory import MemoryStore
from relit_storage.stores.protocol import ObjectStore

OLD, NEW, GENERATION = 20, 40, 1
Moment = Literal["before", "after", "torn"]
MOMENTS: tuple[Moment, ...] = ("before", "after", "torn")
MAX_CALLS = 400
T = TypeVar("T")


@dataclass
class Told:
    """What a life was told is done."""

    published: bool = False
    committed: bool = False


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """Steps 20 and 40 on disk and in the object tier. In memory: the disk is not what is tested."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="relit-test-") as folder:
        stopped_run.save(Path(folder) / "run", (OLD, NEW))
        yield Path(folder) / "run"


@pytest.fixture
def root(template: Path) -> Path:
    """Where the run under test lies."""
    return template.with_name("copy")


def restored(root: Path) -> int:
    found = resume(root)
    assert not difference(found), difference(found)
    return found.step


# ---- disk ----


def slots_of(root: Path, folder: Path) -> list[Slot]:
    """The slots from which step 40 was saved, made again from its files."""
    slots = []
    for rank in range(WORLD):
        image = (folder / f"rank-{rank:05d}.safetensors").read_bytes()
        path = str(root / f"{rank}.slot")
        create_slot(path, len(image), 100)
        slot = Slot.open(path)
        slot.begin(GENERATION, NEW, rank, WORLD)
        slot.image[:] = image
        slot.set_extras((folder / f"rank-{rank:05d}.json").read_bytes())
        slot.commit()
        slots.append(slot)
    return slots


def before_the_persist(template: Path, root: Path) -> list[Slot]:
    """Step 20 is on disk, step 40 in the slots."""
    shutil.rmtree(root, ignore_errors=True)
    copy_tree(template / "disk", root / "disk")
    shutil.rmtree(folder_of(root, "disk", NEW).parent)
    return slots_of(root, folder_of(template, "disk", NEW))


def save_on_disk(root: Path, slots: list[Slot], told: Told) -> None:
    """What the agent does with step 40, and then with step 20."""
    folder = root / "disk" / "r" / NODE
    tier = DiskTier(str(folder), NODE)
    tier.clean()
    how = persist.Writing(root=str(folder), node_id=NODE, chunk_bytes=4096, clock=lambda: 1.0)
    shards = [persist.persist_slot(slot, how) for slot in slots]
    tier.publish(NEW, GENERATION, manifest_of(shards))
    told.published = True
    tier.drop(OLD, GENERATION)


def manifest_of(shards: list[ShardPersisted]) -> bytes:
    return Manifest.from_shards(
        [asdict(shard) for shard in shards],
        run_id="r",
        epoch=1,
        cursor={},
        ids={},
        created_at_s=1.0,
    ).to_bytes()


@contextmanager
def under(power: PowerCut, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The disk tier's system calls go through `power`."""
    with monkeypatch.context() as patch:
        for module in (durable, persist, disk_tier, shutil):
            patch.setattr(module, "os", power)
        yield


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_power_goes_at_every_call_of_the_disk_tier(
    template: Path, root: Path, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    for nth in range(1, MAX_CALLS):
        slots = before_the_persist(template, root)
        power, told = PowerCut(nth), Told()
        with under(power, monkeypatch):
            try:
                save_on_disk(root, slots, told)
            except PowerCutError:
                pass
        if not power.fired:
            break
        power.after(variant)
        found = restored(root)
        assert found == NEW or not told.published, f"call {nth} ({power.names[-1]}): {found}"
        save_on_disk(root, slots, told)
        assert restored(root) == NEW
        assert not folder_of(root, "disk", OLD).exists()
    assert 60 < nth < MAX_CALLS - 1


def test_a_process_ends_at_every_call_and_the_power_goes_after_the_next_one_published(
    template: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first life has made but not synced is there for the second, until the power goes."""
    for nth in range(1, MAX_CALLS):
        slots = before_the_persist(template, root)
        power, told = PowerCut(nth), Told()
        with under(power, monkeypatch):
            try:
                save_on_disk(root, slots, told)
            except PowerCutError:
                power.go_on()
                save_on_disk(root, slots, told)
        if power.nth:
            break
        power.after("lost")
        assert restored(root) == NEW, f"call {nth} ({power.names[nth - 1]})"
    assert 60 < nth < MAX_CALLS - 1


# ---- object tier ----


class EndOfProcessError(BaseException):
    """Stands for SIGKILL."""


@dataclass
class DyingStore:
    """A store whose caller ends at its `nth` call (1, 2, ...), at that moment of it."""

    inner: ObjectStore
    nth: int
    moment: Moment
    calls: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.inner.url

    def put(self, key: str, data: bytes) -> None:
        self._call("put", lambda: self.inner.put(key, data), key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._call("create", lambda: self.inner.put_if_absent(key, data), key, data)

    def put_file(self, key: str, path: str) -> None:
        data = Path(path).read_bytes()
        self._call("put_file", lambda: self.inner.put_file(key, path), key, data)

    def get(self, key: str) -> bytes:
        return self._call("get", lambda: self.inner.get(key))

    def get_range(self, key: str, start: int, num_bytes: int) -> bytes:
        return self._call("get_range", lambda: self.inner.get_range(key, start, num_bytes))

    def size(self, key: str) -> int | None:
        return self._call("size", lambda: self.inner.size(key))

    def list(self, prefix: str) -> list[str]:
        return self._call("list", lambda: self.inner.list(prefix))

    def delete(self, key: str) -> None:
        self._call("delete", lambda: self.inner.delete(key))

    def _call(self, verb: str, do: Callable[[], T], key: str = "", data: bytes = b"") -> T:
        self.calls.append(verb)
        if len(self.calls) < self.nth:
            return do()
        if len(self.calls) == self.nth:
            if self.moment == "after":
                do()
            elif self.moment == "torn" and data and self.inner.size(key) is None:
                self.inner.put(key, data[: len(data) // 2])
        raise EndOfProcessError


def save_in_object_tier(root: Path, store: ObjectStore, told: Told) -> None:
    """What agent and manager do with step 40, and then with step 20."""
    folder = root / "disk" / "r" / NODE
    uploader = Uploader(str(folder), store, pause=lambda seconds: False)
    for rank in range(WORLD):
        record = DiskTier(str(folder), NODE).record(NEW, GENERATION, rank)
        assert record is not None
        uploader.upload(record)
    tier = ObjectTier(store, CommitLog(store), time.time)
    manifest = (folder_of(root, "disk", NEW) / "manifest.json").read_bytes()
    tier.commit(1, NEW, GENERATION, manifest)
    told.committed = True
    tier.retire(1, OLD, GENERATION)


def before_the_save(template: Path, root: Path) -> LocalStore:
    """Step 40 is on disk, step 20 in the object tier."""
    shutil.rmtree(root, ignore_errors=True)
    for part in ("disk", "store"):
        copy_tree(template / part, root / part)
    shutil.rmtree(folder_of(root, "object", NEW).parent)
    sorted((root / "store" / "checkpoints" / "log").iterdir())[-1].unlink()
    return LocalStore(str(root / "store"))


def in_memory(store: ObjectStore) -> MemoryStore:
    copy = MemoryStore()
    for key in store.list(""):
        copy.put(key, store.get(key))
    return copy


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("ground", ["memory", "local"])
def test_the_process_ends_at_every_call_of_the_store(
    template: Path, root: Path, ground: str, moment: Moment
) -> None:
    for nth in range(1, MAX_CALLS):
        files = before_the_save(template, root)
        inner = in_memory(files) if ground == "memory" else files
        dying, told = DyingStore(inner, nth, moment), Told()
        try:
            save_in_object_tier(root, dying, told)
        except EndOfProcessError:
            pass
        if len(dying.calls) < nth:
            break
        check_object_tier(root, inner, told, f"call {nth} ({dying.calls[nth - 1]})")
        try:
            save_in_object_tier(root, inner, told)
        except CommitConflictError:  # half a manifest, which no store that passes the probe leaves
            assert moment == "torn"
            continue
        check_object_tier(root, inner, told, f"again after call {nth}")
        assert not [key for key in inner.list("") if f"{OLD:012d}" in key]
    assert 20 < nth < MAX_CALLS - 1


@pytest.mark.parametrize("fault", ["fail", "lost"])
def test_a_failed_call_or_a_lost_answer_costs_one_repetition(
    template: Path, root: Path, fault: Fault
) -> None:
    files = before_the_save(template, root)

    def scenario(store: FaultyStore) -> None:
        told = Told()
        try:
            save_in_object_tier(root, store, told)
        except StoreError:
            save_in_object_tier(root, store, told)
        check_object_tier(root, store.inner, told, f"call {store.nth}: {store.calls[-1]}")
        assert not [key for key in store.inner.list("") if f"{OLD:012d}" in key]

    assert every_call(lambda: in_memory(files), scenario, fault) > 20


def check_object_tier(root: Path, store: ObjectStore, told: Told, when: str) -> None:
    """The object tier alone, as another cluster would find it."""
    found = resume(root / "elsewhere", store)
    assert not difference(found), f"{when}: {difference(found)}"
    logged = [commit.step for commit in CommitLog(store).replay().commits]
    assert found.step == max(logged), f"{when}: {found.step} of {logged}"
    assert NEW in logged or not told.committed, when


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_power_goes_at_every_call_of_a_store_in_a_directory(
    template: Path, root: Path, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    for nth in range(1, MAX_CALLS):
        store = before_the_save(template, root)
        power, told = PowerCut(nth), Told()
        with monkeypatch.context() as patch:
            patch.setattr(local, "os", power)
            try:
                save_in_object_tier(root, store, told)
            except PowerCutError:
                pass
        if not power.fired:
            break
        power.after(variant)
        check_object_tier(root, store, told, f"call {nth} ({power.names[-1]})")
        save_in_object_tier(root, store, told)
        check_object_tier(root, store, told, f"again after call {nth}")
    assert 60 < nth < MAX_CALLS - 1
