"""What torch has written, read without running any of it: torch.save files and DCP folders.

A torch.save file goes through torch's weights-only loader, mapped where it can be: what it would
have to unpickle is refused by name. torch's own loaders look at no checksum, so each record of the
archive is held against the CRC that torch.save has put there. torch is imported when the first
function runs; `relit.dcp_import` reads torch.distributed.checkpoint folders.
"""

from __future__ import annotations

import contextlib
import io
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
    return _source(kind, path, folder.state, naming, folder.blocks)


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
) -> Source:
    from relit_platform.worker.state_tree import Flattening, dtype_name

    if not isinstance(state, dict) or not all(type(key) is str for key in state):
        refuse(path, f"holds a {type(state).__name__}, not a dictionary of states by name")
    objects = {naming.flat(): state} if _is_flat(state) else naming.applied(state)
    walk = Flattening()
    try:
        skeleton = {name: walk.encode(value, name, 0) for name, value in objects.items()}
    except NotSavableError as error:
        refuse(path, f"{error.fields['path']} is a {error.fields['type_name']}", error)
    if not walk.tensors:
        refuse(path, "holds no tensor")
    tensors: Mapping[str, Tensor] = walk.tensors
    return Source(
        format=kind,
        objects=skeleton,
        specs=tuple(TensorSpec(n, dtype_name(t), tuple(t.shape)) for n, t in tensors.items()),
        blocks=lambda spec: read(tensors[spec.name]),
    )


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
    if begin + count > os.fstat(fd).st_size:
        refuse(path, f"ends before {begin + count}, where a part of it should end")
    try:
        raw = io.BytesIO(os.pread(fd, count, begin))
    except OSError as error:
        refuse(path, f"cannot be read: {error.strerror}")
    check_archive(raw, path)
    raw.seek(0)
    return load_safely(raw, path)


def refuse(path: str, reason: str, cause: BaseException | None = None) -> NoReturn:
    """Raise SourceRefusedError; a reason quotes the file, which may quote without end."""
    raise SourceRefusedError(file=path, reason=reason[:MAX_REASON]) from cause
