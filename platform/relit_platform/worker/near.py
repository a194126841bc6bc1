"""Before a plan is read: what lies in another node's memory or on its disk is brought to this one.

The node's agent fetches it, once for all ranks of the node, into its own shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from relit_platform.errors import BudgetError, PeerAwayError, PeerError
from relit_platform.facts import RestorePlan, ShardSource
from relit_storage.checkpoint.image import MAX_REASON
from relit_storage.errors import CorruptShardError, StorageError

Fetch = Callable[[ShardSource, int, int, int], ShardSource]  # step, generation, world


def near(plan: RestorePlan, node_id: str, fetch: Fetch) -> RestorePlan:
    """The plan with every shard of other nodes on this one; blocks for the network.

    Raises CorruptShardError like `load_plan`, with the fields by which the manager passes over
    what could not be fetched: one shard of one node, or all of a node that cannot be reached.
    """
    shards = []
    for source in plan.shards:
        if source.node_id in ("", node_id):
            shards.append(source)
            continue
        try:
            shards.append(fetch(source, plan.step, plan.generation, plan.world))
        except (PeerError, BudgetError, StorageError, TimeoutError) as error:
            raise _refusal(plan, source, error) from error
    return replace(plan, shards=tuple(shards))


def _refusal(plan: RestorePlan, source: ShardSource, error: Exception) -> CorruptShardError:
    return CorruptShardError(
        file=source.location,
        reason=f"cannot be fetched: {_words(error)}"[:MAX_REASON],
        tier=source.tier,
        step=plan.step,
        generation=plan.generation,
        rank=None if isinstance(error, PeerAwayError | TimeoutError) else source.rank,
        node=source.node_id,
    )


def _words(error: Exception) -> str:
    """Ray hands an agent's error on with its whole traceback; the error itself says enough."""
    inner = getattr(error, "cause", None)
    return str(inner if isinstance(inner, Exception) else error)
