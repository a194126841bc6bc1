"""Manifests: one canonical form, exact coverage, and nothing else is accepted."""

import json
from typing import Any

import pytest

from relit_storage.checkpoint.image import ImageLayout, TensorSpec
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.errors import ManifestError
from relit_storage.run.layout import extras_key, shard_key

STEP, GENERATION = 120, 3


def shard(rank: int, world: int, specs: list[TensorSpec], step: int = STEP) -> dict[str, Any]:
    layout = ImageLayout.plan(specs, {})
    return {
        "step": step,
        "generation": GENERATION,
        "rank": rank,
        "world": world,
        "node_id": "node",
        "file": shard_key(step, GENERATION, rank),
        "num_bytes": layout.total_bytes,
        "chunk_bytes": 1 << 20,
        "checksums": ("00",),
        "extras_file": extras_key(step, GENERATION, rank),
        "extras_bytes": 2,
        "extras_checksum": "11",
        "tensors": layout.index(),
        "seconds": 0.1,
        "at_s": 1.0,
    }


SHARDS = [
    shard(1, 2, [TensorSpec("b", "BF16", (3,)), TensorSpec("e", "F32", (0,))]),
    shard(0, 2, [TensorSpec("a", "F32", (2, 2)), TensorSpec("s", "I64", ())]),
]


def make(shards: list[dict[str, Any]]) -> Manifest:
    return Manifest.from_shards(
        shards, run_id="r", epoch=1, cursor={"at": 7}, ids={"code": "c"}, created_at_s=5.5
    )


def test_round_trip_is_canonical_and_exact() -> None:
    manifest = make(SHARDS)
    data = manifest.to_bytes()
    assert Manifest.from_bytes(data) == manifest
    assert make(SHARDS[::-1]).to_bytes() == data
    assert b" " not in data and list(json.loads(data)) == sorted(json.loads(data))
    assert len(manifest.sha256) == 64 and manifest.shard(1).rank == 1
    assert [tensor.name for tensor in manifest.tensors] == ["a", "b", "e", "s"]


def test_a_world_larger_than_its_tensors_is_legal() -> None:
    make([shard(0, 2, [TensorSpec("a", "F32", (1,))]), shard(1, 2, [])])


@pytest.mark.parametrize(
    ("shards", "reason"),
    [
        ([], "several steps"),
        (SHARDS[:1], "ranks"),
        ([SHARDS[0], SHARDS[0]], "ranks"),
        ([SHARDS[0], shard(0, 2, [], step=121)], "several steps"),
        ([SHARDS[0], shard(0, 2, [TensorSpec("b", "BF16", (3,))])], "twice"),
        ([SHARDS[0], {**SHARDS[1], "num_bytes": 5000}], "tile"),
        ([SHARDS[0], {**SHARDS[1], "file": "../../x"}], "names"),
        ([SHARDS[0], {**SHARDS[1], "checksums": ()}], "checksums"),
    ],
)
def test_shards_that_do_not_make_a_step(shards: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        make(shards)


def edited(path: str, value: Any) -> bytes:
    """The manifest with one field replaced; path is like "tensors.0.dtype"."""
    data = json.loads(make(SHARDS).to_bytes())
    *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    target = data
    for key in parents:
        target = target[key]
    target[last] = value
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("v", 2),
        ("step", -1),
        ("step", True),
        ("step", 1.0),
        ("step", STEP + 1),
        ("generation", GENERATION + 1),
        ("world", 3),
        ("world", 10**12),  # not to be listed to find out
        ("world", 2**63),
        ("created_at_s", 10**400),
        ("tensors.0.global_shape", [10**4000, 10**4000]),
        ("tensors.0.global_shape", [2**62, 2**62]),
        ("tensors.0.global_shape", [1] * 65 + [2, 2]),
        ("unknown", 1),
        ("ids", {"code": 1}),
        ("tensors", {}),
        ("tensors.0.dtype", "F33"),
        ("tensors.0.name", 5),
        ("tensors.0.name", "b"),
        ("tensors.0.global_shape", [2, 3]),
        ("tensors.0.pieces", []),
        ("tensors.0.pieces.0.offsets", [0, 1]),
        ("tensors.0.pieces.0.shape", [1, 2]),
        ("tensors.0.pieces.0.byte_range", [0, 16]),
        ("tensors.0.pieces.0.byte_range", [4104, 4121]),
        ("tensors.0.pieces.0.byte_range", [4104]),
        ("tensors.0.pieces.0.rank", 1),
        ("tensors.0.pieces.0.extra", 1),
        ("shards.0.file", "/etc/passwd"),
        ("shards.0.num_bytes", 1),
        ("shards.0.chunk_bytes", 0),
        ("shards.0.checksums", ["00", "00"]),
        ("shards.0.checksums", [1]),
        ("shards.0.rank", 1),
    ],
)
def test_every_edit_is_refused(path: str, value: Any) -> None:
    with pytest.raises(ManifestError, match="which-file"):
        Manifest.from_bytes(edited(path, value), "which-file")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"null", b"[]", b"\xff", b"[" * 100_000, b'{"v":NaN}']
)
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(data)


def test_other_spellings_of_the_same_content_are_refused() -> None:
    data = make(SHARDS).to_bytes()
    for other in (data + b"\n", data.replace(b":", b": ", 1), data[:-1]):
        with pytest.raises(ManifestError):
            Manifest.from_bytes(other)


def test_every_truncation_is_refused() -> None:
    data = make(SHARDS).to_bytes()
    for length in range(len(data)):
        with pytest.raises(ManifestError):
            Manifest.from_bytes(data[:length])


def test_a_cursor_that_is_not_json_is_refused() -> None:
    manifest = make(SHARDS)
    with pytest.raises(ValueError):
        Manifest.from_shards(
            SHARDS, run_id="r", epoch=1, cursor=float("nan"), ids={}, created_at_s=0.0
        ).to_bytes()
    assert manifest.cursor == {"at": 7}
