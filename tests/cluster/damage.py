"""Bits flipped in a real run's checkpoints, and what its formations say about them.

`tests/unit/test_damage.py` goes through every file and kind of damage without Ray.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relit.handle import JobHandle


def on_disk(root: Path, job: JobHandle, step: int) -> Path:
    """Where a step of a run below `root` lies on the disk tier."""
    [folder] = (root / "disk" / job.id).rglob(f"checkpoints/steps/{step:012d}/g*")
    return folder


def shards(root: Path, job: JobHandle, rank: int) -> list[Path]:
    """This rank's shard of every checkpoint, on both tiers."""
    name = f"rank-{rank:05d}.safetensors"
    found = [path for tier in ("disk", "store") for path in (root / tier).rglob(name)]
    return [path for path in found if job.id in path.parts]


def flip(path: Path) -> None:
    """Invert a bit in the middle of a file; twice is as it was."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def formations(job: JobHandle) -> list[dict[str, Any]]:
    """What each generation was formed from, in order."""
    return [event["data"] for event in job.events() if event["kind"] == "generation.formed"]


def refused_files(formed: dict[str, Any]) -> set[str]:
    """Names of the files that were passed over, each for a reason."""
    assert all(refusal["reason"] for refusal in formed["refusals"]), formed
    return {str(refusal["file"]).rpartition("/")[2] for refusal in formed["refusals"]}
