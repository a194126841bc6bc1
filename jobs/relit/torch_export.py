"""The two exports that torch itself writes, from a mapped scratch file.

torch.save and torch.distributed.checkpoint want the whole state as tensors. The scratch file beside
their output costs its size on disk for a while; the tensors are views of its pages, so that memory
holds no second copy of the state. torch is imported when the first function runs.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from relit.errors import BadInputError
from relit_platform.errors import StateError
from relit_storage.checkpoint.copy_reading import CopyReader
from relit_storage.checkpoint.image import ImageLayout
from relit_storage.checkpoint.manifest_entries import TensorEntry
from relit_storage.checkpoint.safetensors_file import Named, write_tensors
from relit_storage.errors import CorruptShardError

if TYPE_CHECKING:
    from torch import Tensor

TORCH_FILE = "checkpoint.pt"
_SCRATCH = ".scratch.safetensors"


def write_with_torch(
    reader: CopyReader,
    objects: Mapping[str, Any],
    tensors: Iterable[TensorEntry],
    folder: str,
    to: str,
    on_bytes: Callable[[int], None],
) -> None:
    """Write `objects` as torch.save (to="torch") or torch.distributed.checkpoint has them; blocks.

    CorruptShardError; OSError, also where torch's writers wrap one; BadInputError for a dtype that
    torch does not have. Then the caller removes the folder.
    """
    import torch

    from relit_platform.worker.state_tree import unflatten

    scratch = os.path.join(folder, _SCRATCH)
    named = [Named(tensor.name, tensor) for tensor in tensors]
    layout = write_tensors(scratch, reader, named, {}, on_bytes)
    try:
        state = unflatten(_mapped(scratch, layout), dict(objects))
    except StateError as error:
        extras = reader.manifest.shard(0).extras_file
        raise CorruptShardError(file=extras, reason=str(error)) from error
    if to == "torch":
        path = os.path.join(folder, TORCH_FILE)
        with open(path, "xb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:
                _raise_disk_error(error)
                raise
            file.flush()
            os.fsync(file.fileno())
    else:
        _save_dcp(state, folder)
    os.unlink(scratch)


def _save_dcp(state: Mapping[str, Any], folder: str) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(folder, thread_count=1, sync_files=True)
    with warnings.catch_warnings():
        # It says that this is a single process, which is what no_dist asks for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(dict(state), storage_writer=writer, no_dist=True)
        except CheckpointException as error:  # which is no Exception
            _raise_disk_error(error)
            raise


def _raise_disk_error(error: BaseException) -> None:
    """Raise what the disk said, if that is what an error of torch comes from."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OSError):
        by_rank = getattr(inner, "failures", {})  # of a CheckpointException
        inner = next((e for e, _ in by_rank.values()), inner.__cause__ or inner.__context__)
    if inner is not None:
        raise OSError(inner.errno, inner.strerror) from error


def _mapped(path: str, layout: ImageLayout) -> dict[str, Tensor]:
    """The tensors of a file as views of its pages: they cost no memory until they are read."""
    import torch

    from relit_platform.worker.state_tree import DTYPES

    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors: dict[str, Tensor] = {}
    for spec in layout.specs:
        dtype = DTYPES.get(spec.dtype)
        if dtype is None:
            raise BadInputError(f"tensor {spec.name!r} is {spec.dtype}, which torch does not have.")
        if spec.num_bytes:
            count, offset = spec.num_bytes // dtype.itemsize, layout.offset(spec.name)
            flat = torch.frombuffer(pages, dtype=dtype, count=count, offset=offset)
            tensors[spec.name] = flat.view(spec.shape)
        else:
            tensors[spec.name] = torch.empty(spec.shape, dtype=dtype)
    return tensors
