"""Where the actors live that decide: on the cluster's head node, which is no spot machine.

Without a word Ray puts an actor that needs no CPU on any node, and a run whose supervisor is lost
with a node starts all its workers anew, where it would have lost one rank. A soft node affinity is
not a word: Ray 2.60 ignored it for such actors, five times in six with two nodes. A share of the
resource that marks the head node is, and it holds for a head node that takes another's place.
"""

from __future__ import annotations

import ray

HEAD = "node:__internal_head__"
SHARE = 0.0001  # the least that Ray counts: ten thousand actors find room


def home() -> dict[str, float]:
    """Resources for an actor that shall live there; none where Ray marks no node.

    Asks Ray's control service once.
    """
    marked = any(node["Alive"] and HEAD in node["Resources"] for node in ray.nodes())
    return {HEAD: SHARE} if marked else {}
