"""Signs of life and orders through shared memory."""

import os
import threading
from pathlib import Path

import pytest

from relit_platform.node.heartbeat import ControlPage, HeartbeatPage, Phase
from relit_storage.errors import CorruptShardError


def test_a_beat_is_read_elsewhere(tmp_path: Path) -> None:
    path = str(tmp_path / "w0")
    reader = HeartbeatPage.create(path, pid=77)
    first = reader.read("w0")
    assert (first.pid, first.phase, first.step) == (77, "start", 0) and first.at_s > 1e9
    for phase in Phase:
        HeartbeatPage.open(path).beat(
            rank=2, generation=3, step=4, phase=phase.name, at_ns=5_000_000_000
        )
        beat = reader.read("w0")
        assert (beat.rank, beat.generation, beat.step) == (2, 3, 4)
        assert (beat.phase, beat.at_s, beat.worker_id) == (phase.name, 5.0, "w0")


def test_creating_again_keeps_the_content(tmp_path: Path) -> None:
    path = str(tmp_path / "w0")
    HeartbeatPage.create(path, 77).beat(rank=1, generation=1, step=9, phase="data")
    assert HeartbeatPage.create(path, 77).read("w0").step == 9


def test_an_unknown_phase_is_an_error_of_the_writer(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        HeartbeatPage.create(str(tmp_path / "w0"), 1).beat(
            rank=0, generation=0, step=0, phase="lunch"
        )


def test_readers_never_see_a_mix(tmp_path: Path) -> None:
    path = str(tmp_path / "w0")
    writer, reader, stop = HeartbeatPage.create(path, 1), HeartbeatPage.open(path), [False]

    def write() -> None:
        count = 0
        while not stop[0]:
            count += 1
            writer.beat(rank=count, generation=count, step=count, phase="data", at_ns=count)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(3000):
            beat = reader.read("w0")
            assert beat.rank == beat.generation == beat.step
    finally:
        stop[0] = True
        thread.join()


def test_orders_reach_every_mapping(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    agent, worker = ControlPage.create(path), ControlPage.open(path)
    assert (worker.stop_requested, worker.draining) == (0, False)
    agent.set_stop(12)
    agent.set_draining(True)
    assert (worker.stop_requested, worker.draining) == (12, True)
    assert ControlPage.create(path).stop_requested == 12
    agent.set_stop(0)
    assert worker.stop_requested == 0
    worker.close()


@pytest.mark.parametrize("data", [b"", b"x" * 4096, b"x" * 5000])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "page"
    path.write_bytes(data)
    for kind in (HeartbeatPage, ControlPage):
        with pytest.raises(CorruptShardError):
            kind.open(str(path))


def test_pages_are_private(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    ControlPage.create(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
