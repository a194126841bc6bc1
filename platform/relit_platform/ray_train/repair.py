"""Replacing several dead workers of one worker group, which Ray 2.60 does not survive.

To replace one worker, Ray's controller first makes a call to every other worker that it holds to be
alive. If another one has died meanwhile, that call raises, the controller starts over with the very
same poll result, and so on, hundreds of times a second and for ever. It also replaces those
again that it has replaced in the round that failed. So each worker group gets a `replace` of ours
around Ray's own: workers found dead are closed first, and nothing is replaced twice for one poll.

In the controller's process; touches `WorkerGroup._replica_groups`, `_latest_poll_status` and
`replace_replica_group` (tests/unit/test_ray_contract.py holds them).
"""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train.v2._internal.execution.callback import WorkerGroupCallback

ANSWER_S = 5.0  # a worker that does not answer is not dead: its health check has its own time


class RepairCallback(WorkerGroupCallback):  # type: ignore[misc]
    """Gives every worker group that is started a `Replacer`."""

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Called by Ray once the actors are there."""
        worker_group.replace_replica_group = Replacer(worker_group)


class Replacer:
    """Stands in for `replace_replica_group` of one worker group; one call at a time."""

    def __init__(self, worker_group: Any) -> None:
        self._group = worker_group
        self._replace = worker_group.replace_replica_group
        self._poll: Any = None
        self._replaced: set[int] = set()

    def __call__(self, index: int) -> None:
        """Replace the workers of replica group `index`. Blocks for a process start; raises what
        Ray raises when the new ones cannot be started.
        """
        if self._poll is not self._group._latest_poll_status:
            self._poll = self._group._latest_poll_status
            self._replaced.clear()
        if index in self._replaced:
            return  # a later replacement of the same round failed, and the round began again
        for number, other in enumerate(self._group._replica_groups):
            if number != index and other.is_active() and _is_dead(other):
                other.shutdown()  # the next poll finds it failing, if this one did not
        self._replace(index)
        self._replaced.add(index)


def _is_dead(replica_group: Any) -> bool:
    """Asked by the very call that Ray is about to make."""
    try:
        asked = [w.actor.clear_result_queue.remote() for w in replica_group.get_workers()]
        ray.get(asked, timeout=ANSWER_S)
    except RayActorError:
        return True
    except GetTimeoutError:
        return False
    return False
