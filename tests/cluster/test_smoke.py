"""One calm run from submit to result; other tests compare theirs with it."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.cluster


def test_calm_run_finishes_whole(lab: Any, calm_job: Any) -> None:
    steps = int(calm_job.status()["total_steps"])
    assert [row["step"] for row in calm_job.metrics()] == list(range(1, steps + 1))
    assert calm_job.incidents() == []
    assert lab.leaks(calm_job.id) == []
