"""Placement groups that can be told apart, so that none outlives its run.

Ray removes a placement group when both the actor and the job that made it are dead, each of which
it notes when it happens. A group that is made after its job's process died is never removed: a
controller outlives that process, for its supervisor is detached, and starts its workers anew when
it must. What such a group has reserved would be lost to the cluster. So every group gets the run's
name, and whoever starts a run's workers, or ends the run, removes what is left under that name.

In the controller's process; touches `worker_group.placement_group`, the function by which Ray Train
makes its groups (tests/unit/test_ray_contract.py holds it).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.worker_group import worker_group

from relit_platform.ray_train.groups import prefix_of

MAKER = "placement_group"


class NamingCallback(WorkerGroupCallback):  # type: ignore[misc]
    """Names the placement group of every worker group that is started."""

    def __init__(self, run_id: str) -> None:
        self._prefix = prefix_of(run_id)

    @contextmanager
    def on_worker_group_start(self) -> Iterator[None]:
        """Around Ray's own start, which makes the group; names must differ even in one run."""
        make = getattr(worker_group, MAKER)
        setattr(worker_group, MAKER, partial(make, name=f"{self._prefix}{secrets.token_hex(8)}"))
        try:
            yield
        finally:
            setattr(worker_group, MAKER, make)
