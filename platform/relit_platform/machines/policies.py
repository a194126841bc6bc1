"""What a run's configuration asks for, as the policies of cadence and retention."""

from __future__ import annotations

from relit_platform.machines.cadence import Cadence
from relit_platform.run_config import CheckpointConfig
from relit_storage.checkpoint.retention import Keep


def disk_cadence(config: CheckpointConfig) -> Cadence:
    """When all ranks persist a step; with disk_auto, until a spacing was found."""
    return Cadence(
        every_steps=config.disk_every_steps,
        every_s=config.disk_every_s or _first_s(config.disk_auto, config.disk_every_steps, config),
        first_steps=config.disk_first_steps,
        growth=config.growth,
        on_metric=config.disk_on_metric,
        mode=config.metric_mode,
    )


def object_cadence(config: CheckpointConfig) -> Cadence:
    """When a persisted step goes on to the object tier; with object_auto, as above."""
    return Cadence(
        every_steps=config.object_every_steps,
        every_s=config.object_every_s
        or _first_s(config.object_auto, config.object_every_steps, config),
        first_steps=config.object_first_steps,
        growth=config.growth,
        on_metric=config.object_on_metric,
        mode=config.metric_mode,
    )


def _first_s(auto: bool, every_steps: int, config: CheckpointConfig) -> float:
    """`auto` has to see some saves first: where nothing else asks for them, its bound does."""
    return config.auto_max_s if auto and not every_steps else 0.0


def disk_keep(config: CheckpointConfig) -> Keep:
    """What stays on a node's disk."""
    return Keep(
        newest=config.keep_disk,
        every_steps=config.keep_disk_every_steps,
        best=config.keep_disk_best,
        mode=config.metric_mode,
        max_bytes=config.keep_disk_bytes,
    )


def object_keep(config: CheckpointConfig) -> Keep:
    """What stays in the object tier."""
    return Keep(
        newest=config.keep_object,
        every_steps=config.keep_object_every_steps,
        best=config.keep_object_best,
        mode=config.metric_mode,
        max_bytes=config.keep_object_bytes,
    )
