"""Processes that Ray starts before anybody wants them, in the runtime environment of a run's ranks.

`PrestartWorkers` is a call that every raylet answers and for which Ray 2.60 has no Python function.
A process started by it belongs to no actor yet: the next actor of that job with that environment
gets it. In the agent's process; touches `node_manager_pb2` and `WORKER_PROCESS_SETUP_HOOK_ENV_VAR`
(tests/unit/test_ray_contract.py holds them).
"""

from __future__ import annotations

from typing import Any

from relit_platform.node.standby import RANK_OF, Seed
from relit_platform.run_config import RunConfig
from relit_platform.worker.start import PRELOAD, THREADS

HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"  # Ray calls what it names before anything else
_LOADED = ("ray.train.v2._internal.execution.worker_group.worker", "relit_platform.node.agent")
_LOADED_WITH_TORCH = ("torch._dynamo", "relit_platform.worker.entry")
_KEEP_S = 7 * 86400
_TIMEOUT_S = 10.0


def rank_env(config: RunConfig) -> dict[str, str]:
    """Environment variables of all processes of a run's ranks, standing by or not; none where no
    process is to stand by.

    Where ranks have GPUs torch is not loaded ahead: which ones, Ray says only when an actor comes,
    and whatever asks CUDA before that would give every rank the same. Nor where the run sets
    variables that torch reads when it loads: those come with the rank.
    """
    if not config.recovery.standby_processes:
        return {}
    scaling = config.scaling
    later = scaling.gpus_per_worker or any(name.startswith("TORCH") for name in config.env_vars)
    names = _LOADED if later else (*_LOADED, *_LOADED_WITH_TORCH)
    return {
        HOOK: "relit_platform.worker.start.preload",
        PRELOAD: ",".join(names),
        RANK_OF: config.run_id,
        THREADS: str(max(1, int(scaling.cpus_per_worker))),
    }


def no_rank_env() -> dict[str, str]:
    """For actors that a rank starts: they would inherit its environment."""
    return dict.fromkeys((HOOK, PRELOAD, RANK_OF, THREADS), "")


def prestart(node_id: str, seed: Seed, count: int) -> None:
    """Have this node's raylet start `count` processes; does not wait for them.

    Called by the agent in a thread of its own. Raises grpc.RpcError if the raylet refuses, and
    ValueError if Ray does not know the node.
    """
    import ray
    from ray._private import ray_constants
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import (
        common_pb2,
        node_manager_pb2,
        node_manager_pb2_grpc,
        runtime_environment_pb2,
    )

    node = next((n for n in ray.nodes() if n["NodeID"] == node_id), None)
    if node is None:
        raise ValueError(f"Ray does not know node {node_id}")
    env = runtime_environment_pb2.RuntimeEnvInfo(serialized_runtime_env=seed.runtime_env)
    request = node_manager_pb2.PrestartWorkersRequest(
        language=common_pb2.PYTHON,
        job_id=bytes.fromhex(seed.job_id),
        runtime_env_info=env,
        keep_alive_duration_secs=_KEEP_S,
        num_workers=count,
    )
    host = node["NodeManagerAddress"]
    address = f"[{host}]" if ":" in host else host
    channel: Any = init_grpc_channel(
        f"{address}:{node['NodeManagerPort']}", options=ray_constants.GLOBAL_GRPC_OPTIONS
    )
    with channel:
        stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
        stub.PrestartWorkers(request, timeout=_TIMEOUT_S)
