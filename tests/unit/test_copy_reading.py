"""Reading committed steps, whole or in pieces: every byte checked, every damage named."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from cut_state import SPLITS
from saved_run import CHUNK_BYTES, Saved, Trained, make_run
from stopped_run import damage
from torch import Tensor

from relit_storage.checkpoint.copies import StepCopy, take_inventory
from relit_storage.checkpoint.copy_reading import CopyReader, in_file_order
from relit_storage.checkpoint.manifest_entries import ShardEntry
from relit_storage.checkpoint.verifying import newest_whole, verify_copy
from relit_storage.errors import CorruptShardError, ManifestError
from relit_storage.run.layout import log_key, step_prefix


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    run = make_run(tmp_path)
    run.commit([10, 20])
    return run


class Counting(CopyReader):
    """Remembers every chunk that was read."""

    def __init__(self, copy: StepCopy) -> None:
        super().__init__(copy)
        self.read_chunks: list[tuple[int, int]] = []

    def chunk(self, shard: ShardEntry, index: int) -> memoryview:
        self.read_chunks.append((shard.rank, index))
        return super().chunk(shard, index)

    def assert_each_chunk_once(self) -> None:
        assert len(self.read_chunks) == len(set(self.read_chunks)) > 4


@pytest.mark.parametrize("split", SPLITS)
def test_tensors_read_back_bit_for_bit(saved: Saved, split: str) -> None:
    saved.commit([40], split=SPLITS[split])
    copy = take_inventory(saved.store).copies[0]
    reader, wanted = Counting(copy), Trained(40).flatten()[0]
    assert {tensor.name for tensor in reader.manifest.tensors} == wanted.keys()
    for tensor in in_file_order(reader.manifest.tensors):
        assert bytes(reader.read(tensor)) == bytes_of(wanted[tensor.name]), tensor.name
    if "boxes" not in split:  # ranks that have their tensors in the same order
        reader.assert_each_chunk_once()
    assert verify_copy(copy, deep=True) == []


@pytest.mark.parametrize("split", SPLITS)
def test_a_stream_reads_each_chunk_once(saved: Saved, split: str) -> None:
    saved.commit([40], split=SPLITS[split])
    reader = Counting(take_inventory(saved.store).copies[0])
    wanted = {name: bytes_of(tensor) for name, tensor in Trained(40).flatten()[0].items()}
    found = {name: bytearray(len(data)) for name, data in wanted.items()}
    for tensor, offset, block in reader.stream(reader.manifest.tensors):
        assert len(block) <= CHUNK_BYTES
        found[tensor.name][offset : offset + len(block)] = block
    assert {name: bytes(data) for name, data in found.items()} == wanted
    reader.assert_each_chunk_once()
    chosen = [tensor for tensor in reader.manifest.tensors if tensor.name.startswith("model.")]
    names = {tensor.name for tensor, _, _ in reader.stream(chosen)}
    assert names == {tensor.name for tensor in chosen}


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


@pytest.mark.parametrize("how", ["deleted", "truncated", "flipped"])
def test_a_damaged_piece_is_named_and_never_read_wrong(saved: Saved, how: str) -> None:
    saved.commit([40], split=SPLITS["mesh 2x2"])
    file = step_prefix(40, 1) + "rank-00003.safetensors"
    damage(saved.path(file), how)
    copy = take_inventory(saved.store).copies[0]
    assert [refusal.file for refusal in verify_copy(copy, deep=True)] == [file]
    assert_never_read_wrong(copy, 40)


def headers_with_one_lie(image: bytes) -> Iterator[bytes]:
    """The image again and again, each time with one number of one listed piece changed."""
    size = int.from_bytes(image[:8], "little")
    header = json.loads(image[8 : 8 + size])
    listing = json.loads(header["__metadata__"]["relit.pieces"])
    for name in listing:
        for field in ("global_shape", "offsets"):
            for dim, change in itertools.product(range(len(listing[name][field])), (-1, 1)):
                lie = deepcopy(listing)
                lie[name][field][dim] += change
                text = json.dumps(lie, sort_keys=True, separators=(",", ":"))
                lying = {**header, "__metadata__": {"format": "pt", "relit.pieces": text}}
                data = json.dumps(lying).encode().ljust(size)
                yield len(data).to_bytes(8, "little") + data + image[8 + size :]


def test_a_header_that_lies_about_a_piece_is_refused_even_by_a_shallow_look(saved: Saved) -> None:
    """A header may be legal by itself: the manifest says the same, or it is refused."""
    tensors = {"a": torch.arange(30.0).view(5, 6), "b": torch.arange(7.0)}
    saved.commit([40], state=(tensors, {}), split=SPLITS["3 ranks"])
    found = take_inventory(saved.store).copies[0]
    assert verify_copy(found, deep=False) == []
    path = saved.path(step_prefix(40, 1) + "rank-00001.safetensors")
    image, count = path.read_bytes(), 0
    for lying in headers_with_one_lie(image):
        assert len(lying) == len(image)
        path.write_bytes(lying)
        refused = verify_copy(found, deep=False)
        assert [refusal.file for refusal in refused] == [step_prefix(40, 1) + path.name]
        count += 1
    assert count == 12
