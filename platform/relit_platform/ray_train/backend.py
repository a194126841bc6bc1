"""The backend that Ray Train is given. Every rank unpickles it when it starts, and so loads this
module: it must not bring in Ray's trainer and controller.
"""

from __future__ import annotations

from typing import Any

from ray.train.backend import Backend, BackendConfig


class ReplicaBackend(Backend):  # type: ignore[misc]
    """Puts every worker into a replica group of its own and sets up nothing: the process group
    is relit's, formed per generation inside the worker.
    """

    has_replica_groups = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Nothing to start."""

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        """Nothing to set up before the training function."""

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Nothing to shut down."""


class ReplicaBackendConfig(BackendConfig):  # type: ignore[misc]
    """Selects `ReplicaBackend`."""

    @property
    def backend_cls(self) -> type[ReplicaBackend]:
        """The backend class that the controller instantiates."""
        return ReplicaBackend
