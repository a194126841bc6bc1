"""Manifests: one canonical form, exact coverage, and nothing else is accepted."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from relit_storage.checkpoint import manifest as manifest_module
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
        ([SHARDS[0], shard(0, 2, [TensorSpec("b", "BF16", (3,))])], "overlap"),
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
    return spelled(data)


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


# ---- sharded tensors ----


def rows(name: str, begin: int, count: int, of: int = 5, dtype: str = "F32") -> TensorSpec:
    """Rows of a tensor of shape (of, 2)."""
    return TensorSpec(name, dtype, (count, 2), (of, 2), (begin, 0))


def quarter(name: str, top: int, left: int) -> TensorSpec:
    """A quarter of a tensor of shape (3, 4), cut unevenly in the first dimension."""
    return TensorSpec(name, "BF16", (1 if top else 2, 2), (3, 4), (top, left))


SHARDED = [
    shard(0, 4, [rows("fsdp", 0, 2), quarter("mesh", 0, 0), TensorSpec("s", "I64", ())]),
    shard(1, 4, [rows("fsdp", 2, 2), quarter("mesh", 0, 2), rows("small", 0, 1, of=1)]),
    shard(2, 4, [rows("fsdp", 4, 1), quarter("mesh", 2, 0)]),
    shard(3, 4, [quarter("mesh", 2, 2)]),  # has no rows of "fsdp"
]


def test_pieces_of_all_ranks_make_whole_tensors() -> None:
    manifest = make(SHARDED)
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    assert {name: t.global_shape for name, t in tensors.items()} == {
        "fsdp": (5, 2),
        "mesh": (3, 4),
        "s": (),
        "small": (1, 2),
    }
    assert [(p.rank, p.offsets, p.shape) for p in tensors["fsdp"].pieces] == [
        (0, (0, 0), (2, 2)),
        (1, (2, 0), (2, 2)),
        (2, (4, 0), (1, 2)),
    ]
    assert len(tensors["mesh"].pieces) == 4 and len(tensors["small"].pieces) == 1
    data = manifest.to_bytes()
    assert Manifest.from_bytes(data) == manifest
    assert make(SHARDED[::-1]).to_bytes() == data


def of_two(one: list[TensorSpec], other: list[TensorSpec]) -> list[dict[str, Any]]:
    return [shard(0, 2, one), shard(1, 2, other)]


def without(key: str) -> list[dict[str, Any]]:
    """A rank's piece is acknowledged with one of its two fields."""
    shards = copy.deepcopy(of_two([rows("a", 0, 3)], [rows("a", 3, 2)]))
    del shards[1]["tensors"][0][key]
    return shards


@pytest.mark.parametrize(
    ("shards", "reason"),
    [
        (of_two([rows("a", 0, 3)], []), "hold 6 of 10"),
        (of_two([rows("a", 0, 3)], [rows("a", 4, 1)]), "hold 8 of 10"),
        (of_two([rows("a", 0, 3)], [rows("a", 2, 3)]), "overlap"),
        (of_two([rows("a", 0, 3)], [rows("a", 1, 2)]), "and a hole"),
        (of_two([rows("a", 0, 5)], [rows("a", 3, 2)]), "overlap"),
        (of_two([rows("a", 0, 3)], [rows("a", 3, 2, dtype="I32")]), "several kinds"),
        (of_two([rows("a", 0, 3)], [rows("a", 3, 2, of=6)]), "several kinds"),
        (without("offsets"), "without the other"),
        (without("global_shape"), "without the other"),
    ],
)
def test_pieces_that_make_no_tensor(shards: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        make(shards)


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all numbers in a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers_in(inner, (*path, key))
    elif type(value) is int:
        yield path


def test_every_changed_number_of_a_tensor_is_refused() -> None:
    good = json.loads(make(SHARDED).to_bytes())
    paths = list(numbers_in(good["tensors"], ("tensors",)))
    assert len(paths) > 60
    for *parents, last in paths:
        for change in (-1, 1, 2, 2**40):
            data = copy.deepcopy(good)
            target = data
            for key in parents:
                target = target[key]
            target[last] += change
            with pytest.raises(ManifestError):
                Manifest.from_bytes(spelled(data))


def spelled(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "pieces",
    [
        lambda p: p[::-1],
        lambda p: p[:2],
        lambda p: [*p, p[-1]],
        lambda p: [p[0], p[0], p[2]],
        lambda p: [{**p[0], "offsets": [0]}, *p[1:]],
        lambda p: [{**p[0], "shape": [2, 2, 1]}, *p[1:]],
        lambda p: [{**p[0], "offsets": p[1]["offsets"]}, {**p[1], "offsets": [1, 0]}, p[2]],
        lambda p: [{**p[0], "rank": 1, "file": p[1]["file"]}, *p[1:]],
        lambda p: [{**p[0], "file": p[1]["file"]}, *p[1:]],
    ],
)
def test_other_lists_of_pieces_are_refused(pieces: Any) -> None:
    data = json.loads(make(SHARDED).to_bytes())
    fsdp = data["tensors"][0]
    assert fsdp["name"] == "fsdp"
    fsdp["pieces"] = pieces(fsdp["pieces"])
    with pytest.raises(ManifestError):
        Manifest.from_bytes(spelled(data))


def test_a_manifest_of_many_pieces() -> None:
    """Sixty ranks with a row of sixty tensors each."""
    world, names = 60, [f"t{number:03d}" for number in range(60)]
    shards = [shard(r, world, [rows(name, r, 1, of=world) for name in names]) for r in range(world)]
    manifest = make(shards)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert sum(len(tensor.pieces) for tensor in manifest.tensors) == 3600


@pytest.mark.parametrize(
    ("step", "change", "reason"),
    [
        (2**63, {}, "beyond 64 bits"),
        (STEP, {"chunk_bytes": 0, "checksums": ()}, "no size"),
        (STEP, {"world": 0}, "ranks"),
    ],
)
def test_what_no_reader_would_take_is_not_made(
    step: int, change: dict[str, Any], reason: str
) -> None:
    made = shard(0, 1, [TensorSpec("a", "F32", (2, 2))], step=step)
    with pytest.raises(ManifestError, match=reason):
        make([made | change])


def test_a_manifest_beyond_the_limit_of_readers_is_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = len(make(SHARDED).to_bytes())
    monkeypatch.setattr(manifest_module, "MAX_MANIFEST_BYTES", size)
    make(SHARDED)
    monkeypatch.setattr(manifest_module, "MAX_MANIFEST_BYTES", size - 1)
    with pytest.raises(ManifestError, match="is the limit"):
        make(SHARDED)
