"""The function that Ray Train is given. Light: the supervisor and the controller load it too, and
neither of them trains, so torch is first imported in a worker.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

PRELOAD = "RELIT_PRELOAD"  # modules, with commas
THREADS = "RELIT_THREADS"
LOADED = "relit-loaded"  # at most 15 characters


def train_worker(loop_config: dict[str, Any]) -> None:
    """Runs in a thread of the Ray Train worker; see relit_platform.worker.entry."""
    os.environ.update(loop_config["run"]["env_vars"])  # torch._dynamo reads some when it loads
    with uncollected():
        _start_agent(loop_config["run"])
        # Every optimizer of torch's loads it when it is made; here that takes half the time.
        import torch._dynamo  # noqa: F401

        from relit_platform.worker import entry
    entry.train_worker(loop_config)


def preload() -> None:
    """Called by Ray when a process for ranks starts, with a rank or standing by: load what its
    environment names. What fails is left to whoever needs it.
    """
    if threads := os.environ.get(THREADS):  # what Ray sets when the actor is there: too late then
        os.environ.setdefault("OMP_NUM_THREADS", threads)
    with uncollected():
        for name in filter(None, os.environ.get(PRELOAD, "").split(",")):
            try:
                importlib.import_module(name)
            except Exception as error:
                print(f"relit: {name} could not be loaded ahead: {error}", flush=True)
    with suppress(OSError), open("/proc/self/comm", "w") as file:  # for who looks from outside
        file.write(LOADED)


def _start_agent(run: dict[str, Any]) -> None:
    """Have this node's agent start while this process imports torch: both take over a second."""
    import ray

    from relit_platform.node.agent import get_or_create_agent
    from relit_platform.run_config import RunConfig

    try:
        node_id = str(ray.get_runtime_context().get_node_id())
        get_or_create_agent(RunConfig.from_json(run), node_id)
    except (ray.exceptions.RayError, ValueError):
        pass  # the worker's hello tries again, with patience


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports: no cyclic garbage collection while they last, and none of what they made later.

    They only add, and the collector looks through all that is there again and again: a third of
    the time that torch takes to load (docs/log.md), and of each full collection while training.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
