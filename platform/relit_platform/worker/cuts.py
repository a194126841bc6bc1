"""Which snapshots go to another node: cuts, of one step on every rank, or they are of no use.

A step can be restored only if every rank's part of it is left. Where each node gave away what is
newest there, copies would be of different steps once steps are faster than the network. So the
ranks agree: each votes, with the sum of the gradients, whether its last cut is on another node
(its slot says so, see node/peer_sender.py). When all have said yes, the snapshot of that step is
the next cut, on all of them. A cut is thus begun only when the one before is whole on both sides,
and until then keeps its slot: at any moment one cut is whole. Nothing waits for the network, which
sets the pace; with one node, or `peer: off`, there is never a yes.
"""

from __future__ import annotations

from collections.abc import Sequence

from relit_platform.worker.pace import NUM_VOTES as SAVE_VOTES

NUM_VOTES = SAVE_VOTES + 1


def with_cut_vote(votes: Sequence[float], ready: bool) -> tuple[float, ...]:
    """What a rank sends along: the votes of its Pace, none or all, and its own."""
    return (*(votes or (0.0,) * SAVE_VOTES), float(ready))


def split(agreed: Sequence[float], world: int) -> tuple[Sequence[float], bool]:
    """From the sums over `world` ranks: what is the Pace's, and whether this step is a cut."""
    ready = sum(agreed[SAVE_VOTES:NUM_VOTES])
    return agreed[:SAVE_VOTES], ready > world - 0.5
