"""Shard images: what we lay out others can read, and what others wrote is not trusted."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from relit_storage.checkpoint.image import ALIGN_BYTES, ImageLayout, TensorSpec, parse_header
from relit_storage.errors import CorruptShardError

TENSORS = {
    "model.w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "model.b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "model.f8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    "optim.step": torch.tensor(7, dtype=torch.int64),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.zeros((0, 5), dtype=torch.float64),
}
NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.bool: "BOOL",
    torch.float64: "F64",
}
SPECS = [TensorSpec(name, NAMES[t.dtype], tuple(t.shape)) for name, t in TENSORS.items()]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def filled(layout: ImageLayout) -> bytearray:
    image = bytearray(layout.total_bytes)
    image[: layout.header_bytes] = layout.header
    for spec in layout.specs:
        data = flat(TENSORS[spec.name]).numpy().tobytes()
        image[layout.offset(spec.name) : layout.offset(spec.name) + len(data)] = data
    return image


def test_image_loads_with_safetensors(tmp_path: Path) -> None:
    layout = ImageLayout.plan(SPECS, {"run": "r1"})
    path = tmp_path / "image.safetensors"
    path.write_bytes(filled(layout))
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(flat(loaded[name]), flat(tensor))
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "run": "r1"}


def test_layout_is_canonical_aligned_and_without_holes() -> None:
    layout = ImageLayout.plan(SPECS, {"run": "r1"})
    shuffled = random.Random(1).sample(SPECS, len(SPECS))
    assert ImageLayout.plan(shuffled, {"run": "r1"}) == layout
    assert layout.header_bytes % ALIGN_BYTES == 0
    end = layout.header_bytes
    for entry in layout.index():
        begin, stop = entry["byte_range"]
        assert begin == end == layout.offset(entry["name"])
        end = stop
    assert end == layout.total_bytes


def test_parse_returns_the_layout_that_was_planned() -> None:
    layout = ImageLayout.plan(SPECS, {"run": "r1"})
    assert parse_header(memoryview(filled(layout)), layout.total_bytes) == layout


def test_parse_reads_what_safetensors_wrote() -> None:
    data = save(TENSORS, {"by": "them"})
    layout = parse_header(data, len(data))
    assert {spec.name for spec in layout.specs} == TENSORS.keys()
    assert layout.metadata == {"by": "them"}


def test_an_image_without_tensors_is_legal() -> None:
    layout = ImageLayout.plan([], {})
    assert parse_header(layout.header, layout.total_bytes) == layout


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def encoded(header: Any, data_bytes: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


BROKEN = {
    "short": b"\x01\x02",
    "header beyond the file": (1 << 20).to_bytes(8, "little") + b"{}",
    "header beyond the bound": (1 << 60).to_bytes(8, "little") + b"{}",
    "not JSON": encoded(b"{,}", 0),
    "not UTF-8": encoded(b'{"\xff": 1}', 0),
    "not an object": encoded(b"[]", 0),
    "nested without end": encoded(b"[" * 100_000, 0),
    "duplicate name": encoded(b'{"a": 1, "a": 1}', 0),
    "NaN": encoded(b'{"a": NaN}', 0),
    "hole": encoded({"a": entry(0, 4), "b": entry(8, 12)}, 12),
    "overlap": encoded({"a": entry(0, 8), "b": entry(4, 12)}, 12),
    "begins late": encoded({"a": entry(4, 8)}, 8),
    "ends before the file": encoded({"a": entry(0, 4)}, 5),
    "ends behind the file": encoded({"a": entry(0, 8)}, 4),
    "unknown dtype": encoded({"a": entry(0, 4, dtype="F33")}, 4),
    "dtype of another type": encoded({"a": entry(0, 4, dtype=["F32"])}, 4),
    "wrong size": encoded({"a": entry(0, 4, shape=[2])}, 4),
    "negative size": encoded({"a": entry(0, 4, shape=[-1, -1])}, 4),
    "float size": encoded({"a": entry(0, 4, shape=[1.0])}, 4),
    "boolean size": encoded({"a": entry(0, 4, shape=[True])}, 4),
    "three offsets": encoded({"a": {**entry(0, 4), "data_offsets": [0, 4, 4]}}, 4),
    "backwards": encoded({"a": {**entry(0, 4), "data_offsets": [4, 0]}}, 4),
    "extra field": encoded({"a": {**entry(0, 4), "x": 1}}, 4),
    "not a tensor": encoded({"a": 3}, 0),
    "metadata not strings": encoded({"__metadata__": {"a": 1}}, 0),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_headers_are_refused(name: str) -> None:
    with pytest.raises(CorruptShardError, match=r"x\.safetensors"):
        parse_header(BROKEN[name], len(BROKEN[name]), "x.safetensors")


def test_every_flipped_bit_of_a_header_is_refused_or_keeps_the_tiling() -> None:
    image = filled(ImageLayout.plan(SPECS, {}))
    rng = random.Random(7)
    for _ in range(2000):
        torn = bytearray(image)
        torn[rng.randrange(600)] ^= 1 << rng.randrange(8)
        try:
            layout = parse_header(memoryview(torn), len(torn))
        except CorruptShardError:
            continue
        assert sum(spec.num_bytes for spec in layout.specs) + layout.header_bytes == len(torn)


@pytest.mark.parametrize(
    "specs",
    [
        [TensorSpec("a", "F32", (1,)), TensorSpec("a", "F32", (1,))],
        [TensorSpec("__metadata__", "F32", (1,))],
        [TensorSpec("a", "F12", (1,))],
        [TensorSpec("a", "F32", (-1,))],
        [TensorSpec("\ud800", "F32", (1,))],
    ],
)
def test_specs_that_cannot_be_laid_out(specs: list[TensorSpec]) -> None:
    with pytest.raises(ValueError):
        ImageLayout.plan(specs, {})
