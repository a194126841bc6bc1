"""The manager's process: the real Coordinator, killed and re-created at any call it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sim_clock import Clock
from sim_node import SimNode

from relit_platform.control.coordinator import Coordinator
from relit_platform.control.object_tier import ObjectTier
from relit_platform.facts import Endpoint, Heartbeat, NodeInventory, Tier
from relit_platform.run_config import RunConfig
from relit_storage.checkpoint import commit_log
from relit_storage.checkpoint.commit_log import CommitLog
from relit_storage.errors import StoreUnavailableError
from relit_storage.stores.memory import MemoryStore

# One thread, or chance would be drawn in another order each time.
commit_log.get_many = lambda store, keys: [store.get(key) for key in keys]  # type: ignore[attr-defined]


class ManagerDiedError(BaseException):
    """Not an Exception: nothing in the coordinator may survive it."""


class FaultyStore:
    """A MemoryStore that is sometimes away, before or after a call has had its effect."""

    def __init__(self, clock: Clock, inner: MemoryStore) -> None:
        self._clock = clock
        self._inner = inner
        self.down_until_s = 0.0
        self.failure_rate = 0.0

    @property
    def url(self) -> str:
        return self._inner.url

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            cause = StoreUnavailableError(url=self.url, key=str(args[0]), cause="simulated")
            flaky = self._clock.chance(self.failure_rate)
            if self._clock.now < self.down_until_s or (flaky and self._clock.chance(0.5)):
                raise cause
            answer = getattr(self._inner, verb)(*args)
            if flaky:
                raise cause  # it happened, and the answer was lost
            return answer

        return call


class SimAgents:
    """AgentPort: calls that may not arrive, may lose their answer, or end the caller."""

    def __init__(self, manager: SimManager) -> None:
        self._manager = manager

    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted(self._manager.nodes))

    def lost_nodes(self) -> frozenset[str]:
        return frozenset()

    def inventory(self, node_id: str) -> NodeInventory:
        found: NodeInventory = self._call(node_id, "inventory")
        return found

    def rows_beside(self, node_id: str, path: str) -> tuple[dict[str, Any], ...]:
        raise AssertionError("asked for by runs that end early; these do not")

    def heartbeats(self, node_id: str) -> Sequence[Heartbeat]:
        found: Sequence[Heartbeat] = self._call(node_id, "heartbeats")
        return found

    def publish(self, node_id: str, step: int, generation: int, manifest: bytes) -> None:
        self._call(node_id, "publish", step, generation, manifest)

    def persist(
        self, node_id: str, worker_id: str, path: str, step: int, generation: int, epoch: int
    ) -> None:
        raise AssertionError("asked for by runs that end early; these do not")

    def upload(self, node_id: str, step: int, generation: int, ranks: Sequence[int]) -> None:
        self._call(node_id, "upload", step, generation, list(ranks))

    def seal(self, node_id: str, epoch: int, generation: int) -> None:
        self._call(node_id, "seal", epoch, generation)

    def drop(self, node_id: str, steps: Sequence[tuple[int, int]], tier: Tier) -> None:
        self._call(node_id, "drop", list(steps), tier)

    def set_stop(self, node_id: str, number: int) -> None:
        self._manager.nodes[node_id].reach()

    def listen(self, node_id: str, secret: bytes, epoch: int) -> Endpoint:
        raise AssertionError("asked for from two nodes on; here is one")

    def set_peer(self, node_id: str, peer: str, endpoint: Endpoint | None, epoch: int) -> None:
        assert endpoint is None, "there is no other node to give to"
        self._manager.nodes[node_id].reach()

    def _call(self, node_id: str, verb: str, *args: Any) -> Any:
        manager = self._manager
        node = manager.nodes[node_id]
        manager.perhaps_die()
        node.reach()
        answer = getattr(node, verb)(*args)
        manager.perhaps_die()
        if manager.clock.chance(0.02) and verb != "seal":
            node.cut_until_s = manager.clock.now + 0.3
            node.reach()  # the answer is lost
        return answer


class SimManager:
    """`call` is how everybody else reaches it: ConnectionError while it is away."""

    def __init__(self, clock: Clock, config: RunConfig, store: FaultyStore) -> None:
        self.clock = clock
        self.nodes: dict[str, SimNode] = {}
        self.life = 0
        self.die_at_call = -1
        self._config = config
        self._store = store
        self._coordinator: Coordinator | None = None
        self._start()

    @property
    def alive(self) -> bool:
        return self._coordinator is not None

    def call(self, method: str, *args: Any) -> Any:
        if self._coordinator is None:
            raise ConnectionError(method)
        try:
            return getattr(self._coordinator, method)(*args)
        except ManagerDiedError:
            raise ConnectionError(method) from None

    def kill(self) -> None:
        if self._coordinator is not None:
            self.clock.say("manager dies")
            self._coordinator = None
            self.life += 1
            self.clock.after(self.clock.between(0.2, 2.0), self._start)

    def perhaps_die(self) -> None:
        """Called before and after every call to an agent: the countdown that ends it in between."""
        if self._coordinator is None:
            raise ManagerDiedError
        if self.die_at_call >= 0:
            self.die_at_call -= 1
            if self.die_at_call < 0:
                self.kill()
                raise ManagerDiedError

    # ---- BackgroundPort ----

    def submit(self, work: Callable[[], None], delay_s: float = 0.0) -> None:
        life = self.life

        def run() -> None:
            if life != self.life:
                return
            try:
                work()
            except ManagerDiedError:
                pass  # its process is gone, and what it was doing with it

        self.clock.after(delay_s + self.clock.between(0.001, 0.02), run)

    def close(self) -> None:
        """Nothing to close: work of a dead life is never run."""

    def _start(self) -> None:
        self._coordinator = Coordinator(
            config=self._config,
            agents=SimAgents(self),
            objects=ObjectTier(self._store, CommitLog(self._store), lambda: self.clock.now),
            background=self,
            clock=lambda: self.clock.now,
            steady=lambda: self.clock.now,
            sleep=_not_now,
        )
        self.clock.say("manager begins")


def _not_now(seconds: float) -> None:
    """A call that would wait ends here; its caller makes it again, as after a lost answer."""
    raise ConnectionError
