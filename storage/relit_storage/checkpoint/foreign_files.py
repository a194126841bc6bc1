"""Safetensors files of unknown origin, as Hugging Face tools lay them out, tensor by tensor.

    <stem>.safetensors                         all of it
    <stem>.safetensors.index.json              {"weight_map": {tensor: file}} over several files

Nothing in them is trusted: headers go through `parse_header`, an index names files of its own
folder only, and both sides must name the same tensors. Every refusal is a CorruptShardError.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

from relit_storage.checkpoint.durable import open_regular, read_file
from relit_storage.checkpoint.image import (
    MAX_HEADER_BYTES,
    MAX_REASON,
    ImageLayout,
    TensorSpec,
    parse_header,
)
from relit_storage.checkpoint.safetensors_file import INDEX_SUFFIX
from relit_storage.checkpoint.strict_json import load_strict
from relit_storage.errors import CorruptShardError

SUFFIX = ".safetensors"
MAX_JSON_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20  # whoever reads may still hold the last block of the tensor before
Json = dict[str, Any]


class TensorFile:
    """One open file, which costs no memory but its header until a tensor is read."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = open_regular(path)
        except OSError as error:
            refuse(path, f"cannot be opened: {error.strerror}")
        try:
            self.layout: ImageLayout = self._layout()
        except BaseException:
            os.close(self._fd)
            raise

    def blocks(self, name: str) -> Iterator[memoryview]:
        """A tensor's bytes in order, each block valid until the next. CorruptShardError."""
        begin = self.layout.offset(name)
        end = begin + self._sizes[name]
        room = memoryview(bytearray(min(BLOCK_BYTES, end - begin)))
        while begin < end:
            block = room[: min(BLOCK_BYTES, end - begin)]
            got = self._read(block, begin)
            if not got:
                refuse(self.path, f"ends at {begin}, shorter than when it was opened")
            yield block[:got]
            begin += got

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _layout(self) -> ImageLayout:
        size = os.fstat(self._fd).st_size
        first = bytearray(8)
        self._read(memoryview(first), 0)
        length = min(int.from_bytes(first, "little"), MAX_HEADER_BYTES, size)
        head = bytearray(8 + length)
        got = 0
        while got < len(head):
            count = self._read(memoryview(head)[got:], got)
            if not count:
                break
            got += count
        layout = parse_header(memoryview(head)[:got], size, self.path)
        pieces = [spec.name for spec in layout.specs if not spec.whole]
        if pieces:
            refuse(self.path, f"holds a piece of {pieces[0]!r}, one rank's of several")
        self._sizes = {spec.name: spec.num_bytes for spec in layout.specs}
        return layout

    def _read(self, room: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._fd, [room], offset)
        except OSError as error:
            refuse(self.path, f"read failed: {error.strerror}")


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """Tensors of several files under one set of names. aliases: other name -> tensor."""

    specs: Mapping[str, TensorSpec]
    aliases: Mapping[str, str]
    _files: Mapping[str, TensorFile] = field(repr=False)

    @classmethod
    def open(cls, path: str) -> Self:
        """A file, or the files that an index names. CorruptShardError.

        Close it; every file stays open until then.
        """
        opened: list[TensorFile] = []
        try:
            if path.endswith(INDEX_SUFFIX):
                names, metadata = _read_index(path)
                folder = os.path.dirname(path)
                for name in sorted(set(names.values())):
                    opened.append(TensorFile(os.path.join(folder, name)))
                return cls._joined(path, opened, names, metadata)
            opened.append(TensorFile(path))
            only = dict.fromkeys(opened[0].layout.offsets, os.path.basename(path))
            return cls._joined(path, opened, only, opened[0].layout.metadata)
        except BaseException:
            for file in opened:
                file.close()
            raise

    @classmethod
    def _joined(
        cls,
        path: str,
        opened: Sequence[TensorFile],
        names: Mapping[str, str],
        metadata: Mapping[str, Any],
    ) -> Self:
        files: dict[str, TensorFile] = {}
        specs: dict[str, TensorSpec] = {}
        for file in opened:
            for spec in file.layout.specs:
                if spec.name in files:
                    refuse(path, f"tensor {spec.name!r} is in two of its files")
                if names.get(spec.name) != os.path.basename(file.path):
                    where = os.path.basename(file.path)
                    refuse(path, f"does not say that {spec.name!r} is in {where}, where it is")
                files[spec.name], specs[spec.name] = file, spec
        lost = sorted(names.keys() - specs.keys())
        if lost:
            refuse(path, f"{lost[0]!r} is not in {names[lost[0]]}")
        if not specs:
            refuse(path, "holds no tensor")
        # As safetensors' own save_model writes tied weights: {other name: the one that is kept}.
        aliases = {
            name: kept
            for name, kept in metadata.items()
            if isinstance(kept, str) and kept in specs and name not in specs
        }
        return cls(specs, aliases, files)

    def blocks(self, name: str) -> Iterator[memoryview]:
        """See `TensorFile.blocks`."""
        return self._files[name].blocks(name)

    def close(self) -> None:
        """Close all files. Safe to repeat."""
        for file in {id(file): file for file in self._files.values()}.values():
            file.close()


def find_tensor_files(folder: str) -> str:
    """The file or index of a folder to open, "" if it holds none. CorruptShardError if unclear.

    model.safetensors goes first, as it does in transformers; else there must be one index, or one
    file. relit's own state.safetensors is no model.
    """
    names = [name for name in sorted(os.listdir(folder)) if name != f"state{SUFFIX}"]
    for name in (f"model{SUFFIX}", f"model{INDEX_SUFFIX}"):
        if name in names:
            return os.path.join(folder, name)
    for suffix in (INDEX_SUFFIX, SUFFIX):
        found = [name for name in names if name.endswith(suffix)]
        if len(found) > 1:
            refuse(folder, f"holds {found[0]}, {found[1]}, ...; name one of them")
        if found:
            return os.path.join(folder, found[0])
    return ""


def read_json(path: str) -> Json:
    """A JSON object of unknown origin: no name twice, no NaN. CorruptShardError."""
    try:
        raw = read_file(path, MAX_JSON_BYTES)
        data = load_strict(raw.decode())
    except OSError as error:
        refuse(path, f"cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        refuse(path, f"does not parse: {error}")
    if not isinstance(data, dict):
        refuse(path, "is not a JSON object")
    return data


def refuse(file: str, reason: str) -> NoReturn:
    """Raise the CorruptShardError that all of this module raises."""
    raise CorruptShardError(file=file, reason=reason[:MAX_REASON])


def _read_index(path: str) -> tuple[dict[str, str], Json]:
    data = read_json(path)
    names, metadata = data.get("weight_map"), data.get("metadata", {})
    if not isinstance(names, dict) or not names or not isinstance(metadata, dict):
        refuse(path, "is no index: it has no weight_map")
    for file in names.values():
        # A link is followed, for the hub's cache is made of them; a path is not.
        plain = isinstance(file, str) and file.endswith(SUFFIX) and "\0" not in file
        if not plain or file != os.path.basename(file):
            refuse(path, f"names the file {file!r}, which is none of its own folder")
    return names, metadata
