"""A node is lost with its ranks, its shared memory and its disk.

Two ranks, each on a node of its own. First the node alone: the rank on the other one goes on, with
its state. Then the node and the rank on the other one at once: nobody is left, and the state of the
lost node comes out of the other's shared memory, where its copy lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import damage
import harness
import kills
import pytest
import second_node

from relit_platform.node.paths import NODE_ID_CHARS
from relit_platform.node.slots import Slot

pytestmark = pytest.mark.cluster

HELD_AT, STEPS = 40, 80
SPREAD = {"workers": 2, "placement": "SPREAD"}
NO_DISK = {"disk_every_steps": 0, "object_every_steps": 0}


@pytest.fixture
def node(lab: Any) -> Iterator[second_node.Node]:
    with second_node.joined(lab) as joined:
        yield joined


def held(lab: Any, name: str, node: second_node.Node) -> tuple[Any, dict[str, int]]:
    """A run that holds a step, and the pids of its ranks by node."""
    job = lab.going(name, [HELD_AT], config={"steps": STEPS}, scaling=SPREAD, checkpoint=NO_DISK)
    lab.until_held(job, HELD_AT)
    harness.until(job, lambda _: bool(damage.formations(job)))
    ranks = {member["node_id"]: member["pid"] for member in damage.formations(job)[0]["members"]}
    assert len(ranks) == 2 and node.node_id in ranks, ranks
    return job, ranks


def copied_steps(run_id: str, node_id: str) -> set[int]:
    """Steps of which a node holds a whole copy of another node's part."""
    folder = Path("/dev/shm/relit") / run_id / node_id[:NODE_ID_CHARS] / "peers"
    headers = [Slot.open(str(path)).info() for path in folder.glob("*.slot")]
    return {header.step for header in headers if header.complete}


def ended(lab: Any, job: Any, calm: dict[int, float]) -> dict[str, Any]:
    """The run ends as if nothing had been; its one incident."""
    lab.let_go(job, HELD_AT)
    job.wait(timeout_s=harness.WAIT_S)
    kills.check_exact(job, calm, lab.data, STEPS)
    [record] = job.incidents()
    kills.check_phases(record)
    print(f"\n{record['headline']}")
    assert lab.leaks(job.id) == []
    found: dict[str, Any] = dict(record)
    return found


def test_the_rank_on_the_other_node_goes_on(
    lab: Any, calm: dict[int, float], node: second_node.Node
) -> None:
    job, ranks = held(lab, "node-lost", node)
    node.lose(job.id)
    record = ended(lab, job, calm)
    assert record["lost"]["steps"] == 0, record
    del ranks[node.node_id]
    after = {member["pid"] for member in damage.formations(job)[-1]["members"]}
    assert set(ranks.values()) < after, (ranks, after)


def test_nobody_is_left_but_a_copy_of_the_lost_nodes_state(
    lab: Any, calm: dict[int, float], node: second_node.Node
) -> None:
    job, ranks = held(lab, "node-and-rank-lost", node)
    [other] = ranks.keys() - {node.node_id}
    harness.until(job, lambda _: bool(copied_steps(job.id, other)))
    newest = max(copied_steps(job.id, other))
    node.lose(job.id)
    harness.kill(ranks[other])
    record = ended(lab, job, calm)
    assert record["restore"]["tier"] == "peer", record
    assert record["lost"]["steps"] <= HELD_AT - newest + 1, (newest, record)
