"""The metric rows that a rank left beside its snapshot, when nobody lives that could send them."""

from __future__ import annotations

import json
from typing import Any

from relit_platform.node.slots import Slot


def rows_beside(path: str) -> tuple[dict[str, Any], ...]:
    """The rows in a slot's extras: those that were not known to be in the run directory.

    Raises CorruptShardError for a slot that holds no whole snapshot, OSError if it is gone.
    """
    slot = Slot.open(path)
    try:
        extras = json.loads(slot.read_extras())
    finally:
        slot.close()
    return tuple(extras.get("rows") or ())
