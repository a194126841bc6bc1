"""Which step is restored, from where, and what is said about the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from shard_facts import inventory, manifest, shard, shards, slot

from relit_platform.facts import NodeInventory, RestorePlan
from relit_platform.machines.lineage import Lineage
from relit_platform.machines.restore import Nothing, ObjectCommit, plan_restore
from relit_storage.errors import NotRestorableError


def whole_memory(step: int, generation: int = 1) -> list[Any]:
    return [slot(step, generation, rank) for rank in range(2)]


def commit(step: int, generation: int = 1) -> ObjectCommit:
    return ObjectCommit(step=step, generation=generation, manifest=manifest(step, generation))


def plan(
    inventories: list[NodeInventory] | None = None,
    commits: list[ObjectCommit] | None = None,
    lineage: tuple[tuple[int, int], ...] = (),
    excluded: list[dict[str, Any]] | None = None,
    nodes: tuple[str, ...] = ("n1",),
) -> RestorePlan | Nothing:
    return plan_restore(
        inventories or [], commits or [], Lineage().merged(lineage), excluded or [], nodes, "r"
    )


DISK_4: Any = {"disk": shards(4), "manifests": [manifest(4)]}


@pytest.mark.parametrize(
    ("node", "commits", "expected"),
    [
        (inventory(memory=whole_memory(5), **DISK_4), [commit(3)], ("memory", 5)),
        (inventory(memory=whole_memory(4), **DISK_4), [commit(4)], ("memory", 4)),
        (inventory(memory=[slot(5)], **DISK_4), [commit(4)], ("disk", 4)),
        (inventory(memory=whole_memory(3), **DISK_4), [commit(6)], ("object", 6)),
        (inventory(disk=shards(4)[:1], manifests=[manifest(4)]), [commit(2)], ("object", 2)),
        (inventory(disk=shards(4)), [commit(2)], ("object", 2)),
    ],
)
def test_newest_step_first_then_nearest_tier(
    node: NodeInventory, commits: list[ObjectCommit], expected: tuple[str, int]
) -> None:
    chosen = plan([node], commits)
    assert isinstance(chosen, RestorePlan)
    assert (chosen.tier, chosen.step) == expected
    assert [source.rank for source in chosen.shards] == [0, 1]


def test_locations() -> None:
    chosen = plan([inventory(**DISK_4)])
    assert isinstance(chosen, RestorePlan)
    assert chosen.shards[1].location == f"/disk/n1/{shards(4)[1].file}"
    assert chosen.shards[1].extras_location.startswith("/disk/n1/")
    chosen = plan([], [commit(2)])
    assert isinstance(chosen, RestorePlan)
    assert chosen.shards[0].location == shards(2)[0].file
    chosen = plan([inventory(memory=whole_memory(5))])
    assert isinstance(chosen, RestorePlan)
    assert chosen.shards[0].extras_location == ""


def test_every_refusal_is_recorded_newest_first() -> None:
    node = inventory(
        memory=[slot(9)], disk=shards(8)[:1] + shards(4), manifests=[manifest(8), manifest(4)]
    )
    chosen = plan([node], [ObjectCommit(step=7, generation=1, manifest=None, problem="torn")])
    assert isinstance(chosen, RestorePlan)
    said = [(r["tier"], r["step"], r["reason"]) for r in chosen.refusals]
    assert said[0] == ("memory", 9, "no slot of ranks [1]")
    assert said[1][:2] == ("disk", 8) and said[2] == ("object", 7, "torn")
    assert chosen.refusals[1]["file"] == shards(8)[1].file


def test_off_the_line_is_passed_over() -> None:
    node = inventory(memory=whole_memory(9), **DISK_4)
    chosen = plan([node], lineage=((1, 0), (2, 5)))
    assert isinstance(chosen, RestorePlan)
    assert chosen.step == 4 and "went back to step 5" in chosen.refusals[0]["reason"]


def test_excluded_tier_only() -> None:
    bad = {"tier": "disk", "step": 4, "generation": 1, "file": "f", "reason": "checksum of chunk 0"}
    chosen = plan([inventory(**DISK_4)], [commit(4)], excluded=[bad])
    assert isinstance(chosen, RestorePlan)
    assert chosen.tier == "object" and chosen.refusals[0]["reason"] == "checksum of chunk 0"


def test_what_was_refused_and_is_gone_by_now_is_named_too() -> None:
    bad = [
        {"tier": "disk", "step": step, "generation": 1, "file": f"f{step}", "reason": "torn"}
        for step in (4, 9)
    ]
    with pytest.raises(NotRestorableError, match=r"disk step 4 f4: torn.*disk step 9 f9: torn"):
        plan([inventory(**DISK_4)], excluded=bad)


@pytest.mark.parametrize("nodes", [("n2",), ("n1", "n2")])
def test_memory_and_disk_count_only_on_the_one_node_of_all_ranks(nodes: tuple[str, ...]) -> None:
    chosen = plan([inventory(memory=whole_memory(9), **DISK_4)], [commit(2)], nodes=nodes)
    assert isinstance(chosen, RestorePlan)
    assert chosen.tier == "object" and len(chosen.refusals) == 2


@pytest.mark.parametrize(
    "node",
    [
        inventory(),
        inventory(memory=[slot(1)]),
        inventory(disk=shards(4)),
    ],
)
def test_nothing_was_ever_whole(node: NodeInventory) -> None:
    assert isinstance(plan([node]), Nothing)


@pytest.mark.parametrize(
    ("node", "lineage"),
    [
        (inventory(disk=shards(4)[:1], manifests=[manifest(4)]), ()),
        (inventory(memory=[slot(5), slot(4)]), ()),
        (inventory(refusals=({"tier": "memory", "reason": "bad header"},)), ()),
        (inventory(), ((1, 0), (2, 7))),
        (inventory(memory=whole_memory(9)), ((1, 0), (2, 5))),
    ],
)
def test_never_from_scratch_in_silence(
    node: NodeInventory, lineage: tuple[tuple[int, int], ...]
) -> None:
    with pytest.raises(NotRestorableError):
        plan([node], lineage=lineage)


def test_a_manifest_that_does_not_parse_names_itself() -> None:
    torn = NodeInventory(node_id="n1", memory=(), disk=(), manifests=((4, 1, b"{"),), fence=0)
    with pytest.raises(NotRestorableError, match=r"manifest\.json"):
        plan([torn])


def test_an_unreadable_slot_of_the_log_is_not_nothing() -> None:
    lost = ObjectCommit(step=0, generation=0, manifest=None, problem="slot 3 of the log: torn")
    assert isinstance(plan([], [commit(5), lost]), RestorePlan)
    with pytest.raises(NotRestorableError, match="slot 3 of the log: torn"):
        plan([], [lost])


def test_a_checkpoint_of_another_run_is_refused() -> None:
    """Files copied between run directories: same names, same world, another history."""
    node = inventory(disk=shards(9), manifests=[manifest(9)])
    with pytest.raises(NotRestorableError, match="is a checkpoint of run 'r'"):
        plan_restore([node], [commit(9)], Lineage(), (), ["n1"], "another")


# ---- several nodes ----


def on(
    node: str,
    *,
    memory: tuple[tuple[int, int], ...] = (),
    peers: tuple[tuple[int, int], ...] = (),
    disk: tuple[tuple[int, int], ...] = (),
    listens: bool = True,
) -> NodeInventory:
    """A node that holds (step, rank) in its memory, as copies, and on its disk."""
    steps = sorted({step for step, _ in disk})
    found = inventory(
        node,
        memory=[slot(step, rank=rank, node=node) for step, rank in memory],
        disk=[shard(step, rank=rank, node=node) for step, rank in disk],
        manifests=[manifest(step) for step in steps],
    )
    copies = tuple(
        replace(slot(step, rank=rank, node=node), path=f"/peers/{node}/{rank}-{step}")
        for step, rank in peers
    )
    return replace(found, peers=copies, endpoint=(node, 1) if listens else None)


@pytest.mark.parametrize(
    ("inventories", "nodes", "expected"),
    [
        # Both nodes are there: each rank's own memory.
        ([on("n1", memory=((5, 0),)), on("n2", memory=((5, 1),))], ("n1", "n2"), "memory memory"),
        # n1 is lost: rank 0 from its peer's memory.
        ([on("n2", memory=((5, 1),), peers=((5, 0),))], ("n2", "n3"), "memory peer"),
        # The copy that was newest on its way is of no use, the one before is.
        (
            [on("n2", memory=((6, 1), (5, 1)), peers=((5, 0), (4, 0)))],
            ("n2",),
            "memory peer",
        ),
        # Memory before a copy of the same.
        ([on("n1", memory=((5, 0), (5, 1)), peers=((5, 0),))], ("n1",), "memory memory"),
        # A copy before the disk, the disk where there is no copy.
        (
            [on("n2", peers=((5, 0),), disk=((5, 0), (5, 1)))],
            ("n2",),
            "peer disk",
        ),
        # A published step whose shards lie on two nodes.
        ([on("n1", disk=((5, 0),)), on("n2", disk=((5, 1),))], ("n1", "n2"), "disk disk"),
        # The object tier fills what no node has.
        ([on("n2", memory=((5, 1),))], ("n2",), "memory object"),
        # Nobody answers other agents: then every rank has to be on the node that holds it.
        ([on("n2", memory=((5, 1),), peers=((5, 0),), listens=False)], ("n2",), "memory peer"),
        (
            [on("n2", memory=((5, 1),), peers=((5, 0),), listens=False)],
            ("n2", "n3"),
            "object object",
        ),
    ],
)
def test_each_shard_comes_from_the_nearest_that_has_it(
    inventories: list[NodeInventory], nodes: tuple[str, ...], expected: str
) -> None:
    chosen = plan(inventories, [commit(5)], nodes=nodes)
    assert isinstance(chosen, RestorePlan)
    assert chosen.step == 5 and sorted(s.tier for s in chosen.shards) == sorted(expected.split())
    assert [source.rank for source in chosen.shards] == [0, 1]
    farthest = [t for t in ("memory", "peer", "disk", "object") if t in expected][-1]
    assert chosen.tier == farthest


def test_a_copy_on_a_node_with_ranks_before_one_elsewhere() -> None:
    here = on("n3", peers=((5, 0),))
    elsewhere = on("n1", peers=((5, 0),), memory=((5, 1),))
    chosen = plan([elsewhere, here], nodes=("n3",))
    assert isinstance(chosen, RestorePlan)
    assert [(s.tier, s.node_id) for s in chosen.shards] == [("peer", "n3"), ("memory", "n1")]
    assert chosen.shards[1].endpoint == ("n1", 1)


def test_no_two_steps_are_mixed() -> None:
    node = on("n2", memory=((6, 1), (5, 1)), peers=((4, 0),), disk=((3, 0), (3, 1)))
    chosen = plan([node], nodes=("n2",))
    assert isinstance(chosen, RestorePlan)
    assert (chosen.tier, chosen.step) == ("disk", 3)
    assert [(r["tier"], r["step"], r["reason"]) for r in chosen.refusals] == [
        ("memory", 6, "no slot of ranks [0]"),
        ("memory", 5, "no slot of ranks [0]"),
        ("peer", 4, "no copy of ranks [1]"),
    ]


def refusal(tier: str, rank: int | None, node: str | None) -> dict[str, Any]:
    return {
        "tier": tier, "step": 5, "generation": 1, "file": "f", "reason": "torn",
        "rank": rank, "node": node,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("excluded", "expected"),
    [
        ([], [("peer", "n1"), ("memory", "n2")]),
        ([refusal("peer", 0, "n1")], [("peer", "n3"), ("memory", "n2")]),
        ([refusal("peer", None, "n1")], [("peer", "n3"), ("memory", "n2")]),
        ([refusal("peer", 1, "n1")], [("peer", "n1"), ("memory", "n2")]),
        ([refusal("peer", 0, "n1"), refusal("peer", 0, "n3")], [("disk", "n2"), ("memory", "n2")]),
        ([refusal("peer", None, None)], [("disk", "n2"), ("memory", "n2")]),
        ([refusal("memory", 1, "n2")], [("peer", "n1"), ("disk", "n2")]),
        ([refusal("peer", 0, ""), refusal("disk", None, "n2")], [("object", ""), ("memory", "n2")]),
    ],
)
def test_only_what_was_refused_is_passed_over(
    excluded: list[dict[str, Any]], expected: list[tuple[str, str]]
) -> None:
    inventories = [
        on("n2", memory=((5, 1),), disk=((5, 0), (5, 1))),
        on("n1", peers=((5, 0),)),
        on("n3", peers=((5, 0),)),
    ]
    chosen = plan(inventories, [commit(5)], excluded=excluded, nodes=("n2",))
    assert isinstance(chosen, RestorePlan)
    assert [(s.tier, s.node_id) for s in chosen.shards] == expected


def test_copies_alone_are_not_nothing_unless_they_are_the_first_step() -> None:
    assert isinstance(plan([on("n2", memory=((1, 1),))], nodes=("n2",)), Nothing)
    with pytest.raises(NotRestorableError, match="no copy of ranks"):
        plan([on("n2", memory=((2, 1),), peers=((1, 0),))], nodes=("n2",))


def test_off_the_line_goes_for_copies_too() -> None:
    node = on("n2", memory=((9, 1),), peers=((9, 0),), disk=((4, 0), (4, 1)))
    chosen = plan([node], lineage=((1, 0), (2, 5)), nodes=("n2",))
    assert isinstance(chosen, RestorePlan)
    assert (chosen.tier, chosen.step) == ("disk", 4)
