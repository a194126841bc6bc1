"""A node is lost with all its memory and its disk: its rank's share comes back from its peer.

Real keepers, TCP, coordinator, snapshotters and readers; two ranks on two nodes, no Ray.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coordinator_harness import Bench, make_config, request
from node_harness import wait_until
from peer_nodes import PeerNodes, copies_at
from stopped_run import OneNode, state_of
from torch import Tensor

from relit_platform.control.coordinator import Coordinator
from relit_platform.control.object_tier import ObjectTier
from relit_platform.facts import Assignment, Fact, FaultReport, RestorePlan
from relit_platform.node.slots import Slot
from relit_platform.run_config import CheckpointConfig
from relit_platform.worker.cuts import split, with_cut_vote
from relit_platform.worker.near import near
from relit_platform.worker.restore import load_plan
from relit_platform.worker.snapshot import Snapshotter
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.errors import CorruptShardError
from relit_storage.stores.memory import MemoryStore


class Nodes:
    """The AgentPort of every keeper that is left."""

    def __init__(self, nodes: PeerNodes) -> None:
        self._nodes = nodes

    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted(self._nodes.keepers))

    def lost_nodes(self) -> frozenset[str]:
        return frozenset()

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(node_id: str, *args: Any) -> Any:
            return getattr(OneNode(self._nodes.keepers[node_id]), verb)(node_id, *args)

        return call


class Run:
    """Two ranks, w0 on n1 and w1 on n2, and the manager."""

    def __init__(self, root: Path) -> None:
        self.nodes = PeerNodes(root)
        self.queue: list[Callable[[], None]] = []
        store = MemoryStore()
        self.coordinator = Coordinator(
            config=replace(make_config(), checkpoint=CheckpointConfig(object_every_steps=0)),
            agents=Nodes(self.nodes),
            objects=ObjectTier(store, CommitLog(store), time.time),
            background=self,
            clock=time.time,
            steady=time.monotonic,
            sleep=lambda seconds: None,
        )
        self.coordinator.start_epoch(1)
        self.snapshotters = []
        for node, worker in (("n1", "w0"), ("n2", "w1")):
            keeper = self.boot(node)
            keeper.hello(worker, os.getpid(), epoch=9)  # of an epoch that no seal ends in this test
            self.snapshotters.append(
                Snapshotter(
                    worker,
                    lambda *wanted, k=keeper, w=worker: k.open_slots(w, *wanted),
                )
            )
        self.join({"w0": "n1", "w1": "n2"}, epoch=1)
        self.step = 0
        self.cuts: list[int] = []

    def boot(self, node: str) -> Any:
        keeper = self.nodes.boot(node)
        data = {"node_id": node, "pid": 1}
        self.coordinator.fact(Fact(kind="agent.started", at_s=time.time(), src=node, data=data))
        self.work()
        return keeper

    def submit(self, work: Callable[[], None], delay_s: float = 0.0) -> None:
        self.queue.append(work)

    def close(self) -> None:
        for snapshotter in self.snapshotters:
            snapshotter.close()
        self.nodes.clear()

    def work(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def complete(self, *, replicate: bool = True) -> None:
        """One step of both ranks; with `replicate` the network keeps up with it."""
        votes = [with_cut_vote((), s.replicated) for s in self.snapshotters]
        _, cut = split([sum(places) for places in zip(*votes, strict=True)], 2)
        self.step += 1
        self.cuts += [self.step] * cut
        for rank, snapshotter in enumerate(self.snapshotters):
            taken = snapshotter.take(
                step=self.step, generation=1, rank=rank, world=2, tensors=state_of(self.step),
                extras={"step": self.step, "rank": rank}, cut=cut,
            )  # fmt: skip
            assert taken.path is not None, taken.reason
        if replicate:
            wait_until(lambda: all(s.replicated for s in self.snapshotters), "replicated")

    def lose(self, node: str) -> None:
        """The node, the supervisor and all ranks; a new node comes in its place."""
        self.nodes.lose(node)
        self.coordinator.start_epoch(2)
        self.boot("n3")

    def join(
        self, places: dict[str, str], epoch: int, faults: dict[str, Any] | None = None, **more: Any
    ) -> list[Assignment]:
        wanted = [
            replace(
                request(worker, epoch=epoch, **more), node_id=node, fault=(faults or {}).get(worker)
            )
            for worker, node in places.items()
        ]
        for one in wanted:
            self.coordinator.join(one, 0.0)
        self.work()
        replies = [self.coordinator.join(one, 0.0) for one in wanted]
        assert all(isinstance(reply, Assignment) for reply in replies), replies
        return [reply for reply in replies if isinstance(reply, Assignment)]

    def load(self, plan: RestorePlan, node: str) -> dict[str, Tensor]:
        tensors, extras = load_plan(near(plan, node, self.nodes.keepers[node].peers.fetch))
        assert {rank: e["rank"] for rank, e in extras.items()} == {0: 0, 1: 1}
        return tensors


@pytest.fixture
def run(tmpfs: Path) -> Iterator[Run]:
    made = Run(tmpfs)
    yield made
    made.close()


def plan_of(replies: list[Assignment]) -> RestorePlan:
    plans = [reply.source.plan for reply in replies]
    assert plans[0] is not None and plans[0] == plans[1]
    return plans[0]


def same(tensors: dict[str, Tensor], step: int) -> bool:
    right = state_of(step)
    return tensors.keys() == right.keys() and all(
        torch.equal(tensors[name], right[name]) for name in right
    )


def test_a_lost_nodes_newest_cut_is_restored_from_its_peer(run: Run) -> None:
    for _ in range(5):
        run.complete()
    run.complete(replicate=False)  # rank 0's part of step 6 is on n1 alone, or on its way
    run.lose("n1")
    plan = plan_of(run.join({"x0": "n2", "x1": "n3"}, epoch=2))
    assert plan.step >= 5 and plan.tier == "peer"
    assert [(s.tier, s.node_id) for s in plan.shards] == [("peer", "n2"), ("memory", "n2")]
    assert same(run.load(plan, "n2"), plan.step), "beside the shards"
    assert same(run.load(plan, "n3"), plan.step), "over the network"
    fetched = {(rank, step) for rank, _, step in copies_at(run.nodes.keepers["n3"])}
    assert fetched == {(0, plan.step), (1, plan.step)}


def test_a_damaged_copy_is_refused_and_the_cut_before_is_taken(run: Run) -> None:
    for _ in range(5):
        run.complete()
    run.lose("n1")
    for info in run.nodes.keepers["n2"].inventory().peers:
        if info.step == 5:
            Slot.open(info.path).image[-1] ^= 1
    plan = plan_of(run.join({"x0": "n2", "x1": "n3"}, epoch=2))
    faults = {}
    for worker, node in (("x0", "n2"), ("x1", "n3")):
        with pytest.raises(CorruptShardError, match="fails its checksum") as error:
            run.load(plan, node)
        fields = dict(error.value.fields)
        assert (fields["tier"], fields["step"], fields["rank"], fields["node"]) == (
            "peer", 5, 0, "n2",
        )  # fmt: skip
        faults[worker] = FaultReport(
            kind="restore_refused", message="", at_s=time.time(), refused=fields
        )
    again = plan_of(run.join({"x0": "n2", "x1": "n3"}, epoch=2, faults=faults, gen=2))
    assert (again.step, again.tier) == (4, "peer")
    assert same(run.load(again, "n2"), 4) and same(run.load(again, "n3"), 4)


def test_a_node_that_goes_away_under_way_is_passed_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relit_platform.node.peer_tier.FETCH_PAUSE_S", 0.01)
    for _ in range(3):
        run.complete()
    run.lose("n1")
    plan = plan_of(run.join({"x0": "n2", "x1": "n3"}, epoch=2))
    run.nodes.keepers["n2"].peers.close()
    with pytest.raises(CorruptShardError, match="cannot be reached") as error:
        run.load(plan, "n3")
    assert error.value.fields["node"] == "n2" and error.value.fields["rank"] is None


def test_both_nodes_alive_need_no_copy(run: Run) -> None:
    """All ranks die, the nodes do not: each rank's own memory, fetched by the other node."""
    for _ in range(4):
        run.complete()
    run.coordinator.start_epoch(2)
    plan = plan_of(run.join({"x0": "n2", "x1": "n1"}, epoch=2))
    assert (plan.step, plan.tier) == (4, "memory")
    assert {s.node_id for s in plan.shards} == {"n1", "n2"}
    assert same(run.load(plan, "n1"), 4) and same(run.load(plan, "n2"), 4)


def test_one_node_goes_on_as_before() -> None:
    bench = Bench().start("a", "b")
    assert bench.agents.named("listen") == []
