"""The end of a run on the cluster: every actor, page of shared memory and file that was the run's.

Called by the supervisor once result.json is written. Everything here may be repeated. All agents
are asked at once: what a lost node's never answers holds up the end, not what the others give back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from relit_platform.ray_train.groups import remove_groups
from relit_platform.run_config import RunConfig
from relit_platform.worker.manager_client import NAMESPACE, manager_name

CLOSE_TIMEOUT_S = 30.0


def run_actor_names(run_id: str) -> list[str]:
    """Names of the run's agents and manager that exist now, agents first."""
    names = [
        str(entry["name"])
        for entry in list_named_actors(all_namespaces=True)
        if entry["namespace"] == NAMESPACE
    ]
    agents = sorted(n for n in names if n.startswith(f"agent/{run_id}/"))
    return agents + [n for n in names if n == manager_name(run_id)]


def close_run(config: RunConfig, *, keep_disk: bool) -> list[str]:
    """End the run's placement groups, agents and manager; returns what did not answer.

    keep_disk: a stopped or failed run keeps its disk tier, from which a resume restores faster
    than from the object tier; shared memory is always given back.
    """
    silent = []
    try:
        remove_groups(config.run_id)
    except RayError as error:
        silent.append(f"placement groups: {type(error).__name__}")
    names = run_actor_names(config.run_id)
    silent += _close_agents([n for n in names if n.startswith("agent/")], not keep_disk)
    for name in names:
        _kill(name)
    return silent


def _close_agents(names: Sequence[str], remove_disk: bool) -> list[str]:
    """Ask all of them at once; one whose node is gone would answer only after the time is up."""
    asked: dict[Any, str] = {}
    silent: list[str] = []
    for name in names:
        try:
            actor: Any = ray.get_actor(name, namespace=NAMESPACE)
            asked[actor.close.remote(remove_disk)] = name
        except ValueError:
            continue  # it went on its own
        except RayError as error:
            silent.append(f"{name}: {type(error).__name__}")
    if not asked:
        return silent
    ended, late = ray.wait(list(asked), num_returns=len(asked), timeout=CLOSE_TIMEOUT_S)
    silent += [f"{asked[ref]}: no answer" for ref in late]
    for ref in ended:
        try:
            ray.get(ref)
        except RayError as error:
            silent.append(f"{asked[ref]}: {type(error).__name__}")
    return silent


def _kill(name: str) -> None:
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    except (ValueError, RayError):
        pass  # already gone
