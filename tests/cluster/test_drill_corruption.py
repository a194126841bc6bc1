"""Damaged checkpoints of a real run: the previous whole step, or a clear end. Never from scratch.

`tests/unit/test_damage.py` goes through every file and kind of damage without Ray.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import pytest
import shell

from relit.handle import JobHandle

pytestmark = pytest.mark.cluster

STEPS = 400


def folders(lab: Any, job: JobHandle, step: int) -> list[Path]:
    """Where a step lies: on the disk tier and in the object tier."""
    roots = [lab.root / "disk" / job.id, lab.root / "store" / job.reader.run_key]
    found = [folder for root in roots for folder in root.rglob(f"checkpoints/steps/{step:012d}/g*")]
    assert len(found) == 2, found
    return found


def flip(path: Path) -> None:
    """Invert a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def formations(job: JobHandle) -> list[dict[str, Any]]:
    return [event["data"] for event in job.events() if event["kind"] == "generation.formed"]


def test_damage_between_stop_and_resume(lab: Any, calm: dict[int, float]) -> None:
    job = lab.stoppable("damage", [150, 250], steps=STEPS)
    newest = lab.stop_held(job, 150)
    lab.leaks(job.id)  # waits for the supervisor's end
    on_disk, in_store = folders(lab, job, newest)
    flip(on_disk / "rank-00001.safetensors")
    (in_store / "manifest.json").unlink()
    job.resume()
    second = lab.stop_held(job, 250)
    restored = formations(job)[-1]
    assert restored["start_step"] == newest // 20 * 20 - (0 if newest % 20 else 20), restored
    refused = {str(r["file"]).rpartition("/")[2] for r in restored["refusals"]}
    assert {"rank-00001.safetensors", "manifest.json"} <= refused, restored
    assert all(r["reason"] for r in restored["refusals"])
    assert lab.leaks(job.id) == []

    no_checkpoint_is_whole(lab, job, second)

    job.resume()
    assert job.wait(timeout_s=harness.WAIT_S)["state"] == "SUCCEEDED", job.status()
    # A generation that was refused its state has begun a line of its own all the same: what is
    # newer than the oldest that was tried stays off the line, and is computed again.
    assert 0 < formations(job)[-1]["start_step"] <= second
    assert harness.losses(job) == harness.head(calm, STEPS)


def no_checkpoint_is_whole(lab: Any, job: JobHandle, step: int) -> None:
    """Every step is damaged, then made whole again: in between a resume ends with the reason."""
    damaged = [
        path
        for tier in ("disk", "store")
        for path in (lab.root / tier).rglob("rank-00000.safetensors")
        if job.id in path.parts
    ]
    for path in damaged:
        flip(path)
    said = shell.relit_cli("resume", job.id, "--store", str(lab.root / "store"), "--wait")
    assert said.code == 100, said
    assert "rank-00000.safetensors" in said.text and "checksum" in said.text, said
    assert [data["source"] for data in formations(job)].count("fresh") == 1
    assert [row["step"] for row in job.metrics()] == list(range(1, step + 1))
    assert lab.leaks(job.id) == []
    for path in damaged:
        if path.exists():  # retention may have come to the oldest meanwhile
            flip(path)
