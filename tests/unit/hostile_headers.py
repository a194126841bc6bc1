"""Images whose headers lie, sealed as if they had been saved so: only the parser is in the way."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corruptions import edit

from relit_storage.checkpoint.checksum import checksum, chunk_checksums
from relit_storage.checkpoint.log_records import LogRecord
from relit_storage.checkpoint.manifest import Manifest

Header = dict[str, Any]
LENGTHS = (0, 1, 7, 2**31, 2**32, 100_000_000, 100_000_001, 2**63 - 1, 2**63, 2**64 - 9, 2**64 - 1)
NAMES = ("../../../etc/passwd", "/etc/passwd", "", "\x00", "a" * 10_000, "__class__", "model.é")
DTYPES = ("F7", "", "O", "f32", "F8_E8M0", "C64", "BOOL", "I64", "pickle", "__reduce__")
SHAPES: tuple[list[Any], ...] = (
    [2**62, 2**62],
    [10**4000, 10**4000],
    [0, 2**63],
    [0, 2**62, 2**62],
    [1] * 5000 + [30, 50],
    [2**31] * 3000,
    [-30, -50],
    [True, 1500],
    [30.0, 50],
    [],
)
OFFSETS: tuple[list[Any], ...] = (
    [0, 0],
    [6000, 0],
    [-1, 5999],
    [1, 6001],
    [0, 2**64],
    [10**4000, 10**4000 + 6000],
    [3000, 9000],
    [0.0, 6000],
    [0],
)


PLACES: tuple[list[Any], ...] = (
    [30, 50],
    [31, 50],
    [60, 50],
    [30, 0],
    [0, 0],
    [30],
    [2**62, 2**62],
    [10**4000, 1],
    [-30, 0],
    [True, False],
)


def draw(image: bytes, rng: random.Random) -> bytes:
    """The image with another header; tensors stay where they are."""
    size = 8 + int.from_bytes(image[:8], "little")
    header: Header = json.loads(image[8:size])
    if rng.random() < 0.1:
        return rng.choice(LENGTHS).to_bytes(8, "little") + image[8:]
    name = rng.choice([n for n in header if n != "__metadata__"])
    text = rng.choice(WAYS)(header, name, rng)
    if rng.random() < 0.5:
        text = text.ljust(size - 8)
    return len(text).to_bytes(8, "little") + text + image[size:]


def _rename(header: Header, name: str, rng: random.Random) -> bytes:
    header[rng.choice(NAMES)] = header.pop(name)
    return _text(header)


def _double(header: Header, name: str, rng: random.Random) -> bytes:
    entry = json.dumps({name: header[name]}).encode()
    return entry[:-1] + b"," + _text(header)[1:]


def _field(field: str, values: tuple[Any, ...]) -> Callable[[Header, str, random.Random], bytes]:
    def change(header: Header, name: str, rng: random.Random) -> bytes:
        header[name][field] = rng.choice(values)
        return _text(header)

    return change


def _overlap(header: Header, name: str, rng: random.Random) -> bytes:
    other = rng.choice([n for n in header if n != "__metadata__"])
    header["also"] = dict(header[other])
    return _text(header)


def _metadata(header: Header, name: str, rng: random.Random) -> bytes:
    header["__metadata__"] = rng.choice(([], 1, {"a": 1}, {"a": {}}, None, {"a": "b" * 100_000}))
    return _text(header)


def _listing(header: Header, name: str, rng: random.Random) -> bytes:
    """The tensor is said to be a piece of another one."""
    places = {"global_shape": rng.choice(PLACES), "offsets": rng.choice(PLACES)}
    listing = rng.choice(({name: places}, {name: places, "": places}, {}, [places], places))
    text = json.dumps(listing, sort_keys=True, separators=(",", ":"))
    header["__metadata__"] = {"relit.pieces": text}
    return _text(header)


def _any_edit(header: Header, name: str, rng: random.Random) -> bytes:
    return _text(edit(header, rng))


def _raw(header: Header, name: str, rng: random.Random) -> bytes:
    deep = b'{"a":' * 50_000
    return rng.choice(
        (deep, b"[" * 100_000, b"", b"NaN", b'{"a":NaN}', b"\xff\xfe", b"null", b"[]")
    )


def _text(header: Any) -> bytes:
    return json.dumps(header).encode()


WAYS: tuple[Callable[[Header, str, random.Random], bytes], ...] = (
    _rename,
    _double,
    _field("dtype", DTYPES),
    _field("shape", SHAPES),
    _field("data_offsets", OFFSETS),
    _overlap,
    _metadata,
    _listing,
    _any_edit,
    _raw,
)


def seal(folder: Path, log: Path | None, rank: int, image: bytes) -> None:
    """Put an image into a step as if it had been saved: checksums, record, manifest, commit."""
    file = folder / f"rank-{rank:05d}.safetensors"
    file.write_bytes(image)
    manifest_file = folder / "manifest.json"
    manifest = json.loads(manifest_file.read_bytes())
    entry = manifest["shards"][rank]
    entry["num_bytes"] = len(image)
    entry["checksums"] = list(chunk_checksums(image, entry["chunk_bytes"]))
    _fit(manifest, entry)
    raw = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    Manifest.from_bytes(raw)  # what is sealed is a legal manifest
    manifest_file.write_bytes(raw)
    record = file.with_suffix(".record")
    if record.exists():
        fields = json.loads(record.read_bytes())
        fields.update(num_bytes=len(image), checksums=entry["checksums"])
        record.write_bytes(json.dumps(fields, sort_keys=True).encode())
    if log is not None:
        _seal_commit(log, raw)


def _fit(manifest: dict[str, Any], entry: dict[str, Any]) -> None:
    """The shard's tensors in the manifest become one of bytes, so that any image can be tiled."""
    manifest["tensors"] = [
        t for t in manifest["tensors"] if t["pieces"][0]["file"] != entry["file"]
    ]
    size = entry["num_bytes"]
    piece = {"file": entry["file"], "rank": entry["rank"], "offsets": [0], "shape": [size]}
    whole = {"name": f"all.{entry['rank']}", "dtype": "U8", "global_shape": [size]}
    manifest["tensors"].append({**whole, "pieces": [{**piece, "byte_range": [0, size]}]})
    manifest["tensors"].sort(key=lambda t: t["name"])


def _seal_commit(log: Path, manifest: bytes) -> None:
    slot = sorted(log.iterdir())[-1]
    record = LogRecord.from_bytes(slot.read_bytes(), slot.name)
    sealed = LogRecord(
        kind="commit",
        epoch=record.epoch,
        nonce=record.nonce,
        at_s=record.at_s,
        seq=record.seq,
        generation=record.generation,
        step=record.step,
        manifest_key=record.manifest_key,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        manifest_bytes=len(manifest),
    )
    slot.write_bytes(sealed.to_bytes())


def extras_of(folder: Path, rank: int, raw: bytes) -> None:
    """Put extras into a step on disk as if they had been saved."""
    (folder / f"rank-{rank:05d}.json").write_bytes(raw)
    for file in (folder / "manifest.json", folder / f"rank-{rank:05d}.record"):
        fields = json.loads(file.read_bytes())
        entry = fields["shards"][rank] if "shards" in fields else fields
        entry.update(extras_bytes=len(raw), extras_checksum=checksum(raw))
        separators = (",", ":") if "shards" in fields else None
        file.write_text(json.dumps(fields, sort_keys=True, separators=separators))
