"""Thousands of damaged checkpoints: none is loaded wrong, none crashes, none runs code.

A run of two ranks with steps 20 and 40, on disk, in the object tier, or both; one to three
damages from a seed; then what a resume does. Whatever the damage:

    what is loaded is bit for bit a state that the run had, extras included
    a step that no damage has touched is restored, or a newer one
    nothing else comes out than a RelitError, and only if every step was touched
    no code of a file runs, nothing is written or connected to, memory stays bounded

Two more draw headers that lie and extras that are none, sealed with checksums that fit: there
only the parsers are in the way.

RELIT_CORRUPTIONS=10000 runs that many (`make fuzz`); a failure names the number of its seed,
and RELIT_CORRUPTION_FIRST begins there.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import corruptions
import hostile_headers
import pytest
import stopped_run
import torch
from cut_state import SPLITS
from saved_run import write_step
from stopped_run import NODE, state_of

from relit_platform.control.object_tier import ObjectTier
from relit_platform.facts import Json, NodeInventory
from relit_platform.machines.lineage import Lineage
from relit_platform.machines.restore import Nothing, plan_restore
from relit_platform.node.adoption import OWNER_FILE, adopt_orphans
from relit_platform.node.disk_tier import DiskTier
from relit_platform.node.fencing import Fence, load_fence
from relit_platform.worker.restore import load_plan
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.errors import CorruptShardError, NotRestorableError, RelitError
from relit_storage.run.layout import LOG_PREFIX
from relit_storage.stores.local import LocalStore
from relit_storage.stores.protocol import ObjectStore

COUNT = int(os.environ.get("RELIT_CORRUPTIONS", "250"))
HEADERS = max(50, COUNT // 5)
FIRST = int(os.environ.get("RELIT_CORRUPTION_FIRST", "0"))
STEPS = (20, 40)
TIERS = (("disk",), ("object",), ("disk", "object"))
MEMORY_BYTES = 2 << 30  # of addresses, on top of what the process has when a test begins
Extras = Callable[[int], dict[int, Json]]  # what each rank has saved beside the tensors of a step
CODE_EVENTS = {
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
}


@dataclass
class Restored:
    """What a resume holds in the end."""

    step: int
    tensors: dict[str, torch.Tensor]
    extras: dict[int, Json]


@dataclass
class Watch:
    """What the interpreter did while a checkpoint was read, by its own audit events."""

    on: bool = False
    seen: list[str] = field(default_factory=list)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in CODE_EVENTS:
            self.seen.append(f"{event} {args!r}")
        elif event == "open" and isinstance(args[0], str) and args[1] != "r" and args[2] & 3:
            self.seen.append(f"written {args[0]}")


WATCH = Watch()
sys.addaudithook(WATCH.hook)


@contextmanager
def bounded() -> Iterator[None]:
    """No more than MEMORY_BYTES of new addresses: what asks for more gets a MemoryError."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, before[1]))
    WATCH.on = True
    try:
        yield
    finally:
        WATCH.on = False
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """The undamaged run, in memory: what is tested is content, not the device."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="relit-test-") as folder:
        stopped_run.save(Path(folder) / "run", STEPS)
        yield Path(folder) / "run"


@pytest.fixture(scope="module")
def cut_template() -> Iterator[Path]:
    """The same run as four ranks of a 2x2 mesh save it: each has a quarter of every tensor."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="relit-test-") as folder:
        store = LocalStore(str(Path(folder) / "run" / "store"))
        log = CommitLog(store)
        log.append_epoch(1, at_s=1.0, holder="h")  # as every supervisor begins
        tier = ObjectTier(store, log, time.time)
        for step in STEPS:
            state: tuple[dict[str, torch.Tensor], Json] = (state_of(step), {})
            manifest = write_step(store, step, 1, state, SPLITS["mesh 2x2"], run_id="r")
            tier.commit(1, step, 1, manifest.to_bytes())
        yield Path(folder) / "run"


def copy_of(template: Path, tiers: tuple[str, ...]) -> Path:
    root = template.with_name("copy")
    shutil.rmtree(root, ignore_errors=True)
    if "disk" in tiers:
        copy_tree(template / "disk", root / "disk")
    if "object" in tiers:
        copy_tree(template / "store" / "checkpoints", root / "store" / "checkpoints")
    return root


def copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=shutil.copyfile)


def resume(root: Path, store: ObjectStore | None = None) -> Restored:
    """Plan, read, exclude what was refused, plan again: what the manager and the ranks do."""
    disk = DiskTier(str(root / "disk" / "r" / NODE), NODE)
    records, refused_records = disk.records()
    manifests, refused_manifests = disk.manifests()
    inventory = NodeInventory(
        node_id=NODE,
        memory=(),
        disk=tuple(records),
        manifests=tuple(manifests),
        fence=0,
        refusals=(*refused_records, *refused_manifests),
        disk_root=disk.root,
    )
    store = store or LocalStore(str(root / "store"))
    commits = ObjectTier(store, CommitLog(store), time.time).commits()
    excluded: list[dict[str, Any]] = []
    for _ in range(2 * len(STEPS) + 1):
        plan = plan_restore([inventory], commits, Lineage(), excluded, [NODE], "r")
        if isinstance(plan, Nothing):
            # Nothing that was ever published is left. The run's own history, which test_damage
            # has, then still says that there were checkpoints.
            left = [path for path in root.rglob("*") if path.name == "manifest.json"]
            assert not left and len(store.list(LOG_PREFIX)) <= 1, "from scratch, in silence"
            raise NotRestorableError(run="r", refusals=["nothing is left"])
        try:
            return Restored(plan.step, *load_plan(plan, store))
        except CorruptShardError as refused:
            excluded.append(refused.fields)
    raise AssertionError(f"the same files are tried again: {excluded}")


def attempt(root: Path, what: str) -> Restored | RelitError:
    """What a resume comes to; `what` was done to the run before."""
    WATCH.seen.clear()
    try:
        with bounded():
            outcome: Restored | RelitError = resume(root)
    except RelitError as error:
        outcome = error
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    assert not WATCH.seen, f"{what}: {WATCH.seen}"
    assert not (root / "EXECUTED").exists(), what
    if isinstance(outcome, RelitError):
        assert len(str(outcome)) < 20_000, what
    return outcome


def as_stopped(step: int) -> dict[int, Json]:
    """The extras of a `stopped_run`."""
    return {rank: {"step": step, "rank": rank} for rank in (0, 1)}


def as_cut(step: int) -> dict[int, Json]:
    """The extras of `cut_template`."""
    fixed: Json = {"v": 1, "step": step, "objects": {}, "rows": []}
    return {rank: {**fixed, "rank": rank} for rank in range(4)}


def difference(found: Restored, extras: Extras = as_stopped) -> str:
    """What is not as it was saved, or ""."""
    wanted = state_of(found.step) if found.step in STEPS else {}
    if found.tensors.keys() != wanted.keys():
        return f"step {found.step} with the tensors {sorted(found.tensors)}"
    wrong = [name for name, tensor in wanted.items() if not same(found.tensors[name], tensor)]
    if wrong or found.extras == extras(found.step):
        return f"{wrong}" if wrong else ""
    return f"{found.extras}"


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("tiers", TIERS)
def test_the_undamaged_run(template: Path, tiers: tuple[str, ...]) -> None:
    found = resume(copy_of(template, tiers))
    assert (found.step, difference(found)) == (40, "")


def test_the_undamaged_run_in_pieces(cut_template: Path) -> None:
    found = resume(copy_of(cut_template, ("object",)))
    assert (found.step, difference(found, as_cut)) == (40, "")


def test_any_damage(template: Path) -> None:
    """The bar: see above."""
    ends: dict[int, int] = dict.fromkeys((-1, *STEPS), 0)
    for number in range(FIRST, FIRST + COUNT):
        rng = random.Random(f"corruption {number}")
        tiers = TIERS[number % len(TIERS)]
        ends[step_after_damage(template, tiers, rng, f"seed {number}, {tiers}", as_stopped)] += 1
    assert COUNT < 100 or all(ends.values()), f"the damage is too mild or too hard: {ends}"


def test_any_damage_to_pieces(cut_template: Path) -> None:
    """The same of a state that four ranks have saved in pieces, in the object tier."""
    ends: dict[int, int] = dict.fromkeys((-1, *STEPS), 0)
    for number in range(FIRST, FIRST + COUNT // 3):
        rng = random.Random(f"piece {number}")
        ends[step_after_damage(cut_template, ("object",), rng, f"seed {number}", as_cut)] += 1
    assert COUNT < 100 or all(ends.values()), f"the damage is too mild or too hard: {ends}"


def step_after_damage(
    template: Path, tiers: tuple[str, ...], rng: random.Random, what: str, extras: Extras
) -> int:
    """Damage a run and resume it: the step, or -1 if nothing is whole; what else comes fails."""
    root = copy_of(template, tiers)
    files = corruptions.victims(root)
    done = [corruptions.apply(files, rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    what = f"{what}: {[told for told, _ in done]}"
    touched = {place for _, places in done for place in places}
    newest = max((s for s in STEPS for t in tiers if (t, s) not in touched), default=-1)
    found = attempt(root, what)
    if isinstance(found, RelitError):
        assert newest == -1, f"{what}: step {newest} was not touched, but {found}"
        return -1
    assert not difference(found, extras), f"{what}: {difference(found, extras)}"
    assert found.step >= newest, f"{what}: {found.step}, but {newest} was not touched"
    return found.step


def test_hostile_headers(template: Path) -> None:
    """Refused, and the step before restored; or legal after all, and then it tiles the file."""
    refused = 0
    for number in range(FIRST, FIRST + HEADERS):
        rng = random.Random(f"header {number}")
        tier = rng.choice(("disk", "object"))
        root = copy_of(template, (tier,))
        rank = rng.choice((0, 1))
        folder = folder_of(root, tier, 40)
        image = (folder / f"rank-{rank:05d}.safetensors").read_bytes()
        log = root / "store" / "checkpoints" / "log" if tier == "object" else None
        hostile_headers.seal(folder, log, rank, hostile_headers.draw(image, rng))
        found = attempt(root, f"seed {number} in the {tier} tier")
        assert isinstance(found, Restored), f"seed {number}: {found}"
        refused += found.step == 20
        if found.step == 20:
            assert not difference(found), f"seed {number}: {difference(found)}"
        else:
            num_bytes = sum(t.nbytes for t in found.tensors.values())
            assert num_bytes == sum(t.nbytes for t in state_of(40).values()), f"seed {number}"
    assert refused > HEADERS / 2


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"40",
        b'{"step": 20, "rank": 0}',
        b'{"step": "40", "rank": 0}',
        b'{"step": [40], "rank": 0}',
        b'{"step": 1e999, "rank": 0}',
        b'{"step": 40, "rank": 0',
        b"\xff\xfe\x00",
        b"\x80\x04cos\nsystem\n.",
        b"[" * 200_000,
        b'{"step": ' * 60_000,
        b'{"step": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_extras_that_are_none(template: Path, raw: bytes) -> None:
    root = copy_of(template, ("disk",))
    hostile_headers.extras_of(folder_of(root, "disk", 40), 0, raw)
    found = attempt(root, repr(raw[:24]))
    assert isinstance(found, Restored)
    assert (found.step, difference(found)) == (20, "")


def folder_of(root: Path, tier: str, step: int) -> Path:
    top = root / "store" if tier == "object" else root / "disk" / "r" / NODE
    return top / "checkpoints" / "steps" / f"{step:012d}" / "g000001"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"epoch":1}', corruptions.DEEP])
def test_a_damaged_fence_or_owner_keeps_no_node_from_starting(tmp_path: Path, raw: bytes) -> None:
    """The next epoch seals the node again; nobody's folder is taken over on such a word."""
    for text in (raw, b'{"epoch":-1,"generation":NaN}', b'{"pid":1e999,"host":1}'):
        (tmp_path / "fence.json").write_bytes(text)
        assert load_fence(str(tmp_path / "fence.json")) == Fence()
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / OWNER_FILE).write_bytes(text)
        (tmp_path / "ours").mkdir(exist_ok=True)
        assert adopt_orphans(str(tmp_path / "ours")) == []
