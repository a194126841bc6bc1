"""Exports are bit-equal in the readers they are for, whole or absent, and small in memory."""

from __future__ import annotations

import json
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_state import SPLITS
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from saved_run import Saved, Tied, Trained, make_run
from stopped_run import damage
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from relit.checkpoints import Checkpoints
from relit.errors import BadInputError
from relit.exporting import Format, export, hf_names, select
from relit_platform.worker.skeleton import is_weights
from relit_platform.worker.state_tree import DTYPES, flatten, unflatten
from relit_storage.checkpoint.copy_reading import CopyReader
from relit_storage.errors import CorruptShardError
from relit_storage.run.layout import manifest_key, shard_key

STEP = 20


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    run = make_run(tmp_path)
    run.commit([STEP])
    return run


@pytest.fixture
def reader(saved: Saved) -> CopyReader:
    return Checkpoints(saved.job.reader).readable(STEP)


def write(
    reader: CopyReader, folder: Path, to: Format, *, weights_only: bool = False, limit: int = 10**9
) -> list[str]:
    selection = select(reader, weights_only=weights_only)
    done: list[int] = []
    files = export(reader, selection, str(folder), to, max_file_bytes=limit, on_bytes=done.append)
    assert sum(done) == selection.num_bytes
    return files


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        assert found.dtype is wanted.dtype and torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


def test_hf_weights_load_by_their_own_names(reader: CopyReader, tmp_path: Path) -> None:
    files = write(reader, tmp_path / "hf", "hf", weights_only=True)
    assert files == ["model.safetensors", "relit.json"]
    wanted = dict(Trained(STEP).model.state_dict())
    found = load_file(tmp_path / "hf" / "model.safetensors")
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    del wanted["head.weight"]  # tied: safetensors' own convention names the one that is kept
    assert_same(dict(sorted(found.items())), dict(sorted(wanted.items())))


def test_hf_loads_into_the_model(reader: CopyReader, tmp_path: Path) -> None:
    write(reader, tmp_path / "hf", "hf")
    model = Tied()
    load_model(model, tmp_path / "hf" / "model.safetensors")
    assert_same(dict(model.state_dict()), dict(Trained(STEP).model.state_dict()))


def test_hf_with_everything_gives_the_optimizer_back(reader: CopyReader, tmp_path: Path) -> None:
    files = write(reader, tmp_path / "hf", "hf")
    assert files == ["model.safetensors", "relit.json", "state.safetensors"]
    about = json.loads((tmp_path / "hf" / "relit.json").read_text())
    assert (about["step"], about["run_id"], about["cursor"]) == (STEP, "r1", {"position": 160})
    rest = load_file(tmp_path / "hf" / "state.safetensors")
    found = unflatten(rest, {"optimizer": about["objects"]["optimizer"]})["optimizer"]
    assert_same(found, Trained(STEP).optimizer.state_dict())


def test_hf_splits_large_weights_as_transformers_does(reader: CopyReader, tmp_path: Path) -> None:
    files = write(reader, tmp_path / "hf", "hf", weights_only=True, limit=600)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    count = len(set(index["weight_map"].values()))
    assert count > 2 and f"model-00001-of-{count:05d}.safetensors" in files
    found: dict[str, Tensor] = {}
    for name, file in index["weight_map"].items():
        found[name] = load_file(tmp_path / "hf" / file)[name]
    total = sum(tensor.nbytes for tensor in found.values())
    assert index["metadata"]["total_size"] == total
    assert_same(found["embed.weight"], Trained(STEP).model.embed.weight.data)


def test_torch_loads_with_the_weights_only_loader(reader: CopyReader, tmp_path: Path) -> None:
    assert write(reader, tmp_path / "pt", "torch") == ["checkpoint.pt", "relit.json"]
    found = torch.load(tmp_path / "pt" / "checkpoint.pt", weights_only=True)
    trained = Trained(STEP)
    assert_same(found["model"], dict(trained.model.state_dict()))
    assert_same(found["optimizer"], trained.optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_loads_in_place(reader: CopyReader, tmp_path: Path) -> None:
    write(reader, tmp_path / "dcp", "dcp")
    trained, blank = Trained(STEP), Trained(1)
    target: dict[str, Any] = {
        "model": blank.model.state_dict(),
        "optimizer": blank.optimizer.state_dict(),
    }
    load(target, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert_same(dict(target["model"]), dict(trained.model.state_dict()))
    assert_same(target["optimizer"], trained.optimizer.state_dict())


def state_of_every_dtype() -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(3)
    found = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8, generator=source)
        found[name.lower()] = raw.view(dtype).view(2, 3)
    return {**found, "scalar": torch.tensor(7), "empty": torch.empty(0, 4)}


@pytest.mark.parametrize("to", ["hf", "torch"])
def test_every_dtype_is_bit_equal(tmp_path: Path, to: Format) -> None:
    saved, wanted = make_run(tmp_path), state_of_every_dtype()
    saved.commit([1], state=flatten({"model": (lambda: wanted, None)}))  # type: ignore[dict-item]
    write(Checkpoints(saved.job.reader).readable(1), tmp_path / "out", to)
    if to == "hf":
        found = load_file(tmp_path / "out" / "model.safetensors")
    else:
        found = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["model"]
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape
        assert same_bytes(found[name], tensor), name


def same_bytes(one: Tensor, other: Tensor) -> bool:
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*raw)


@pytest.mark.parametrize("split", ["whole", "7 ranks", "mesh 2x3"])
def test_an_export_holds_one_chunk_in_memory(tmp_path: Path, split: str) -> None:
    saved = make_run(tmp_path)
    big = torch.arange(2 << 20, dtype=torch.int64).view(2048, 1024)  # 16 MiB
    state = flatten({"model": (lambda: {"w": big}, None)})  # type: ignore[dict-item]
    saved.commit([1], state=state, split=SPLITS[split])
    reader = Checkpoints(saved.job.reader).readable(1)
    chunk_bytes = max(shard.chunk_bytes for shard in reader.manifest.shards)
    tracemalloc.start()
    try:
        write(reader, tmp_path / "out", "hf")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * chunk_bytes + (1 << 20)
    assert same_bytes(load_file(tmp_path / "out" / "model.safetensors")["w"], big)


@pytest.mark.parametrize("to", ["hf", "dcp", "torch"])
def test_a_flipped_bit_leaves_nothing_behind(saved: Saved, tmp_path: Path, to: Format) -> None:
    path = saved.path(shard_key(STEP, 1, 1))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reader = Checkpoints(saved.job.reader).readable(STEP)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CorruptShardError, match="checksum"):
        write(reader, tmp_path / "out", to)
    assert sorted(tmp_path.iterdir()) == before


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """Once it is called, no file of this process grows beyond 4 KB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda count: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("to", ["hf", "dcp", "torch"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_disk_that_is_full_midway_is_the_callers_to_fix(
    reader: CopyReader, tmp_path: Path, full_disk: Callable[[int], None], to: Format
) -> None:
    """Also where torch's own writers find out, whose errors are of other kinds."""
    selection, folder = select(reader, weights_only=False), str(tmp_path / "out")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BadInputError, match="out cannot be written: File too large"):
        export(reader, selection, folder, to, max_file_bytes=10**9, on_bytes=full_disk)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_is_the_callers_to_fix(reader: CopyReader, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match="out cannot be written"):
        write(reader, tmp_path / "file" / "out", "hf")


def test_damaged_extras_are_refused(saved: Saved, reader: CopyReader) -> None:
    damage(saved.path(f"{shard_key(STEP, 1, 0)[: -len('.safetensors')]}.json"), "flipped")
    with pytest.raises(CorruptShardError, match="extras"):
        select(reader, weights_only=False)


def test_a_folder_in_use_is_refused_and_an_empty_one_is_taken(
    reader: CopyReader, tmp_path: Path
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInputError, match="not an empty directory"):
        write(reader, tmp_path / "used", "hf")
    write(reader, tmp_path / "empty", "hf")
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "empty").iterdir()}
    assert len(modes) == 1, "whoever may read the weights may read what they are"


KINDS = [
    ({"a": {"$T": "model.a"}, "b.c": {"$T": "model.b.c"}}, True),
    ({"a": {"$T": "model.a"}, "x._extra_state": {"n": 1}}, True),
    ({"state": {"$d": [[0, {"exp_avg": {"$T": "o"}}]]}, "param_groups": []}, False),
    ({"last_epoch": 3}, False),
    ({}, False),
    ({"$T": "x"}, False),
    ([], False),
]


@pytest.mark.parametrize(("node", "weights"), KINDS)
def test_which_objects_are_weights(node: Any, weights: bool) -> None:
    assert is_weights(node) is weights


def test_two_tensors_never_get_one_name() -> None:
    node = {"$T": "x"}
    with pytest.raises(BadInputError, match=r"'a' and of 'a\.b'.*'a\.b\.c'.*--to torch"):
        hf_names({"a": {"b.c": node}, "a.b": {"c": {"$T": "y"}}})
    assert hf_names({"a": {"b": node}, "c": {"b": node}}) == ({"x": "a.b"}, {"c.b": "a.b"})


# ---- pieces ----


@pytest.fixture
def from_ranks(saved: Saved, tmp_path: Path) -> Callable[[str, Format], Path]:
    """Exports of the same state, saved by other ranks."""

    def run(split: str, to: Format) -> Path:
        step = 100 + list(SPLITS).index(split)
        if saved.store.size(manifest_key(step, 1)) is None:
            saved.commit([step], state=Trained(STEP).flatten(), split=SPLITS[split])
        folder = tmp_path / f"{to} {split}"
        write(Checkpoints(saved.job.reader).readable(step), folder, to, limit=600)
        return folder

    return run


def tensor_files(folder: Path) -> dict[str, bytes]:
    """Everything but relit.json, which names the step."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "relit.json"}


def test_files_are_the_same_whoever_saved_the_pieces(
    from_ranks: Callable[[str, Format], Path],
) -> None:
    wanted = tensor_files(from_ranks("whole", "hf"))
    assert len(wanted) > 3
    for split in list(SPLITS)[1:]:
        assert tensor_files(from_ranks(split, "hf")) == wanted, split


@pytest.mark.parametrize("split", ["7 ranks", "mesh 2x3", "any boxes"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_whole_tensors_of_pieces(
    from_ranks: Callable[[str, Format], Path], split: str
) -> None:
    trained, blank = Trained(STEP), Trained(1)
    found = torch.load(from_ranks(split, "torch") / "checkpoint.pt", weights_only=True)
    assert_same(found["model"], dict(trained.model.state_dict()))
    assert_same(found["optimizer"], trained.optimizer.state_dict())
    target: dict[str, Any] = {"model": blank.model.state_dict()}
    load(target, checkpoint_id=str(from_ranks(split, "dcp")), no_dist=True)
    assert_same(dict(target["model"]), dict(trained.model.state_dict()))


def test_a_flipped_bit_in_any_piece_leaves_nothing_behind(saved: Saved, tmp_path: Path) -> None:
    saved.commit([100], split=SPLITS["3 ranks"])
    damage(saved.path(shard_key(100, 1, 2)), "flipped")
    reader = Checkpoints(saved.job.reader).readable(100)
    with pytest.raises(CorruptShardError, match="checksum"):
        write(reader, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()
