"""What torch has written, read without running any of it: torch.save files and DCP folders.

A torch.save file goes through torch's weights-only loader, mapped where it can be: what it would
have to unpickle is refused by name. torch's own loaders look at no checksum, so each record of the
archive is held against the CRC that torch.save has put there. torch is imported when the first
function runs; `relit.dcp_import` reads torch.distributed.checkpoint folders.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, NoReturn

from relit.errors import PickleRefusedError, SourceRefusedError
from relit.import_source import Format, Naming, OnBytes, Source
from relit_platform.errors import NotSavableError
from relit_platform.worker.skeleton import EXTRA_STATE
from relit_storage.checkpoint.durable import open_regular
from relit_storage.checkpoint.foreign_files import BLOCK_BYTES
from relit_storage.checkpoint.image import MAX_REASON, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

MAX_VALUES = 2_000_000
TEXT_CHARS = 64  # text counts once more for each so many
_MAX_NESTING = 100  # what is deeper is refused by the walk that makes the skeleton
_ZIP_MAGIC = b"PK\x03\x04"
# How torch's weights-only loader says what it refuses.
_GLOBALS = (
    re.compile(r"GLOBAL (\S+) was not an allowed global"),
    re.compile(r"unsupported GLOBAL (\S+) whose module"),
    re.compile(r"unrecognized function <[^>]*?([\w.]+)(?: at \w+)?>"),
    re.compile(r"``(\S+?)`` must be imported"),
)


def open_torch(
    kind: Format, path: str, naming: Naming, stack: contextlib.ExitStack, on_bytes: OnBytes
) -> Source:
    """The source that a torch.save file or, for kind "dcp", a folder is. SourceRefusedError."""
    if kind == "torch":
        return _source(kind, path, load_file(path, on_bytes), naming, bytes_of)
    from relit.dcp_import import DcpFolder

    folder = DcpFolder(path)
    stack.callback(folder.close)
    return _source(kind, path, folder.state, naming, folder.blocks, folder.is_loaded)


def load_file(path: str, on_bytes: OnBytes = lambda count: None) -> Any:
    """What a file of torch.save holds; its tensors are views of the mapped file where possible."""
    try:
        with open(open_regular(path), "rb") as file:
            mapped = check_archive(file, path, on_bytes)
    except OSError as error:
        refuse(path, f"cannot be read: {error.strerror}")
    return load_safely(path, path, mmap=mapped)


def load_safely(file: str | IO[bytes], path: str, *, mmap: bool = False) -> Any:
    """torch.load without unpickling; path names the file in the error. SourceRefusedError."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of archives that are refused a line later
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch's readers let through whatever damaged bytes lead to
        for pattern in _GLOBALS:
            if found := pattern.search(str(error)):
                raise PickleRefusedError(file=path, name=found.group(1)) from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        refuse(path, f"torch cannot load it: {lines[0]}", error)


def check_archive(file: IO[bytes], path: str, on_bytes: OnBytes = lambda count: None) -> bool:
    """True for a sound archive of torch.save, False for its older format, which is none.

    Each record must be there once, stored as it is, and have its CRC. SourceRefusedError.
    """
    magic = file.read(len(_ZIP_MAGIC))
    file.seek(0)
    if magic != _ZIP_MAGIC:
        return False
    try:
        with zipfile.ZipFile(file) as archive:
            _check_records(archive, path, on_bytes)
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, RuntimeError) as error:
        refuse(path, f"is a damaged archive: {error}", error)
    return True


def _check_records(archive: zipfile.ZipFile, path: str, on_bytes: OnBytes) -> None:
    seen: set[str] = set()
    for record in archive.infolist():
        if record.filename in seen:
            refuse(path, f"holds the record {record.filename!r} twice")
        if record.compress_type != zipfile.ZIP_STORED:
            refuse(
                path, f"the record {record.filename!r} is compressed; torch.save compresses none"
            )
        seen.add(record.filename)
        with archive.open(record) as stored:
            while block := stored.read(BLOCK_BYTES):
                on_bytes(len(block))


def _source(
    kind: Format,
    path: str,
    state: Any,
    naming: Naming,
    read: Callable[[Tensor], Iterator[memoryview]],
    is_loaded: Callable[[Tensor], bool] = lambda tensor: True,
) -> Source:
    from relit_platform.worker.state_tree import Flattening, dtype_name

    if not isinstance(state, dict) or not all(type(key) is str for key in state):
        refuse(path, f"holds a {type(state).__name__}, not a dictionary of states by name")
    _check_count(path, state)
    objects = {naming.flat(): state} if _is_flat(state) else naming.applied(state)
    walk = Flattening()
    try:
        skeleton = {name: walk.encode(value, name, 0) for name, value in objects.items()}
    except NotSavableError as error:
        refuse(path, f"{error.fields['path']} is a {error.fields['type_name']}", error)
    if not walk.tensors:
        refuse(path, "holds no tensor")
    tensors: Mapping[str, Tensor] = walk.tensors
    for name, tensor in tensors.items():
        if is_loaded(tensor) and (reason := tensor_fault(tensor)):
            refuse(path, f"{name} {reason}")
    return Source(
        format=kind,
        objects=skeleton,
        specs=tuple(TensorSpec(n, dtype_name(t), tuple(t.shape)) for n, t in tensors.items()),
        blocks=lambda spec: read(tensors[spec.name]),
    )


def _check_count(path: str, state: Any) -> None:
    """A list that holds another ten times, which holds another ten times, is short in a file, and
    has no end once each is written where it occurs.
    """
    left = MAX_VALUES
    levels: list[Iterator[Any]] = [iter((state,))]
    while levels:
        for value in levels[-1]:
            left -= 1 + (len(value) // TEXT_CHARS if isinstance(value, str) else 0)
            if left < 0:
                refuse(
                    path,
                    f"holds more than {MAX_VALUES} values, those of a list once for each place "
                    "where it occurs; save it without them",
                )
            inner = _items(value) if len(levels) < _MAX_NESTING else None
            if inner is not None:
                levels.append(inner)
                break
        else:
            levels.pop()


def _items(value: Any) -> Iterator[Any] | None:
    if isinstance(value, dict):
        return itertools.chain(value.keys(), value.values())
    return iter(value) if isinstance(value, (list, tuple)) else None


def tensor_fault(tensor: Tensor) -> str:
    """Why a tensor that was loaded is not taken, or "". Touches none of its bytes."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"is a tensor of {tensor.layout}, and dense ones alone are kept"
    if tensor.device.type != "cpu":
        return f"lies on {tensor.device}: the file has no bytes of it"
    there = tensor.untyped_storage().nbytes()
    if tensor.nbytes > there:
        return (
            f"is an expanded view, {tensor.nbytes} bytes made of {there}; save its clone() instead"
        )
    return ""


def _is_flat(state: Mapping[str, Any]) -> bool:
    """A module's own state_dict, as opposed to states by name."""
    from torch import Tensor

    values = [value for key, value in state.items() if not key.endswith(EXTRA_STATE)]
    return bool(values) and all(isinstance(value, Tensor) for value in values)


def bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The dense bytes of a CPU tensor; one that is not dense is copied, alone."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel():
        raw = flat.view(torch.uint8).numpy().data
        for begin in range(0, len(raw), BLOCK_BYTES):
            yield raw[begin : begin + BLOCK_BYTES]


def load_slice(fd: int, begin: int, count: int, path: str) -> Any:
    """What a torch.save in the middle of a file holds. SourceRefusedError."""
    end = begin + count
    raw = io.BytesIO()
    try:
        if end > os.fstat(fd).st_size:
            refuse(path, f"ends before {end}, where a part of it should end")
        while begin < end:  # a read gives 2 GiB at most, and may give less
            block = os.pread(fd, min(BLOCK_BYTES, end - begin), begin)
            if not block:
                refuse(path, f"ends at {begin}, shorter than when it was opened")
            begin += raw.write(block)
    except OSError as error:
        refuse(path, f"cannot be read: {error.strerror}")
    raw.seek(0)
    check_archive(raw, path)
    raw.seek(0)
    return load_safely(raw, path)


def refuse(path: str, reason: str, cause: BaseException | None = None) -> NoReturn:
    """Raise SourceRefusedError; a reason quotes the file, which may quote without end."""
    raise SourceRefusedError(file=path, reason=reason[:MAX_REASON]) from cause
