"""Reading committed steps: boxes as runs, every byte checked, every damage named."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from saved_run import CHUNK_BYTES, Saved, Trained, make_run
from stopped_run import damage
from torch import Tensor

from relit_storage.checkpoint.copies import StepCopy, take_inventory
from relit_storage.checkpoint.copy_reading import CopyReader, in_file_order, runs_of
from relit_storage.checkpoint.manifest import Piece, TensorEntry
from relit_storage.checkpoint.verifying import newest_whole, verify_copy
from relit_storage.errors import CorruptShardError, ManifestError
from relit_storage.run.layout import log_key, step_prefix


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    run = make_run(tmp_path)
    run.commit([10, 20])
    return run


BOXES = [
    ((), (), ()),
    ((5,), (0,), (5,)),
    ((5,), (2,), (3,)),
    ((4, 6), (1, 0), (2, 6)),
    ((4, 6), (1, 2), (2, 3)),
    ((3, 4, 5), (1, 1, 0), (2, 2, 5)),
    ((3, 4, 5), (0, 2, 3), (3, 1, 2)),
    ((3, 0), (0, 0), (3, 0)),
]


@pytest.mark.parametrize(("whole", "begin", "box"), BOXES)
def test_a_box_is_the_runs_of_its_bytes(
    whole: tuple[int, ...], begin: tuple[int, ...], box: tuple[int, ...]
) -> None:
    dense = np.arange(int(np.prod(whole)), dtype="<i4").reshape(whole)
    part = dense[tuple(slice(b, b + n) for b, n in zip(begin, box, strict=True))].tobytes()
    piece = Piece(file="f", rank=0, offsets=begin, shape=box, byte_range=(64, 64 + len(part)))
    tensor = TensorEntry(name="t", dtype="I32", global_shape=whole, pieces=(piece,))
    raw, covered = dense.tobytes(), 0
    for source, target, count in runs_of(tensor, piece):
        assert raw[target : target + count] == part[source - 64 : source - 64 + count]
        covered += count
    assert covered == len(part)


def test_tensors_read_back_bit_for_bit_and_each_chunk_once(saved: Saved) -> None:
    copy = take_inventory(saved.store).copies[0]
    reader = CopyReader(copy)
    wanted, _ = Trained(20).flatten()
    chunks: list[tuple[str, int]] = []
    for tensor in in_file_order(reader.manifest.tensors):
        piece = tensor.pieces[0]
        for _ in reader.blocks(tensor):
            chunks.append(reader._chunk[:2])
        assert bytes(reader.read(tensor)) == bytes_of(wanted[tensor.name]), tensor.name
        assert piece.byte_range[0] >= CHUNK_BYTES  # images begin with a padded header
    order = [key for key, _ in itertools.groupby(chunks)]
    assert len(order) == len(set(order)) > 4


FILES = ("rank-00000.safetensors", "rank-00001.safetensors", "rank-00000.json", "manifest.json")


@pytest.mark.parametrize("how", ["deleted", "truncated", "flipped"])
@pytest.mark.parametrize("name", FILES)
def test_deep_names_exactly_the_damaged_file(saved: Saved, name: str, how: str) -> None:
    damage(saved.path(step_prefix(20, 1) + name), how)
    inventory = take_inventory(saved.store)
    found = [r for copy in inventory.copies for r in verify_copy(copy, deep=True)]
    assert [(r.step, r.file) for r in found] == [(20, step_prefix(20, 1) + name)]
    assert found[0].reason
    whole = newest_whole(inventory, deep=True, tier="object")
    assert whole is not None and whole.step == 10
    assert_never_read_wrong(inventory.copies[0], 20)


def assert_never_read_wrong(copy: StepCopy, step: int) -> None:
    """What a reader hands out of a damaged copy is right (damage between tensors), or refused."""
    wanted, _ = Trained(step).flatten()
    try:
        reader = CopyReader(copy)
    except ManifestError:
        return
    for tensor in reader.manifest.tensors:
        try:
            found = bytes(reader.read(tensor))
        except CorruptShardError:
            continue
        assert found == bytes_of(wanted[tensor.name])


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_data(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rename_tensor(path: Path) -> None:
    data = path.read_bytes()
    assert b'"model.' in data
    path.write_bytes(data.replace(b'"model.', b'"nodel.', 1))


@pytest.mark.parametrize(
    ("harm", "found"), [(truncate, True), (rename_tensor, True), (flip_data, False)]
)
def test_a_shallow_look_sees_sizes_and_headers_alone(
    saved: Saved, harm: Callable[[Path], None], found: bool
) -> None:
    harm(saved.path(step_prefix(20, 1) + "rank-00000.safetensors"))
    copy = take_inventory(saved.store).copies[0]
    assert bool(verify_copy(copy, deep=False)) is found
    assert verify_copy(copy, deep=True)


def test_shards_of_two_nodes_make_one_copy(saved: Saved, tmp_path: Path) -> None:
    from relit_storage.stores.local import LocalStore

    one, other = saved.on_disk([30], "n1"), saved.on_disk([30], "n2")
    (one / step_prefix(30, 1) / "rank-00001.safetensors").unlink()
    (other / step_prefix(30, 1) / "rank-00000.safetensors").unlink()
    disks = [LocalStore(str(one)), LocalStore(str(other))]
    newest = take_inventory(saved.store, disks).copies[0]
    assert (newest.step, newest.tier) == (30, "disk")
    assert verify_copy(newest, deep=True) == []
    alone = take_inventory(saved.store, disks[:1]).copies[0]
    assert [r.reason for r in verify_copy(alone, deep=True)] == ["is missing"]


def test_an_unreadable_slot_of_the_log_is_named(saved: Saved) -> None:
    saved.store.put(log_key(1), b"garbage")
    inventory = take_inventory(saved.store)
    assert [copy.step for copy in inventory.copies] == [20]
    assert "not a log record" in str(inventory.log_refusals[0])
