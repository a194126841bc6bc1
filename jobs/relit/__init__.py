"""relit: fault-tolerant training of plain PyTorch loops on Ray.

    spec = relit.JobSpec(name="digits", entry="train.py:train", scaling={"workers": 2})
    job = relit.submit(spec)
    job.wait()

Importing relit loads neither torch nor ray: names below are resolved at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relit import errors as errors
    from relit.client import Client as Client
    from relit.client import submit as submit
    from relit.handle import JobHandle as JobHandle
    from relit.loading import load_checkpoint as load_checkpoint
    from relit.spec.model import JobSpec as JobSpec

__all__ = ["JobSpec", "submit", "Client", "JobHandle", "load_checkpoint", "errors"]

_HOMES = {
    "JobSpec": "relit.spec.model",
    "submit": "relit.client",
    "Client": "relit.client",
    "JobHandle": "relit.handle",
    "load_checkpoint": "relit.loading",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("relit.errors")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'relit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
