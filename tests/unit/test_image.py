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


# ---- pieces ----

PIECES = [
    TensorSpec("rows", "F32", (2, 3), (5, 3), (3, 0)),
    TensorSpec("columns", "BF16", (4, 1), (4, 2), (0, 1)),
    TensorSpec("whole", "F32", (2,)),
]


def listed(layout: ImageLayout) -> Any:
    return json.loads(layout.metadata["relit.pieces"])


def test_pieces_are_listed_in_the_metadata_and_come_back() -> None:
    layout = ImageLayout.plan(PIECES, {"run": "r1"})
    assert listed(layout) == {
        "columns": {"global_shape": [4, 2], "offsets": [0, 1]},
        "rows": {"global_shape": [5, 3], "offsets": [3, 0]},
    }
    image = layout.header + bytes(layout.total_bytes - layout.header_bytes)
    assert parse_header(image, len(image)) == layout
    assert ImageLayout.plan(PIECES[::-1], {"run": "r1"}) == layout
    index = {entry["name"]: entry for entry in layout.index()}
    assert (index["rows"]["global_shape"], index["rows"]["offsets"]) == ([5, 3], [3, 0])
    assert index["rows"]["byte_range"][1] - index["rows"]["byte_range"][0] == 24
    assert index["whole"].keys() == {"name", "dtype", "shape", "byte_range"}


def test_other_readers_see_the_pieces_as_tensors(tmp_path: Path) -> None:
    layout = ImageLayout.plan(PIECES, {})
    (tmp_path / "x").write_bytes(layout.header + bytes(layout.total_bytes - layout.header_bytes))
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "x").items()}
    assert shapes == {spec.name: spec.shape for spec in PIECES}


def test_a_piece_that_is_all_of_its_tensor_is_whole() -> None:
    spec = TensorSpec("a", "F32", (2, 3), global_shape=(2, 3), offsets=(0, 0))
    assert spec == TensorSpec("a", "F32", (2, 3)) and spec.whole
    assert (spec.full_shape, spec.origin) == ((2, 3), (0, 0))
    assert "relit.pieces" not in ImageLayout.plan([spec], {}).metadata
    piece = PIECES[0]
    assert not piece.whole and (piece.full_shape, piece.origin) == ((5, 3), (3, 0))


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("a", "F32", (2,), global_shape=(2,)),
        TensorSpec("a", "F32", (2,), offsets=(0,)),
        TensorSpec("a", "F32", (2,), (4,), (3,)),
        TensorSpec("a", "F32", (2,), (4,), (-1,)),
        TensorSpec("a", "F32", (2,), (4,), (0, 0)),
        TensorSpec("a", "F32", (2,), (4, 1), (0, 0)),
        TensorSpec("a", "F32", (0,), (4,), (0,)),
        TensorSpec("a", "F32", (), (1,), (0,)),
        TensorSpec("a", "F32", (1,), (2**62,), (0,)),
        TensorSpec("a", "F32", (1, 1), (-4, 4), (0, 0)),
    ],
)
def test_pieces_that_cannot_be_laid_out(spec: TensorSpec) -> None:
    assert spec.fault
    with pytest.raises(ValueError, match="'a'"):
        ImageLayout.plan([spec], {})


def test_the_key_of_the_listing_is_reserved() -> None:
    with pytest.raises(ValueError, match="reserved"):
        ImageLayout.plan([], {"relit.pieces": "{}"})


def with_listing(text: str) -> bytes:
    """An image of one tensor "a" of shape (2, 3), and this listing."""
    return encoded({"__metadata__": {"relit.pieces": text}, "a": entry(0, 24, shape=[2, 3])}, 24)


def place(global_shape: Any, offsets: Any) -> str:
    listing = {"a": {"global_shape": global_shape, "offsets": offsets}}
    return json.dumps(listing, separators=(",", ":"))


def test_a_legal_listing_is_read() -> None:
    data = with_listing(place([4, 3], [1, 0]))
    assert parse_header(data, len(data)).specs == (TensorSpec("a", "F32", (2, 3), (4, 3), (1, 0)),)


LISTINGS = {
    "nothing": "",
    "not JSON": "{,}",
    "a list": "[]",
    "null": "null",
    "a number": "1",
    "empty": "{}",
    "nested without end": "[" * 100_000,
    "NaN": '{"a":NaN}',
    "a name twice": place([4, 3], [1, 0])[:-1] + "," + place([4, 3], [1, 0])[1:],
    "spaces": place([4, 3], [1, 0]).replace(":", ": "),
    "another order": '{"a":{"offsets":[1,0],"global_shape":[4,3]}}',
    "an unknown name": place([4, 3], [1, 0]).replace('"a"', '"b"'),
    "a path": place([4, 3], [1, 0]).replace('"a"', '"../a"'),
    "a field too much": place([4, 3], [1, 0]).replace("}}", ',"x":1}}'),
    "a field missing": '{"a":{"offsets":[1,0]}}',
    "not a place": '{"a":[1,0]}',
    "whole": place([2, 3], [0, 0]),
    "whole elsewhere": place([2, 3], [1, 0]),
    "beyond": place([4, 3], [3, 0]),
    "larger than its tensor": place([1, 3], [0, 0]),
    "dimensions missing": place([4], [1]),
    "a dimension too much": place([4, 3, 1], [0, 0, 0]),
    "fewer offsets": place([4, 3], [1]),
    "negative": place([4, 3], [-1, 0]),
    "a negative size": place([-4, 3], [0, 0]),
    "a float": place([4.0, 3], [0, 0]),
    "a truth": place([4, 3], [True, 0]),
    "a string": place("43", "10"),
    "empty dimension": place([0, 3], [0, 0]),
    "overflow": place([2**62, 2**62], [0, 0]),
    "thousands of digits": place([10**4000, 3], [0, 0]),
    "an offset of thousands of digits": place([4, 3], [10**4000, 0]),
    "thousands of dimensions": place([1] * 5000, [0] * 5000),
}


@pytest.mark.parametrize("name", LISTINGS)
def test_listings_that_lie_are_refused(name: str) -> None:
    data = with_listing(LISTINGS[name])
    with pytest.raises(CorruptShardError, match=r"x\.safetensors") as refused:
        parse_header(data, len(data), "x.safetensors")
    assert len(str(refused.value)) < 1000


def test_a_listing_that_is_no_string_is_refused() -> None:
    data = encoded({"__metadata__": {"relit.pieces": {}}}, 0)
    with pytest.raises(CorruptShardError, match="map of strings"):
        parse_header(data, len(data))
