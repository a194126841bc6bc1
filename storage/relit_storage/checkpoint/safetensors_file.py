"""Writing tensors of a committed step into safetensors files that other tools read.

Bytes go from the reader's chunk straight to their place in the file: memory stays at one chunk,
whatever the pieces of a tensor are, and no tensor library is needed. A piece that is cut along
more than the first dimension is written row by row. The layout is that of our own images, which
the format allows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from relit_storage.checkpoint.copy_reading import CopyReader
from relit_storage.checkpoint.image import ImageLayout, TensorSpec
from relit_storage.checkpoint.manifest_entries import TensorEntry

OnBytes = Callable[[int], None]
INDEX_SUFFIX = ".safetensors.index.json"
REPORT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor of the checkpoint under the name it gets in the file."""

    name: str
    tensor: TensorEntry

    @property
    def spec(self) -> TensorSpec:
        """Name, dtype and shape as the file has them."""
        return TensorSpec(self.name, self.tensor.dtype, self.tensor.global_shape)


def write_tensors(
    path: str,
    reader: CopyReader,
    tensors: Iterable[Named],
    metadata: Mapping[str, str],
    on_bytes: OnBytes = lambda count: None,
) -> ImageLayout:
    """Write one file, synced; `path` must be new. The layout of what was written.

    CorruptShardError at the first chunk that is not what was committed, OSError if the disk
    fails: the file is then unfinished, and the caller removes the folder.
    """
    chosen = list(tensors)
    layout = ImageLayout.plan((named.spec for named in chosen), metadata)
    begins = {named.tensor.name: layout.offset(named.name) for named in chosen}
    fd = _create(path)
    try:
        os.ftruncate(fd, layout.total_bytes)
        _write_at(fd, memoryview(layout.header), 0)
        done = 0
        for tensor, offset, block in reader.stream(named.tensor for named in chosen):
            _write_at(fd, block, begins[tensor.name] + offset)
            done += len(block)
            if done >= REPORT_BYTES:  # rows may be short, and a progress bar is slow
                on_bytes(done)
                done = 0
        on_bytes(done)
        os.fsync(fd)
    finally:
        os.close(fd)
    return layout


def write_sharded(
    folder: str,
    stem: str,
    reader: CopyReader,
    tensors: Iterable[Named],
    metadata: Mapping[str, str],
    *,
    max_file_bytes: int,
    on_bytes: OnBytes = lambda count: None,
) -> list[str]:
    """`<stem>.safetensors`, or several files and the index that names them; the file names.

    A file exceeds max_file_bytes only by a single tensor that does. Raises as `write_tensors`.
    """
    groups = _grouped(tensors, max_file_bytes)
    if len(groups) == 1:
        names = [f"{stem}.safetensors"]
    else:
        count = len(groups)
        names = [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    where: dict[str, str] = {}
    for name, group in zip(names, groups, strict=True):
        write_tensors(os.path.join(folder, name), reader, group, metadata, on_bytes)
        where |= {named.name: name for named in group}
    if len(groups) == 1:
        return names
    total = sum(named.spec.num_bytes for group in groups for named in group)
    index = {"metadata": {"total_size": total, **metadata}, "weight_map": where}
    write_json(os.path.join(folder, stem + INDEX_SUFFIX), index)
    return [*names, stem + INDEX_SUFFIX]


def write_json(path: str, data: Any) -> None:
    """A new JSON file, synced, keys in the order given; others may read it as they may the rest."""
    fd = _create(path)
    try:
        _write_at(fd, memoryview(json.dumps(data, indent=2).encode()), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _create(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _grouped(tensors: Iterable[Named], max_file_bytes: int) -> list[list[Named]]:
    """In order of name, as readers expect of numbered files; at least one group."""
    groups: list[list[Named]] = [[]]
    size = 0
    for named in sorted(tensors, key=lambda named: named.name):
        if groups[-1] and size + named.spec.num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(named)
        size += named.spec.num_bytes
    return groups


def _write_at(fd: int, block: memoryview, offset: int) -> None:
    while block:
        done = os.pwrite(fd, block, offset)
        block, offset = block[done:], offset + done
