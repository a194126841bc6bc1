"""Where the actors live that decide: on the cluster's head node, which is no spot machine.

Without a word Ray puts an actor that needs no CPU on any node, and a run whose supervisor is lost
with a node starts all its workers anew, where it would have lost one rank.
"""

from __future__ import annotations

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

HEAD = "node:__internal_head__"  # the resource by which Ray marks it


def home() -> NodeAffinitySchedulingStrategy | None:
    """The head node, or any other while that has no room; None where Ray names no head.

    Asks Ray's control service once.
    """
    heads = [node["NodeID"] for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"]]
    return NodeAffinitySchedulingStrategy(heads[0], soft=True) if heads else None
