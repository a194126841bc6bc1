"""An import is bit-equal, committed last, small in memory; what comes in is as it went out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import Driver, FakeJobs
from safetensors.torch import save_file
from saved_run import Saved, Tied, Trained, make_run
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from relit import importing
from relit.checkpoints import Checkpoints
from relit.cli.main import main
from relit.client import Client
from relit.errors import (
    BadInputError,
    ImportCommitError,
    RelitError,
    RunAliveError,
    RunFinishedError,
    SourceRefusedError,
)
from relit.exporting import Format, export, select
from relit.import_source import Naming, Source, bytes_to_check, open_source
from relit.importing import Imported, Target, import_checkpoint
from relit.run_state import IMPORTED
from relit_platform.control.object_tier import ObjectTier
from relit_platform.worker.state_tree import DTYPES, unflatten
from relit_storage.checkpoint.copy_reading import CopyReader
from relit_storage.checkpoint.verifying import verify_copy
from relit_storage.errors import FencedError, StoreError, StoreUnavailableError
from relit_storage.run.lease import Lease
from relit_storage.stores.local import LocalStore

STEP = 20
FORMATS: tuple[Format, ...] = ("hf", "dcp", "torch")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(store=str(tmp_path / "store"), transport=FakeJobs())


def bring(
    client: Client, path: Path, run: str = "in", names: tuple[str, ...] = (), **fields: Any
) -> Imported:
    target = Target(run_id=run, step=fields.pop("step", 0))
    done: list[int] = []
    with open_source(str(path), Naming.of(names)) as source:
        made = import_checkpoint(source, target, client, on_bytes=done.append, **fields)
    assert sum(done) == made.num_bytes == source.num_bytes
    return made


def reader_of(client: Client, run: str = "in", step: int = 0) -> CopyReader:
    checkpoints = Checkpoints(client.get(run).reader)
    for copy in checkpoints.copies(step):
        assert verify_copy(copy, deep=True) == []
    return checkpoints.readable(step)


def state_of(reader: CopyReader) -> dict[str, Any]:
    """All that a step holds, as a program would get it."""
    tensors: dict[str, Tensor] = {}
    for entry in reader.manifest.tensors:
        raw, dtype = reader.read(entry), DTYPES[entry.dtype]
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        tensors[entry.name] = flat.view(entry.global_shape)
    return unflatten(tensors, reader.extras(0)["objects"])


def assert_same(found: Any, wanted: Any, path: str = "") -> None:
    if isinstance(wanted, Tensor):
        assert found.dtype is wanted.dtype and found.shape == wanted.shape, path
        raw = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (found, wanted)]
        assert torch.equal(*raw), path
    elif isinstance(wanted, dict):
        assert set(found) == set(wanted), path
        for key, value in wanted.items():
            assert_same(found[key], value, f"{path}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted) and len(found) == len(wanted), path
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other, path)
    else:
        assert type(found) is type(wanted) and found == wanted, path


def trained_state(step: int = STEP) -> dict[str, Any]:
    trained = Trained(step)
    return {"model": dict(trained.model.state_dict()), "optimizer": trained.optimizer.state_dict()}


def out(reader: CopyReader, folder: Path, to: Format, limit: int = 10**9) -> None:
    export(reader, select(reader, weights_only=False), str(folder), to, max_file_bytes=limit)


def data_files(folder: Path) -> dict[str, bytes]:
    """What an export holds, but for where it comes from and torch's own bookkeeping."""
    skipped = {"relit.json", ".metadata"}
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in skipped}


@pytest.mark.parametrize("to", FORMATS)
def test_export_import_export_is_bit_equal(client: Client, tmp_path: Path, to: Format) -> None:
    saved = make_run(tmp_path)
    saved.commit([STEP])
    first = Checkpoints(saved.job.reader).readable(STEP)
    out(first, tmp_path / "one", to)
    made = bring(client, tmp_path / "one", step=7)
    assert (made.step, made.directory) == (7, f"{tmp_path / 'store'}/default/in")
    second = reader_of(client, step=7)
    assert_same(state_of(second), trained_state())
    out(second, tmp_path / "two", to)
    assert data_files(tmp_path / "two") == data_files(tmp_path / "one")
    if to == "hf":
        assert second.extras(0)["imported"] == {"format": "hf", "run_id": "r1", "step": STEP}


def test_sharded_weights_alone_come_back_as_they_went(client: Client, tmp_path: Path) -> None:
    saved = make_run(tmp_path)
    saved.commit([STEP])
    reader = Checkpoints(saved.job.reader).readable(STEP)
    selection = select(reader, weights_only=True)
    export(reader, selection, str(tmp_path / "one"), "hf", max_file_bytes=600)
    (tmp_path / "one" / "relit.json").unlink()  # as any other tool's
    bring(client, tmp_path / "one", names=("net",))
    second = reader_of(client)
    assert_same(state_of(second), {"net": trained_state()["model"]})
    export(
        second, select(second, weights_only=True), str(tmp_path / "two"), "hf", max_file_bytes=600
    )
    assert data_files(tmp_path / "two") == data_files(tmp_path / "one")


def every_dtype() -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(3)
    found = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8, generator=source)
        found[name.lower()] = raw.view(dtype).view(2, 3)
    odd = torch.arange(12.0).view(3, 4)
    return {**found, "scalar": torch.tensor(7), "empty": torch.empty(0, 4), "turned": odd.t()}


def write_torch(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


def write_legacy(path: Path, state: Any) -> Path:
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


def write_dcp(path: Path, state: Any) -> Path:
    folder = path.with_suffix("")
    save_dcp(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def write_hf(path: Path, state: Any) -> Path:
    save_file({k: v.contiguous() for k, v in state.items()}, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


@pytest.mark.parametrize("write", [write_torch, write_dcp, write_hf])
def test_every_dtype_is_bit_equal(
    client: Client, tmp_path: Path, write: Callable[[Path, Any], Path]
) -> None:
    bring(client, write(tmp_path / "source.pt", every_dtype()))
    assert_same(state_of(reader_of(client)), {"model": every_dtype()})


@pytest.mark.parametrize("write", [write_torch, write_legacy, write_dcp])
def test_states_by_name_keep_their_names_and_structure(
    client: Client, tmp_path: Path, write: Callable[[Path, Any], Path]
) -> None:
    state = {**trained_state(), "epoch": 3, "notes": {"betas": (0.9, 0.99), "tags": ["a", None]}}
    bring(client, write(tmp_path / "source.pt", state), names=("model=net",))
    state["net"] = state.pop("model")
    assert_same(state_of(reader_of(client)), state)


def test_a_fresh_optimizer_survives_a_dcp_folder(client: Client, tmp_path: Path) -> None:
    model = Tied()
    state = {"model": model.state_dict(), "opt": torch.optim.SGD(model.parameters()).state_dict()}
    bring(client, write_dcp(tmp_path / "source.pt", state))
    assert_same(state_of(reader_of(client))["opt"], state["opt"])


def test_tied_weights_of_a_torch_file_are_saved_once(client: Client, tmp_path: Path) -> None:
    made = bring(client, write_torch(tmp_path / "m.pt", Tied().state_dict()))
    assert made.tensors == len(Tied().state_dict()) - 1
    node = reader_of(client).extras(0)["objects"]["model"]
    assert node["head.weight"] == node["embed.weight"]


def test_an_import_is_small_in_memory_and_in_scratch_space(client: Client, tmp_path: Path) -> None:
    big = {f"w{n}": torch.arange(2 << 20, dtype=torch.int64) + n for n in range(4)}  # 64 MiB
    save_file(big, tmp_path / "big.safetensors")
    (tmp_path / "scratch").mkdir()
    largest: list[int] = []

    def look(count: int) -> None:
        files = [path.stat().st_size for path in (tmp_path / "scratch").rglob("shard")]
        largest.append(sum(files))

    tracemalloc.start()
    try:
        with open_source(str(tmp_path / "big.safetensors"), Naming()) as source:
            made = import_checkpoint(
                source,
                Target(run_id="in"),
                client,
                scratch=str(tmp_path / "scratch"),
                shard_bytes=20 << 20,
                on_bytes=look,
            )
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20
    assert made.shards == 4 and max(largest) <= (16 << 20) + 8192
    assert_same(state_of(reader_of(client)), {"model": big})


# ---- the run it goes into ----


def weights(tmp_path: Path, name: str = "w") -> Path:
    path = tmp_path / f"{name}.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}, path)
    return path


def test_an_imported_run_is_found_and_says_what_it_is(client: Client, tmp_path: Path) -> None:
    made = bring(client, weights(tmp_path))
    for job in (client.get("in"), client.get("i"), client.get(made.directory)):
        status = job.status()
        assert (job.id, status["state"]) == ("in", IMPORTED)
        with pytest.raises(RunFinishedError, match=IMPORTED):
            job.stop()  # it would hit the run that is submitted here one day
    assert [run["run_id"] for run in client.list()] == ["in"]
    bring(client, weights(tmp_path), step=5)
    assert [c["step"] for c in client.get("in").reader.checkpoints()] == [5, 0]


def test_a_step_is_never_imported_twice_or_below_another(client: Client, tmp_path: Path) -> None:
    bring(client, weights(tmp_path), step=5)
    for step in (0, 5):
        with pytest.raises(BadInputError, match="has step 5 already"):
            bring(client, weights(tmp_path), step=step)


def test_a_run_that_never_started_takes_an_import(client: Client, tmp_path: Path) -> None:
    saved = make_run(tmp_path)
    with pytest.raises(RunAliveError, match="PENDING"):
        bring(client, weights(tmp_path), run="r1")
    attempt = saved.job.reader.attempts()[0]
    old = json.dumps({**attempt, "at_s": 1.0}).encode()
    saved.store.put("attempts/000001.json", old)
    bring(client, weights(tmp_path), run="r1")
    assert saved.job.status()["state"] == "LOST", "a resume starts it"
    assert reader_of(client, "r1").manifest.run_id == "r1"


def test_a_run_that_has_started_or_is_driven_is_refused(client: Client, tmp_path: Path) -> None:
    saved = make_run(tmp_path)
    Driver(saved.store, "r1", 1.0).event("run.started", 1.0)
    saved.over()
    with pytest.raises(BadInputError, match="has started already"):
        bring(client, weights(tmp_path), run="r1")
    bring(client, weights(tmp_path))
    Lease.take(client.get("in").reader.store, "in", "someone", time.time(), 60.0)
    with pytest.raises(RunAliveError, match="import is refused"):
        bring(client, weights(tmp_path), step=9)


@pytest.mark.parametrize("run", ["../x", "a b", "", "x" * 81])
def test_a_run_id_is_a_plain_name(client: Client, tmp_path: Path, run: str) -> None:
    with pytest.raises(BadInputError, match="--run"):
        bring(client, weights(tmp_path), run=run)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_store_that_fails_leaves_no_step(
    client: Client, tmp_path: Path, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th write of the checkpoint fails; afterwards the same import succeeds."""
    calls = [0]
    for verb in ("put_file", "put", "put_if_absent"):
        monkeypatch.setattr(LocalStore, verb, failing(getattr(LocalStore, verb), calls, nth))
    with pytest.raises(RelitError, match="the disk is full") as caught:
        bring(client, weights(tmp_path), shard_bytes=1)
    commits = nth > 5  # the lease's epoch and two shards of two files come first
    assert isinstance(caught.value, ImportCommitError) is commits
    assert bool(step_files(tmp_path)) is commits, "whether it went through is not known then"
    assert not commits or re.search("may have gone.*ckpt ls.*ckpt gc", str(caught.value))
    monkeypatch.undo()
    assert bring(client, weights(tmp_path), shard_bytes=1).shards == 2
    assert set(state_of(reader_of(client))["model"]) == {"a", "b"}
    Checkpoints(client.get("in").reader).collect(None, lambda count: None)
    assert len(step_files(tmp_path)) == 5, "two shards and their JSON, and the manifest"


def step_files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "store").rglob("steps/*/*/*") if path.is_file()]


def failing(verb: Callable[..., Any], calls: list[int], nth: int) -> Callable[..., Any]:
    def call(self: LocalStore, key: str, *arguments: Any) -> Any:
        if "checkpoints/" in key:
            calls[0] += 1
            if calls[0] == nth:
                raise StoreError(url="x", key=key, cause="the disk is full")
        return verb(self, key, *arguments)

    return call


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (StoreUnavailableError(url="x", key="log", cause="no answer"), ImportCommitError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_what_may_be_committed_is_never_deleted(
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    raised: type[BaseException],
) -> None:
    commit = ObjectTier.commit

    def unheard(self: ObjectTier, *arguments: Any) -> None:
        commit(self, *arguments)
        raise fault

    monkeypatch.setattr(ObjectTier, "commit", unheard)
    with pytest.raises(raised):
        bring(client, weights(tmp_path))
    assert set(state_of(reader_of(client))["model"]) == {"a", "b"}


def test_a_lease_that_cannot_be_released_hides_no_commit(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: Lease, now: float) -> None:
        raise StoreUnavailableError(url="x", key="lease", cause="no answer")

    monkeypatch.setattr(Lease, "release", lost)
    assert bring(client, weights(tmp_path)).step == 0
    assert set(state_of(reader_of(client))["model"]) == {"a", "b"}


def test_a_lost_lease_commits_nothing(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody whose clock is ahead takes over while a shard is on its way."""
    put_file = LocalStore.put_file

    def overtaken(self: LocalStore, key: str, path: str) -> None:
        put_file(self, key, path)
        Lease.take(client.get("in").reader.store, "in", "someone", time.time() + 99.0, 60.0)

    monkeypatch.setattr(LocalStore, "put_file", overtaken)
    with pytest.raises(FencedError, match="lease epoch 1 is over"):
        bring(client, weights(tmp_path))
    assert client.get("in").reader.checkpoints() == [] and step_files(tmp_path) == []


def test_a_damaged_source_leaves_nothing(client: Client, tmp_path: Path) -> None:
    path = weights(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(SourceRefusedError, match="shorter"))
        source = stack.enter_context(open_source(str(path), Naming()))
        os.truncate(path, 8)
        import_checkpoint(source, Target(run_id="in"), client)
    assert client.get("in").reader.checkpoints() == []
    assert list((tmp_path / "store").rglob("steps/*/*/*")) == []


def test_no_room_for_a_shard_names_the_way_out(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(importing, "write_image", full)
    with pytest.raises(BadInputError, match=r"No space left.*--scratch"):
        bring(client, weights(tmp_path))


def test_a_scratch_folder_that_is_none_names_the_way_out(client: Client, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"none: No such file.*--scratch"):
        bring(client, weights(tmp_path), scratch=str(tmp_path / "none"))


def test_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SourceRefusedError, match="No such file"):
        bytes_to_check(str(tmp_path))
    with pytest.raises(SourceRefusedError, match="No such file"):
        look(tmp_path)


# ---- the command ----


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RELIT_STORE", str(tmp_path / "store"))
    path = str(weights(tmp_path))
    assert main(["ckpt", "import", path, "--run", "in", "--as", "net", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["run_id"], said["step"], said["objects"]) == ("in", 0, ["net"])
    assert (said["format"], said["tensors"], said["num_bytes"]) == ("hf", 2, 36)
    assert main(["ckpt", "import", path, "--run", "in", "--step", "3"]) == 0
    assert "step 3 of run in: 2 tensors, 36 B, of model" in capsys.readouterr().out
    assert main(["ckpt", "verify", "in", "--deep"]) == 0
    assert main(["ckpt", "import", path, "--run", "in"]) == 2
    assert main(["ckpt", "import", str(tmp_path / "none"), "--run", "x"]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert main(["status", "in"]) == 0
    assert "IMPORTED" in capsys.readouterr().out


def look(path: Path, *names: str) -> Source:
    with open_source(str(path), Naming.of(names)) as source:
        return source


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("a", "b"), "give one NAME"),
        (("a", "b=c"), "give one NAME"),
        (("a=b", "a=c"), "give one NAME"),
        (("",), "give one NAME"),
        (("=b",), "give one NAME"),
        (("x=y",), "no object 'x'"),
        (("one",), "rename by --as OLD=NEW"),
        (("model=optimizer",), "the same name"),
        (("model=$m",), "cannot have the name"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    tmp_path: Path, names: tuple[str, ...], words: str
) -> None:
    path = write_torch(tmp_path / "m.pt", {"model": Tied().state_dict(), "optimizer": {"n": 1}})
    with pytest.raises(BadInputError, match=re.escape(words)):
        look(path, *names)


def test_relits_own_export_names_its_objects_itself(tmp_path: Path) -> None:
    saved: Saved = make_run(tmp_path)
    saved.commit([STEP])
    out(Checkpoints(saved.job.reader).readable(STEP), tmp_path / "one", "hf")
    with pytest.raises(BadInputError, match="names the objects"):
        look(tmp_path / "one", "net")
