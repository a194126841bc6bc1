"""Why a run's workers have no place yet, in a sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from relit_platform.run_config import ScalingConfig

NAMES = ("CPU", "GPU")


def shortage(scaling: ScalingConfig, total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """What the workers want and the cluster lacks; "" if it has enough, so that they are starting.

    total, free: resources of all nodes together, as Ray counts them. Enough in all may still be too
    little on each node; nothing is said of that.
    """
    count = scaling.workers + scaling.spares
    each = dict(zip(NAMES, (scaling.cpus_per_worker, scaling.gpus_per_worker), strict=True))
    lacking = [
        f"{_number(count * each[name])} {name} wanted, {_number(free.get(name, 0.0))} of"
        f" {_number(total.get(name, 0.0))} free"
        for name in NAMES
        if count * each[name] > free.get(name, 0.0)
    ]
    if not lacking:
        return ""
    never = any(count * each[name] > total.get(name, 0.0) for name in NAMES)
    way_out = "add nodes, or stop it and lower scaling" if never else "it waits"
    return f"{count} workers have no place: {'; '.join(lacking)}; {way_out}"


def _number(value: float) -> str:
    return f"{value:g}"
