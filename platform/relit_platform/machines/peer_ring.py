"""Which node keeps the snapshots of which, pure."""

from __future__ import annotations

from collections.abc import Collection


def peers_of(nodes: Collection[str]) -> dict[str, str]:
    """For each node the one that keeps its snapshots: the next in the order of their ids.

    Always another node, so there is none where there is only one. A node that comes or goes
    changes the answer for its neighbour alone, and copies that have been made stay of use.
    """
    ring = sorted(set(nodes))
    if len(ring) < 2:
        return {}
    return {node: ring[(place + 1) % len(ring)] for place, node in enumerate(ring)}
