"""The demo's token shards: the standard library's own source, prepared once per content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from relit_storage.data.corpus import stdlib_paths
from relit_storage.data.token_manifest import MANIFEST_KEY
from relit_storage.data.token_writing import prepare_text
from relit_storage.data.tokens import TokenDataset

CONTEXT = 64
ROWS_PER_GROUP = 1024
HELD_OUT_EVERY = 20  # each 20th file is for validation
FORMAT = 1  # raise when the preparation below changes its output


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoData:
    """Where the prepared shards lie, and their fingerprints in one string."""

    train: Path
    held_out: Path
    fingerprint: str
    num_tokens: int


def prepare(folder: Path, say: Callable[[str], None]) -> DemoData:
    """Make the shards unless this very text has been prepared before. Blocks for some seconds.

    `say` is told in a sentence what happens. Safe to repeat and to interrupt: a half-made data
    set has no manifest and is completed by the next call.
    """
    files = stdlib_paths()
    place = folder / content_key(files)
    held_out = files[::HELD_OUT_EVERY]
    train = [path for number, path in enumerate(files) if number % HELD_OUT_EVERY]
    made = [_once(place / "train", train, say), _once(place / "held-out", held_out, say)]
    return DemoData(
        train=place / "train",
        held_out=place / "held-out",
        fingerprint="+".join(data.fingerprint for data in made),
        num_tokens=made[0].manifest.num_tokens,
    )


def content_key(files: Sequence[Path]) -> str:
    """A short name for the content of these files in this order, and for how we cut it."""
    digest = hashlib.sha256(f"{FORMAT} {CONTEXT} {ROWS_PER_GROUP} {HELD_OUT_EVERY}".encode())
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _once(place: Path, files: Sequence[Path], say: Callable[[str], None]) -> TokenDataset:
    if not (place / MANIFEST_KEY).exists():
        say(f"Preparing {len(files)} files of the Python standard library as {place.name} shards")
        prepare_text(files, str(place), block_len=CONTEXT, rows_per_group=ROWS_PER_GROUP)
    return TokenDataset.open(str(place))
