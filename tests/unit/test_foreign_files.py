"""Safetensors files of unknown origin: what is whole is read, everything else is refused."""

from __future__ import annotations

import itertools
import json
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_headers
import pytest
import torch
from safetensors.torch import save_file

from relit_storage.checkpoint.checksum import chunk_checksums
from relit_storage.checkpoint.foreign_files import TensorFiles, find_tensor_files
from relit_storage.checkpoint.image import ImageLayout, TensorSpec
from relit_storage.checkpoint.image_writing import ChunkHasher, write_image
from relit_storage.errors import CorruptShardError

INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return {name: torch.randn(30, 50, generator=source) for name in "abcd"}


def sharded(folder: Path) -> Path:
    """Two files and their index, as transformers writes them."""
    found = tensors()
    where: dict[str, str] = {}
    for number, names in enumerate((("a", "b"), ("c", "d")), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: found[name] for name in names}, folder / file)
        where |= dict.fromkeys(names, file)
    index = folder / INDEX
    index.write_text(json.dumps({"metadata": {"total_size": 24000}, "weight_map": where}))
    return index


def content(path: Path) -> dict[str, bytes]:
    files = TensorFiles.open(str(path))
    try:
        return {name: b"".join(map(bytes, files.blocks(name))) for name in files.specs}
    finally:
        files.close()


def test_a_file_and_an_index_give_the_same_bytes(tmp_path: Path) -> None:
    wanted = {name: tensor.numpy().tobytes() for name, tensor in tensors().items()}
    assert content(sharded(tmp_path)) == wanted
    save_file(tensors(), tmp_path / "one.safetensors")
    assert content(tmp_path / "one.safetensors") == wanted


def test_links_are_followed_as_the_hubs_cache_needs(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    sharded(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert content(snapshot / INDEX).keys() == tensors().keys()


def test_tied_names_come_as_safetensors_writes_them(tmp_path: Path) -> None:
    metadata = {"format": "pt", "head": "a", "strange": "nothing", "b": "a"}
    save_file(tensors(), tmp_path / "x.safetensors", metadata=metadata)
    files = TensorFiles.open(str(tmp_path / "x.safetensors"))
    assert files.aliases == {"head": "a"}, "only other names for tensors that are there"
    files.close()


def test_files_that_are_open_cost_no_buffers(tmp_path: Path) -> None:
    where = {f"t{n}": f"x-{n}.safetensors" for n in range(12)}
    for name, file in where.items():
        save_file({name: torch.ones(4)}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    tracemalloc.start()
    try:
        found = content(tmp_path / INDEX)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 12 and peak_bytes < 2 << 20


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(CorruptShardError, match="holds no tensor"):
        content(tmp_path / "x.safetensors")


FOLDERS: list[tuple[list[str], str]] = [
    (["model.safetensors", INDEX, "other.safetensors"], "model.safetensors"),
    ([INDEX, "model-00001-of-00002.safetensors"], INDEX),
    (["weights.safetensors", "state.safetensors"], "weights.safetensors"),
    (["x.safetensors.index.json", "x-1.safetensors"], "x.safetensors.index.json"),
    (["readme.md"], ""),
]


@pytest.mark.parametrize(("names", "found"), FOLDERS)
def test_what_a_folder_offers(tmp_path: Path, names: list[str], found: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert find_tensor_files(str(tmp_path)) == (str(tmp_path / found) if found else "")


def test_a_folder_of_two_files_without_an_index_is_unclear(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(CorruptShardError, match=r"a\.safetensors, b\.safetensors"):
        find_tensor_files(str(tmp_path))


def in_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        data = json.loads((folder / INDEX).read_text())
        change(data)
        (folder / INDEX).write_text(json.dumps(data))

    return damage


def text(written: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(written)


def doubled(folder: Path) -> None:
    """The second file is a copy of the first, under its own name."""
    first = folder / "model-00001-of-00002.safetensors"
    (folder / "model-00002-of-00002.safetensors").write_bytes(first.read_bytes())


def shortened(folder: Path) -> None:
    os.truncate(folder / "model-00002-of-00002.safetensors", 9000)


def piece(folder: Path) -> None:
    """One rank's part of a sharded step is no checkpoint."""
    spec = TensorSpec("a", "F32", (2,), (4,), (0,))
    layout = ImageLayout.plan([spec], {})
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(layout.header + bytes(8))


HOSTILE: list[tuple[str, Callable[[Path], object], str]] = [
    (
        "a path upward",
        in_index(lambda d: d["weight_map"].update(a="../x.safetensors")),
        "own folder",
    ),
    ("a path", in_index(lambda d: d["weight_map"].update(a="/etc/x.safetensors")), "own folder"),
    ("another ending", in_index(lambda d: d["weight_map"].update(a="passwd")), "own folder"),
    ("a zero byte", in_index(lambda d: d["weight_map"].update(a="x\0.safetensors")), "own folder"),
    ("no name", in_index(lambda d: d["weight_map"].update(a=7)), "own folder"),
    ("a missing file", in_index(lambda d: d["weight_map"].update(a="no.safetensors")), "opened"),
    ("a missing tensor", in_index(lambda d: d["weight_map"].pop("b")), "does not say"),
    (
        "a tensor too many",
        in_index(lambda d: d["weight_map"].update(e="model-00001-of-00002.safetensors")),
        "'e' is not in",
    ),
    (
        "a tensor elsewhere",
        in_index(lambda d: d["weight_map"].update(a="model-00002-of-00002.safetensors")),
        "does not say",
    ),
    ("no map", in_index(lambda d: d.pop("weight_map")), "weight_map"),
    ("an empty map", in_index(lambda d: d["weight_map"].clear()), "weight_map"),
    ("no object", text("[]"), "not a JSON object"),
    ("a name twice", text('{"weight_map": {"a": "x", "a": "y"}}'), "twice"),
    ("no JSON", text('{"weight_map": NaN}'), "not parse"),
    ("deep", text("[" * 100_000), "not parse"),
    ("a tensor in two files", doubled, "in two of its files"),
    ("a short file", shortened, "tensors end at"),
    ("a piece", piece, "a piece of 'a'"),
]


@pytest.mark.parametrize(("damage", "words"), [h[1:] for h in HOSTILE], ids=[h[0] for h in HOSTILE])
def test_a_hostile_index_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    index = sharded(tmp_path)
    damage(tmp_path)
    with pytest.raises(CorruptShardError, match=words):
        content(index)


def test_no_hostile_header_is_read_wrong(tmp_path: Path) -> None:
    """Refused, or read as the header says, in memory of a block: never a crash."""
    save_file(tensors(), tmp_path / "x.safetensors")
    image, rng = (tmp_path / "x.safetensors").read_bytes(), random.Random(1)
    refused = 0
    for _ in range(300):
        (tmp_path / "y.safetensors").write_bytes(hostile_headers.draw(image, rng))
        try:
            content(tmp_path / "y.safetensors")
        except CorruptShardError:
            refused += 1
    assert 200 < refused < 300


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "x.safetensors")
    files = TensorFiles.open(str(tmp_path / "x.safetensors"))
    os.truncate(tmp_path / "x.safetensors", 2000)
    with pytest.raises(CorruptShardError, match="shorter than when it was opened"):
        list(files.blocks("d"))
    files.close()


@pytest.mark.parametrize("chunk_bytes", [1, 7, 4096, 10**6])
@pytest.mark.parametrize("cuts", [(), (5,), (1, 2, 3, 4095, 4096), (4096, 4096, 8192)])
def test_chunks_of_a_stream_hash_as_the_whole(chunk_bytes: int, cuts: tuple[int, ...]) -> None:
    data = random.Random(0).randbytes(9000)
    hasher = ChunkHasher(chunk_bytes)
    ends = [0, *cuts, len(data)]
    for begin, end in itertools.pairwise(ends):
        hasher.update(memoryview(data)[begin:end])
    assert hasher.finish() == chunk_checksums(data, chunk_bytes)


def test_an_image_is_written_as_it_was_laid_out(tmp_path: Path) -> None:
    found = {name: tensor.numpy().tobytes() for name, tensor in tensors().items()}
    specs = [TensorSpec(name, "F32", (30, 50)) for name in found]
    layout = ImageLayout.plan(specs, {"relit": "1"})
    path = tmp_path / "image"
    heard: list[int] = []

    def blocks(spec: TensorSpec) -> list[memoryview]:
        raw = memoryview(found[spec.name])
        return [raw[:1], raw[1:4000], raw[4000:]]

    ref = write_image(str(path), layout, blocks, 1000, heard.append)
    assert ref.checksums == chunk_checksums(path.read_bytes(), 1000)
    assert ref.num_bytes == path.stat().st_size and sum(heard) == 24000
    assert content_of(path) == found
    with pytest.raises(ValueError, match="'a' has 1 bytes more"):
        write_image(str(tmp_path / "b"), layout, lambda s: [memoryview(bytes(6001))], 1000)


def content_of(path: Path) -> dict[str, bytes]:
    named = path.rename(path.with_suffix(".safetensors"))
    return content(named)
