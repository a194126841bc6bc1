"""What torch has written comes in without running it: refused by name, or read bit by bit."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corruptions import Evil
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from relit.dcp_import import nested, numbered
from relit.errors import PickleRefusedError, SourceRefusedError
from relit.import_source import Naming, Source, open_source
from relit.torch_import import load_slice

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DATA = "__0_0.distcp"


def read(path: Path) -> dict[str, bytes]:
    """Every byte of a source, by name."""
    with open_source(str(path), Naming()) as source:
        return contents(source)


def contents(source: Source) -> dict[str, bytes]:
    return {spec.name: b"".join(map(bytes, source.blocks(spec))) for spec in source.specs}


def state() -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(0)
    return {name: torch.randn(6, 5, generator=source) for name in "ab"}


def raw_of(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {f"model.{name}": tensor.numpy().tobytes() for name, tensor in tensors.items()}


# ---- files of torch.save ----


class Custom:
    """A class of somebody's training program."""


@pytest.mark.parametrize("zipped", [True, False])
def test_what_needs_pickle_is_refused_by_name_and_runs_nothing(
    tmp_path: Path, zipped: bool
) -> None:
    path = tmp_path / "m.pt"
    for bad, name in ((Evil(str(tmp_path / "sign")), "mkdir"), (Custom(), "Custom")):
        torch.save({**state(), "x": bad}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(PickleRefusedError, match=name) as caught:
            read(path)
        assert "never" in str(caught.value) and str(path) in str(caught.value)
    assert not (tmp_path / "sign").exists()


def copied(value: Any, levels: int) -> Any:
    """A list that holds another ten times, and so on: short in a file."""
    for _ in range(levels):
        value = [value] * 10
    return value


NOT_A_STATE: list[tuple[Any, str]] = [
    ([1, 2], "holds a list"),
    (torch.ones(3), "holds a Tensor"),
    ({1: torch.ones(3)}, "holds a dict"),
    ({"a": 1}, "holds no tensor"),
    ({"a": torch.ones(3), "b": {"c": torch.eye(3).to_sparse()}}, r"b\.c is a tensor of"),
    ({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.complex64)}, "complex64"),
    ({"a": torch.ones(3), "b": {"c": b"bytes"}}, r"b\.c is a builtins\.bytes"),
    ({"a": torch.ones(3), "b": torch.ones(1).expand(9)}, r"b is an expanded .*36 .* 4; .*clone"),
    ({"a": torch.ones(3), "b": {"c": torch.ones(3, device="meta")}}, r"b\.c lies on meta"),
    ({"a": torch.ones(3), "b": copied(0, 7)}, "more than 2000000 values"),
    ({"a": torch.ones(3), "b": copied("x" * 10**6, 3)}, "more than 2000000 values"),
]


@pytest.mark.parametrize(("saved", "words"), NOT_A_STATE)
def test_what_is_no_state_is_refused(tmp_path: Path, saved: Any, words: str) -> None:
    torch.save(saved, tmp_path / "m.pt")
    with pytest.raises(SourceRefusedError, match=words):
        read(tmp_path / "m.pt")


def test_short_reads_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read gives 2 GiB at most."""
    torch.save(state(), tmp_path / "m.pt")
    count, real = (tmp_path / "m.pt").stat().st_size, os.pread

    def load(short: Callable[[int, int, int], bytes]) -> Any:
        monkeypatch.setattr(os, "pread", short)
        with open(tmp_path / "m.pt", "rb") as file:
            return load_slice(file.fileno(), 0, count, "m.pt")

    found = load(lambda fd, count, at: real(fd, min(count, 100), at))
    assert raw_of(found) == raw_of(state())
    with pytest.raises(SourceRefusedError, match="ends at 300, shorter"):
        load(lambda fd, count, at: real(fd, 100, at) if at < 300 else b"")


def records(path: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        return [(info.filename, archive.read(info)) for info in archive.infolist()]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_that_hides_something_is_refused(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "m.pt")
    found = records(tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "twice.pt", "w") as archive:
        for name, data in [*found, found[-1]]:
            archive.writestr(name, data)
    with zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in found:
            archive.writestr(name, data)
    for file, words in (("twice.pt", "twice"), ("small.pt", "compressed")):
        with pytest.raises(SourceRefusedError, match=words):
            read(tmp_path / file)


def test_every_flipped_bit_of_a_tensor_is_seen(tmp_path: Path) -> None:
    """torch.load looks at no checksum: mapped or not, it would hand out what it finds."""
    torch.save(state(), tmp_path / "m.pt")
    good = (tmp_path / "m.pt").read_bytes()
    begin = good.index(state()["a"].numpy().tobytes())
    assert read(tmp_path / "m.pt") == raw_of(state())
    for at in range(begin, begin + 120, 7):
        (tmp_path / "m.pt").write_bytes(flipped(good, at))
        with pytest.raises(SourceRefusedError, match="CRC"):
            read(tmp_path / "m.pt")


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("zipped", [True, False])
def test_damage_is_refused_or_changes_nothing_that_is_kept(tmp_path: Path, zipped: bool) -> None:
    path, rng = tmp_path / "m.pt", random.Random(5)
    torch.save(state(), path, _use_new_zipfile_serialization=zipped)
    good, refused = path.read_bytes(), 0
    for _ in range(150):
        at = rng.randrange(len(good))
        cut = good[:at] if rng.random() < 0.3 else flipped(good, at)
        path.write_bytes(cut)
        try:
            found = read(path)
        except SourceRefusedError:
            refused += 1
        else:
            assert not zipped or found == raw_of(state()), at
    assert refused > 50


# ---- folders of torch.distributed.checkpoint ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tensor of two parts, a whole one and a value."""
    path = tmp_path / "dcp"
    path.mkdir()
    write(path, metadata(path))
    return path


def metadata(path: Path) -> Metadata:
    tensors, data = state(), io.BytesIO()
    places: dict[MetadataIndex, _StorageInfo] = {}

    def put(index: MetadataIndex, value: Any) -> None:
        begin = data.tell()
        torch.save(value, data)
        places[index] = _StorageInfo(DATA, begin, data.tell() - begin)

    put(MetadataIndex("m.b", (0, 0)), tensors["b"])
    put(MetadataIndex("m.a", (4, 0)), tensors["a"][4:].clone())
    put(MetadataIndex("m.a", (0, 0)), tensors["a"][:4].clone())
    put(MetadataIndex("n"), {"deep": [1, 2.5, None]})
    (path / DATA).write_bytes(data.getvalue())
    size = torch.Size((6, 5))

    def entry(*chunks: tuple[tuple[int, int], tuple[int, int]]) -> TensorStorageMetadata:
        boxes = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks]
        return TensorStorageMetadata(TensorProperties(torch.float32), size, boxes)

    items: dict[str, Any] = {
        "m.a": entry(((0, 0), (4, 5)), ((4, 0), (2, 5))),
        "m.b": entry(((0, 0), (6, 5))),
        "n": BytesStorageMetadata(),
    }
    paths = {"m.a": ("m", "a"), "m.b": ("m", "b"), "n": ("n",)}
    return Metadata(items, planner_data=paths, storage_data=places)


def write(path: Path, meta: object) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(meta))


def test_parts_become_whole_tensors(folder: Path) -> None:
    with open_source(str(folder), Naming()) as source:
        found, objects = contents(source), source.objects
    assert found == {f"m.{k}": t.numpy().tobytes() for k, t in state().items()}
    assert objects["n"] == {"deep": [1, 2.5, None]}


def test_the_metadata_can_name_nothing_that_runs(folder: Path, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    for bad in (Evil(str(sign)), {"x": Evil(str(sign))}, [os.system], [pickle.loads], Custom()):
        meta = metadata(folder)
        meta.planner_data = bad
        write(folder, meta)
        with pytest.raises(PickleRefusedError, match=r"mkdir|system|loads|Custom"):
            read(folder)
    assert not sign.exists()


def test_a_value_can_name_nothing_that_runs(folder: Path, tmp_path: Path) -> None:
    """torch's own loader unpickles these values without asking."""
    meta, data = metadata(folder), io.BytesIO()
    torch.save(Evil(str(tmp_path / "sign")), data)
    (folder / "evil.distcp").write_bytes(data.getvalue())
    place = _StorageInfo("evil.distcp", 0, len(data.getvalue()))
    meta.storage_data[MetadataIndex("n")] = place
    write(folder, meta)
    with pytest.raises(PickleRefusedError, match="mkdir"):
        read(folder)
    assert not (tmp_path / "sign").exists()


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize(
    ("part", "words"),
    [
        (torch.ones(1).expand(6, 5), "expanded view"),
        (torch.ones(6, 5, device="meta"), "lies on meta"),
        (torch.ones(6, 5).to_sparse(), "is a tensor of"),
    ],
)
def test_tensors_without_bytes_of_their_own_are_refused(
    folder: Path, part: Tensor, words: str, value: bool
) -> None:
    meta, data = metadata(folder), io.BytesIO()
    torch.save({"x": part} if value else part, data)
    (folder / "odd.distcp").write_bytes(data.getvalue())
    index = MetadataIndex("n") if value else MetadataIndex("m.b", (0, 0))
    meta.storage_data[index] = _StorageInfo("odd.distcp", 0, len(data.getvalue()))
    write(folder, meta)
    with pytest.raises(SourceRefusedError, match=words):
        read(folder)


def test_torchs_own_classes_stay_as_they_are(folder: Path) -> None:
    """A pickle may set attributes of what it names; here these are stand-ins of one load."""

    class Poison:
        def __reduce__(self) -> tuple[Any, ...]:
            return ChunkStorageMetadata, ((), ()), (None, {"sizes": "poison"})

    meta = metadata(folder)
    meta.planner_data = {"m.a": Poison()}
    (folder / ".metadata").write_bytes(pickle.dumps(meta))
    before = dict(vars(ChunkStorageMetadata))
    with pytest.raises(SourceRefusedError):
        read(folder)
    assert dict(vars(ChunkStorageMetadata)) == before


def place(file: Any = DATA, offset: Any = 0, length: Any = 10, **more: Any) -> Any:
    return lambda m: m.storage_data.update(
        {MetadataIndex("m.b", (0, 0)): _StorageInfo(file, offset, length, **more)}
    )


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], object]:
    made = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
    return lambda m: setattr(m.state_dict_metadata["m.a"], "chunks", made)


def paths(**changed: Any) -> Callable[[Any], object]:
    return lambda m: m.planner_data.update({k.replace("_", "."): v for k, v in changed.items()})


HOSTILE: list[tuple[str, Callable[[Any], object], str]] = [
    ("a path upward", place("../x"), "own folder"),
    ("a path", place("/etc/passwd"), "own folder"),
    ("a folder", place(".."), "own folder"),
    ("no name", place(7), "own folder"),
    ("a missing file", place("nothing"), "cannot be opened"),
    ("beyond the end", place(offset=2**62, length=2**62), "ends before"),
    ("a negative place", place(offset=-1), "none"),
    ("an absurd place", place(offset=10**5000), "LONG4"),
    ("no torch.save", place(length=30), "cannot load it|damaged"),
    ("compressed", place(transform_descriptors=["zstd"]), "another form"),
    ("a hole", chunks(((0, 0), (4, 5))), "not covered"),
    ("an overlap", chunks(((0, 0), (4, 5)), ((2, 0), (4, 5))), "overlap"),
    ("beyond the tensor", chunks(((0, 0), (4, 5)), ((4, 0), (9, 5))), "beyond"),
    ("other dimensions", chunks(((0,), (30,))), "dimensions"),
    ("no chunks", lambda m: setattr(m.state_dict_metadata["m.a"], "chunks", 3), "no shape"),
    (
        "an absurd shape",
        lambda m: setattr(m.state_dict_metadata["m.a"], "size", (2**62, 2**62)),
        "elements",
    ),
    (
        "a shape of text",
        lambda m: setattr(m.state_dict_metadata["m.a"], "size", ("6", "5")),
        "no shape",
    ),
    (
        "another shape",
        lambda m: setattr(m.state_dict_metadata["m.b"], "size", (5, 6)),
        "covered|beyond",
    ),
    (
        "another dtype",
        lambda m: setattr(
            m.state_dict_metadata["m.b"], "properties", TensorProperties(torch.int32)
        ),
        "holds no I32",
    ),
    (
        "a dtype of none",
        lambda m: setattr(
            m.state_dict_metadata["m.b"], "properties", TensorProperties(torch.complex64)
        ),
        "dtype",
    ),
    ("no place", lambda m: m.storage_data.pop(MetadataIndex("m.b", (0, 0))), "where"),
    ("no storage", lambda m: setattr(m, "storage_data", None), "nothing of files"),
    ("no tensors", lambda m: setattr(m, "state_dict_metadata", [1]), "no tensors"),
    ("a strange item", lambda m: m.state_dict_metadata.update(n=4), "where 'n' lies"),
    ("no path", lambda m: m.planner_data.pop("n"), "path of 'n'"),
    ("a path of nothing", paths(n=()), "path of 'n'"),
    ("a path of objects", paths(n=(1.5,)), "path of 'n'"),
    ("an endless list", paths(n=("m", 10**9)), "hole|hold"),
    ("a path through a value", paths(n=("m", "a", "x")), "through a value"),
    ("one path twice", paths(n=("m", "a")), "two values"),
    ("a long path", paths(n=("x",) * 100), "path of 'n'"),
]


@pytest.mark.parametrize(("change", "words"), [h[1:] for h in HOSTILE], ids=[h[0] for h in HOSTILE])
def test_hostile_metadata_is_refused(
    folder: Path, change: Callable[[Any], object], words: str
) -> None:
    meta = metadata(folder)
    change(meta)
    write(folder, meta)
    with pytest.raises(SourceRefusedError, match=words):
        read(folder)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x80\x05.",
        b"garbage",
        pickle.dumps({"a": 1}),
        b"\x96" + b"\xff" * 8,
        pickle.dumps([0] * 9)[:-5],
    ],
)
def test_what_is_no_metadata_is_refused(folder: Path, raw: bytes) -> None:
    (folder / ".metadata").write_bytes(raw)
    with pytest.raises(SourceRefusedError):
        read(folder)


def test_damage_to_a_folder_is_refused_or_changes_nothing(folder: Path) -> None:
    wanted, rng = read(folder), random.Random(7)
    files = {path: path.read_bytes() for path in (folder / DATA, folder / ".metadata")}
    refused = 0
    for _ in range(200):
        path = rng.choice(list(files))
        good = files[path]
        at = rng.randrange(len(good))
        path.write_bytes(good[:at] if rng.random() < 0.3 else flipped(good, at))
        try:
            found = read(folder)
        except SourceRefusedError:
            refused += 1
        else:
            assert path.name == ".metadata" or found == wanted
        path.write_bytes(good)
    assert refused > 100 and read(folder) == wanted


def test_torchs_own_writer_is_understood(tmp_path: Path) -> None:
    saved = {"model": state(), "steps": torch.tensor(3), "words": ["a", {"b": (1, 2)}]}
    save_dcp(saved, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    with open_source(str(tmp_path / "dcp"), Naming()) as source:
        found = contents(source)
    assert found == {**raw_of(state()), "steps": torch.tensor(3).numpy().tobytes()}
    assert source.objects["words"] == ["a", {"b": {"$t": [1, 2]}}]


NUMBERED = [
    (
        {"state": {"0": 1, "12": 2}, "param_groups": [{"params": [0]}, {"params": [12]}]},
        {0: 1, 12: 2},
    ),
    ({"state": {"w": 1}, "param_groups": [{"params": ["w"]}]}, {"w": 1}),
    ({"state": {"0": 1}, "param_groups": [{"params": ["0"]}]}, {"0": 1}),
    ({"param_groups": [{"params": [0], "lr": 1}]}, {}),
]


@pytest.mark.parametrize(("value", "wanted"), NUMBERED)
def test_parameters_of_an_optimizer_are_numbers_again(value: Any, wanted: Any) -> None:
    found = numbered({"opt": value, "other": {"0": 1}})
    assert found == {"opt": {**value, "state": wanted}, "other": {"0": 1}}
    assert next(iter(found["opt"])) == "state"


def test_paths_become_dictionaries_and_lists() -> None:
    steps = {"a": ("m", "x", 1), "b": ("m", "x", 0), "c": ("m", "y"), "d": ("n",)}
    values: dict[str, Any] = {"a": 1, "b": 2, "c": {"z": 3}, "d": 4}
    assert nested(values, steps, "f") == {"m": {"x": [2, 1], "y": {"z": 3}}, "n": 4}


def test_relit_json_that_lies_is_refused(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "model.safetensors")
    good = {"a": {"$T": "model.a"}, "b": {"$T": "model.b"}}
    lies: list[tuple[Any, str]] = [
        ({"model": {"a": {"$T": "model.a"}}}, "disagree about 'b'"),
        ({"model": {**good, "c": {"$T": "model.c"}}}, "disagree about 'c'"),
        ({"model": good, "o": {"n": [{"$T": "o.n"}]}}, "cannot be opened"),
        ({"model": {"a": {"$T": ["x"]}, "b": {"$T": "model.b"}}}, "parse|no name"),
        ({"model": {"a": {"$T": 4}, "b": {"$T": "model.b"}}}, "no name"),
    ]
    for objects, words in lies:
        about = {"format": "hf", "objects": objects}
        (tmp_path / "relit.json").write_text(json.dumps(about))
        with pytest.raises(SourceRefusedError, match=words):
            read(tmp_path)
    (tmp_path / "relit.json").write_text(json.dumps({"format": "hf", "objects": {"model": good}}))
    assert read(tmp_path) == raw_of(state())
