"""One calm run from submit to result."""

from __future__ import annotations

from typing import Any


def test_calm_run_finishes_whole(lab: Any) -> None:
    job = lab.run("calm")
    status = job.status()
    assert status["state"] == "SUCCEEDED", status
    assert [row["step"] for row in job.metrics()] == list(range(1, 121))
    assert lab.leaks("calm") == []
