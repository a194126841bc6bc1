"""Process groups over real processes: forming, collectives, and what a dead or hung peer does.

Also the state that travels over them (broadcast.py).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import HOST, Ranks, assignment, num_threads, threads_left

from relit_platform.errors import CollectiveBrokenError, ReplicasDivergedError
from relit_platform.worker import broadcast
from relit_platform.worker.broadcast import (
    agree,
    gather_values,
    receive_state,
    send_state,
    state_digest,
)
from relit_platform.worker.process_group import Group, close_group, form_group, open_rendezvous


def alone() -> Group:
    return form_group(assignment(0, 1, (HOST, 0)), None, 1.0)


def form(rank: int, world: int, endpoint: tuple[str, int], timeout_s: float = 30.0) -> Group:
    return form_group(assignment(rank, world, endpoint), None, timeout_s)


def test_a_group_of_one_needs_no_transport() -> None:
    group, tensor = alone(), torch.ones(3)
    group.wait(group.all_reduce(tensor))
    assert torch.equal(group.all_gather(tensor)[0], tensor)
    agree(group, {"step": 3})
    assert close_group(group)


def test_the_rendezvous_store_listens_on_its_host_only() -> None:
    store, (host, port) = open_rendezvous(HOST)
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = [line.split() for line in Path(table).read_text().splitlines()]
        listening += [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    assert host == HOST
    assert listening == [f"0100007F:{port:04X}"]
    del store
    with pytest.raises(OSError), socket.create_connection((HOST, port), timeout=1):
        pass


def test_a_member_that_does_not_come_breaks_the_forming_in_time() -> None:
    store, endpoint = open_rendezvous(HOST)
    began_s = time.monotonic()
    with pytest.raises(CollectiveBrokenError, match="forming"):
        form_group(assignment(0, 2, endpoint), store, 30.0, forming_timeout_s=0.5)
    assert time.monotonic() - began_s < 5
    del store


def test_an_endpoint_where_nobody_listens_breaks_the_forming() -> None:
    store, endpoint = open_rendezvous(HOST)
    del store
    with pytest.raises(CollectiveBrokenError):
        form_group(assignment(1, 2, endpoint), None, 30.0, forming_timeout_s=0.5)


def collectives(rank: int, world: int, endpoint: tuple[str, int], line: Any) -> None:
    before = num_threads()
    group = form(rank, world, endpoint)
    tensor = torch.full((5,), float(rank + 1))
    group.wait(group.all_reduce(tensor))
    values = gather_values(group, [rank, -rank])
    agree(group, {"step": 5, "digest": -1})
    try:
        agree(group, {"step": 5, "cursor": rank * 10})
        diverged: Any = None
    except ReplicasDivergedError as error:
        diverged = error.fields
    closed = close_group(group)
    line.send((tensor.tolist(), values, diverged, closed, threads_left(before)))
    line.recv()


def test_collectives_of_three_ranks_and_no_thread_is_left() -> None:
    with Ranks(collectives, 3) as ranks:
        for reduced, values, diverged, closed, threads in ranks.answers():
            assert reduced == [6.0] * 5
            assert values == ((0, 0), (1, -1), (2, -2))
            assert diverged == {"what": "cursor", "values": {0: 0, 1: 10, 2: 20}}
            assert closed
            assert threads == 0


def survive(rank: int, world: int, endpoint: tuple[str, int], line: Any) -> None:
    """All-reduce until the peer is gone; then leave, and form the next generation alone with 2."""
    before = num_threads()
    group = form(rank, world, endpoint)
    line.send("running")
    tensor = torch.ones(1 << 18)
    try:
        while True:
            group.wait(group.all_reduce(tensor))
    except CollectiveBrokenError as error:
        caught_s = time.time()
        fields = error.fields
    closing_s = time.time()
    closed = close_group(group)
    closed_s = time.time() - closing_s
    line.send((caught_s, fields, closed, closed_s, threads_left(before)))
    store, fresh = open_rendezvous(HOST)
    line.send(fresh)
    began_s = time.time()
    again = form_group(assignment(0, world, fresh, generation=2), store, 30.0)
    again.wait(again.all_reduce(torch.ones(4)))
    line.send(time.time() - began_s)
    line.recv()


def newcomer(rank: int, world: int, endpoint: tuple[str, int], line: Any) -> None:
    line.send("ready")
    fresh = line.recv()
    group = form_group(assignment(1, world, fresh, generation=2), None, 30.0)
    group.wait(group.all_reduce(torch.ones(4)))
    line.recv()


def test_a_killed_peer_is_noticed_at_once_and_a_new_group_forms() -> None:
    with Ranks(survive) as ranks, Ranks(newcomer) as spare:
        assert ranks.answers() == ["running", "running"]
        assert spare.ask(1) == "ready"
        time.sleep(0.2)
        killed_s = ranks.kill(1)
        caught_s, fields, closed, closed_s, threads = ranks.ask(0)
        assert fields["generation"] == 1
        assert fields["rank"] == 0
        assert caught_s - killed_s < 1.0  # 0.02 s alone; the machine may be busy
        assert closed
        assert closed_s < 0.5
        assert threads == 0
        spare.tell(1, ranks.ask(0))
        assert ranks.ask(0) < 2.0


def hang(rank: int, world: int, endpoint: tuple[str, int], line: Any) -> None:
    group = form(rank, world, endpoint, timeout_s=2.0)
    line.send(os.getpid())
    line.recv()
    work = group.all_reduce(torch.ones(1 << 20))
    began_s = time.monotonic()
    at_once = close_group(group, timeout_s=0.1)
    closed_s = time.monotonic() - began_s
    with pytest.raises(CollectiveBrokenError):
        group.wait(work)
    line.send((at_once, closed_s, time.monotonic() - began_s, group.closed))
    line.recv()


def test_closing_is_bounded_when_a_peer_hangs() -> None:
    with Ranks(hang) as ranks:
        pids = ranks.answers()
        os.kill(pids[1], signal.SIGSTOP)
        ranks.tell(0, "go")
        at_once, closed_s, waited_s, closed = ranks.ask(0)
        assert not at_once
        assert closed_s < 1.0
        assert 1.0 < waited_s < 10.0
        assert closed


def state(seed: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(1000, 7, generator=source).t(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "half": torch.ones(5, dtype=torch.bfloat16),
    }


def travel(rank: int, world: int, endpoint: tuple[str, int], line: Any) -> None:
    broadcast.PACK_BYTES = 4096  # many buffers, and tensors larger than one
    group = form(rank, world, endpoint)
    if rank == 0:
        sent = send_state(group, [1, 2], state(0), {"step": 7, "name": "é"})
        line.send((state_digest(state(0)), sent))
    else:
        tensors, message = receive_state(group, 0)
        same = all(torch.equal(tensors[name], tensor) for name, tensor in state(0).items())
        line.send((state_digest(tensors), message, same))
    line.recv()


def test_state_travels_whole_to_several_ranks() -> None:
    with Ranks(travel, 3) as ranks:
        digest, sent = ranks.ask(0)
        assert sent == 28_000 + 8 + 3 + 10
        for rank in (1, 2):
            assert ranks.ask(rank) == (digest, {"step": 7, "name": "é"}, True)


def half_sent(rank: int, world: int, endpoint: tuple[str, int], line: Any) -> None:
    group = form(rank, world, endpoint)
    line.send("ready")
    if rank == 0:
        line.recv()
    try:
        receive_state(group, 0)
    except CollectiveBrokenError as error:
        line.send(error.operation)


def test_a_holder_that_dies_while_sending_breaks_the_receiver() -> None:
    with Ranks(half_sent) as ranks:
        assert ranks.answers() == ["ready", "ready"]
        ranks.kill(0)
        assert ranks.ask(1) == "receive"


def test_the_digest_depends_on_names_shapes_and_bytes() -> None:
    one = torch.arange(4.0)
    digests = {
        state_digest({"a": one}),
        state_digest({"b": one}),
        state_digest({"a": one.view(2, 2)}),
        state_digest({"a": one.flip(0)}),
        state_digest({"a": one, "b": one}),
        state_digest({}),
    }
    assert len(digests) == 6
    assert state_digest({"a": one, "b": one}) == state_digest({"b": one, "a": one.clone()})
