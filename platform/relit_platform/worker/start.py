"""The function that Ray Train is given. Light: the supervisor and the controller load it too, and
neither of them trains, so torch is first imported in a worker.
"""

from __future__ import annotations

from typing import Any

import ray

from relit_platform.node.agent import get_or_create_agent
from relit_platform.run_config import RunConfig


def train_worker(loop_config: dict[str, Any]) -> None:
    """Runs in a thread of the Ray Train worker; see relit_platform.worker.entry."""
    _start_agent(RunConfig.from_json(loop_config["run"]))
    from relit_platform.worker import entry

    entry.train_worker(loop_config)


def _start_agent(config: RunConfig) -> None:
    """Have this node's agent start while this process imports torch: both take over a second."""
    try:
        get_or_create_agent(config, str(ray.get_runtime_context().get_node_id()))
    except (ray.exceptions.RayError, ValueError):
        pass  # the worker's hello tries again, with patience
