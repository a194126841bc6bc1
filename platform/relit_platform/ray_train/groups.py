"""A run's placement groups, found by their names; see placement.py, which gives them.

Without Ray Train: asked for by threads that do not wait until another has imported it, and two that
import it at once get halves of it.
"""

from __future__ import annotations

from ray._raylet import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    placement_group_table,
    remove_placement_group,
)


def prefix_of(run_id: str) -> str:
    """What the names of a run's placement groups begin with."""
    return f"relit/{run_id}/"


def waits_for_place(run_id: str) -> bool:
    """True while a run's workers wait for resources: nothing of theirs is reserved yet. Asks Ray's
    control service once.
    """
    prefix = prefix_of(run_id)
    entries = placement_group_table().values()
    return any(e["state"] == "PENDING" and str(e["name"]).startswith(prefix) for e in entries)


def remove_groups(run_id: str) -> int:
    """Remove all placement groups of a run, and with them the workers inside; how many there were.

    Called by the supervisor when no controller of the run is wanted. Asks Ray's control service
    once, and does not wait until the resources are free.
    """
    left = [
        group_id
        for group_id, entry in placement_group_table().items()
        if str(entry["name"]).startswith(prefix_of(run_id)) and entry["state"] != "REMOVED"
    ]
    for group_id in left:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
    return len(left)
