"""What lies on another node is fetched; what cannot be is refused so that the plan goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from relit_platform.errors import BudgetError, PeerAwayError, PeerError, PeerRefusedError
from relit_platform.facts import RestorePlan, ShardSource, Tier
from relit_platform.worker.near import near
from relit_storage.errors import CorruptShardError


def source(rank: int, node: str, tier: Tier = "memory") -> ShardSource:
    return ShardSource(
        rank=rank,
        tier=tier,
        node_id=node,
        location=f"{node}/{rank}",
        extras_location="",
        num_bytes=1,
        chunk_bytes=0,
        checksums=(),
        extras_bytes=0,
        extras_checksum="",
    )


PLAN = RestorePlan(
    step=7,
    generation=2,
    world=3,
    tier="object",
    shards=(source(0, "n1"), source(1, "n2", "peer"), source(2, "", "object")),
)


def test_only_what_other_nodes_hold_is_fetched() -> None:
    asked: list[tuple[Any, ...]] = []

    def fetch(wanted: ShardSource, *place: int) -> ShardSource:
        asked.append((wanted.rank, wanted.node_id, *place))
        return replace(wanted, location="here")

    found = near(PLAN, "n1", fetch)
    assert asked == [(1, "n2", 7, 2, 3)]
    assert [s.location for s in found.shards] == ["n1/0", "here", "/2"]


def as_ray_hands_it_on(error: Exception) -> Exception:
    handed: Exception = RayTaskError("fetch", "a traceback", error).as_instanceof_cause()
    return handed


@pytest.mark.parametrize("hand_on", [lambda error: error, as_ray_hands_it_on])
@pytest.mark.parametrize(
    ("error", "rank", "reason"),
    [
        (PeerRefusedError(peer="n2", reason="it is not here"), 1, "it is not here"),
        (PeerError(peer="n2", reason="said KEPT"), 1, "said KEPT"),
        (BudgetError(what="a copy", needed_bytes=9, budget_bytes=8), 1, "budget is 8"),
        (CorruptShardError(file="f", reason="chunk 2"), 1, "chunk 2"),
        (PeerAwayError(peer="n2", reason="no route"), None, "no route"),
        (TimeoutError("an hour"), None, "an hour"),
    ],
)
def test_what_cannot_be_fetched_is_refused(
    error: Exception, rank: int | None, reason: str, hand_on: Callable[[Exception], Exception]
) -> None:
    def fetch(wanted: ShardSource, *place: int) -> ShardSource:
        raise hand_on(error)

    with pytest.raises(CorruptShardError, match=reason) as refused:
        near(PLAN, "n1", fetch)
    fields = refused.value.fields
    assert (fields["tier"], fields["step"], fields["generation"]) == ("peer", 7, 2)
    assert (fields["rank"], fields["node"], fields["file"]) == (rank, "n2", "n2/1")
    assert "traceback" not in fields["reason"]


def test_what_is_nobodys_fault_is_not_hidden() -> None:
    def fetch(wanted: ShardSource, *place: int) -> ShardSource:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        near(PLAN, "n1", fetch)
