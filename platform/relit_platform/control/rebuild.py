"""What an epoch begins with: fences raised everywhere, then all that agents and the log know.

Called by the coordinator in the thread of `start_epoch`, never under its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from relit_platform.control.ports import AgentError, AgentPort, ObjectPort
from relit_platform.errors import PlatformError
from relit_platform.facts import Heartbeat, NodeInventory, ShardPersisted
from relit_platform.machines.checkpoint_state import Checkpoint, Key
from relit_platform.machines.restore import ObjectCommit
from relit_storage.checkpoint.manifest import Manifest
from relit_storage.errors import ManifestError, StoreError

PATIENCE_S = 15.0  # an agent that was killed is back by then
PAUSE_S = 0.25
ASKED_AT_ONCE = 64

T = TypeVar("T")


class Patience:
    """Asks again what does not answer, until it has been silent for PATIENCE_S.

    Since when is remembered over calls, so that a caller that was cut short may begin again.
    """

    def __init__(self, steady: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._steady = steady
        self._sleep = sleep
        self._silent_since_s: dict[str, float] = {}

    def ask(self, what: str, call: Callable[[], T]) -> T:
        """The answer; the last AgentError or StoreError when patience is over."""
        while True:
            try:
                answer = call()
            except (AgentError, StoreError):
                now = self._steady()
                if now - self._silent_since_s.setdefault(what, now) >= PATIENCE_S:
                    self._silent_since_s.pop(what, None)  # the next epoch is as patient
                    raise
                self._sleep(PAUSE_S)
            else:
                self._silent_since_s.pop(what, None)
                return answer


@dataclass(slots=True)
class Found:
    """generation: the highest that anybody has seen. holders and done: rank -> worker of the
    members that run, and of those whose loop is over; members: both, for status.json. silent:
    what did not answer, with the reason.
    """

    generation: int = 0
    holders: dict[int, str] = field(default_factory=dict)
    done: dict[int, str] = field(default_factory=dict)
    members: list[dict[str, Any]] = field(default_factory=list)
    inventories: list[NodeInventory] = field(default_factory=list)
    commits: Sequence[ObjectCommit] = ()
    silent: dict[str, str] = field(default_factory=dict)


def gather(
    agents: AgentPort, objects: ObjectPort, epoch: int, generation: int, patience: Patience
) -> Found:
    """Fence older epochs off and collect what is there. Blocks; what stays silent is named.

    An agent that is being re-created is waited for: without its heartbeats the members that run
    would look dead, and spares would take their places. Raises FencedError if a newer epoch has
    taken over, at an agent or in the log, and AgentError if the agents cannot even be listed.
    """
    found = Found(generation=generation)
    try:
        logged = patience.ask("object tier", lambda: objects.open_epoch(epoch))
        found.generation = max(found.generation, logged)
        found.commits = patience.ask("object tier", objects.commits)
    except StoreError as error:
        found.silent["object tier"] = str(error)
    nodes = patience.ask("agents", agents.nodes)
    first = _each(nodes, agents.inventory, found, patience)
    found.generation = max([found.generation, *(i.fence for i in first.values())])
    _each(first, lambda node: agents.seal(node, epoch, found.generation), found, patience)
    beats = _each(first, agents.heartbeats, found, patience)
    _note_holders(found, beats)
    # Again after the seal: a persist that was under way has ended or is refused by now.
    found.inventories = list(_each(first, agents.inventory, found, patience).values())
    return found


def checkpoints(found: Found) -> list[tuple[Checkpoint, bytes | None]]:
    """Steps to adopt, oldest first, with the manifest that is published on disk, if one is."""
    shards: dict[Key, dict[int, ShardPersisted]] = {}
    for inventory in found.inventories:
        for shard in inventory.disk:
            shards.setdefault((shard.step, shard.generation), {})[shard.rank] = shard
    manifests = {
        (step, generation): raw
        for inventory in found.inventories
        for step, generation, raw in inventory.manifests
    }
    adopted: dict[Key, Checkpoint] = {}
    for key, by_rank in shards.items():
        world = next(iter(by_rank.values())).world
        whole = set(by_rank) == set(range(world)) and key in manifests
        adopted[key] = Checkpoint(
            step=key[0],
            generation=key[1],
            world=world,
            shards=by_rank,
            on_disk=whole and _reads(manifests[key]),
            published=key in manifests and _reads(manifests[key]),
        )
    for commit in found.commits:
        if not commit.generation:
            continue  # of nobody knows which step
        key = (commit.step, commit.generation)
        world = commit.manifest.world if commit.manifest else 0
        known = adopted.get(key) or Checkpoint(step=key[0], generation=key[1], world=world)
        entries = commit.manifest.shards if commit.manifest else ()
        size = sum(entry.num_bytes + entry.extras_bytes for entry in entries)
        adopted[key] = replace(known, on_object=True, size=size)
    ordered = sorted(adopted.values(), key=lambda c: (c.generation, c.step))
    return [(c, manifests.get(c.key) if c.on_disk else None) for c in ordered]


def _note_holders(found: Found, by_node: Mapping[str, Sequence[Heartbeat]]) -> None:
    """Members of the newest generation that somebody alive is in; older ones have no place."""
    newest = max((beat.generation for beats in by_node.values() for beat in beats), default=0)
    found.generation = max(found.generation, newest)
    for node, beats in by_node.items():
        for beat in beats:
            if newest and beat.generation == newest:
                over = beat.phase == "done"
                (found.done if over else found.holders)[beat.rank] = beat.worker_id
                found.members.append(
                    {
                        "rank": beat.rank,
                        "worker_id": beat.worker_id,
                        "node_id": node,
                        "pid": beat.pid,
                        "newcomer": False,
                    }
                )
    found.members.sort(key=lambda member: int(member["rank"]))


def _each(
    nodes: Sequence[str] | Mapping[str, object],
    call: Callable[[str], T],
    found: Found,
    patience: Patience,
) -> dict[str, T]:
    """Ask them all at once: a rack that is away costs the time of one node."""
    answers: dict[str, T] = {}
    with ThreadPoolExecutor(max(1, min(len(nodes), ASKED_AT_ONCE))) as pool:
        asked = {
            node: pool.submit(patience.ask, f"agent {node}", partial(call, node)) for node in nodes
        }
    for node, answer in asked.items():
        try:
            answers[node] = answer.result()
        except (AgentError, PlatformError) as error:
            found.silent[f"agent {node}"] = str(error)
    return answers


def _reads(raw: bytes) -> bool:
    try:
        Manifest.from_bytes(raw)
    except ManifestError:
        return False
    return True
