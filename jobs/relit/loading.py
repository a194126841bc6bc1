"""Tensors of a run's checkpoint in a notebook or a script of one's own, without a cluster.

weights = relit.load_checkpoint("gpt-1a2b3c", only="model.head.*")
model.load_state_dict(relit.load_checkpoint("gpt-1a2b3c").of("model"))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from relit.checkpoints import Checkpoints
from relit.client import Client
from relit.errors import BadInputError
from relit.exporting import select
from relit_platform.worker.skeleton import weight_keys
from relit_storage.checkpoint.copy_reading import CopyReader, in_file_order

if TYPE_CHECKING:
    from torch import Tensor


class LoadedTensors(dict[str, "Tensor"]):
    """Tensors by `<registered name>.<key>`, on the CPU and nobody else's; of which run and step.

    Tied weights are there under each of their names, and share their memory.
    """

    def __init__(self, tensors: Mapping[str, Tensor], run_id: str, step: int) -> None:
        super().__init__(tensors)
        self.run_id = run_id
        self.step = step

    def of(self, name: str) -> dict[str, Tensor]:
        """Those of one registered object under its own names, as its load_state_dict wants them.

        BadInputError if there are none.
        """
        start = f"{name}."
        found = {k[len(start) :]: tensor for k, tensor in self.items() if k.startswith(start)}
        if not found:
            there = ", ".join(sorted({key.partition(".")[0] for key in self})) or "nothing"
            raise BadInputError(f"no tensor of {name!r} is loaded; there is {there}.")
        return found


def load_checkpoint(
    run: str,
    step: int | None = None,
    *,
    only: str | Iterable[str] | None = None,
    weights_only: bool = True,
    store: str | None = None,
    disks: Sequence[str] = (),
) -> LoadedTensors:
    """Tensors of a committed step, by default the newest one that is whole; every byte is checked.

    run: a run id, a unique beginning of one, or a run directory (path or URL). only: shell patterns
    of names, such as "model.layers.0.*"; nothing else is read. weights_only: of registered objects
    that are flat dictionaries of tensors, as modules are; else the optimizer's tensors, too, under
    the names that `relit ckpt show --tensors` lists. store: as RELIT_STORE. disks: folders of
    nodes' disks, by default those of this machine.

    Blocks for the reads, which go through torch's memory: it is imported here. RunNotFoundError,
    CheckpointNotFoundError, CheckpointBrokenError; BadInputError if no name fits.
    """
    patterns = None if only is None else [only] if isinstance(only, str) else list(only)
    job = Client(store=store).get(run)

    def read(reader: CopyReader) -> LoadedTensors:
        names = _chosen(reader, patterns, weights_only)
        return LoadedTensors(_read(reader, names), job.id, reader.manifest.step)

    return Checkpoints(job.reader, disks).first_whole(step, read).answer


def _chosen(
    reader: CopyReader, patterns: Sequence[str] | None, weights_only: bool
) -> dict[str, str]:
    """Saved name by the name that it is asked for."""
    selection = select(reader, weights_only=weights_only)
    names = weight_keys(selection.objects)
    if not weights_only:
        names = {tensor.name: tensor.name for tensor in selection.tensors} | names
    if patterns is None:
        return names
    found = {n: saved for n, saved in names.items() if any(fnmatchcase(n, p) for p in patterns)}
    if not found:
        some = ", ".join(sorted(names)[:5])
        raise BadInputError(f"no name fits {', '.join(patterns)}; there are {some}, ...")
    return found


def _read(reader: CopyReader, names: Mapping[str, str]) -> dict[str, Any]:
    import torch

    from relit_platform.worker.state_tree import DTYPES

    wanted = set(names.values())
    entries = [tensor for tensor in reader.manifest.tensors if tensor.name in wanted]
    tensors: dict[str, Any] = {}
    for entry in in_file_order(entries):
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise BadInputError(
                f"tensor {entry.name!r} is {entry.dtype}, which torch does not have."
            )
        raw = reader.read(entry)
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        tensors[entry.name] = flat.view(entry.global_shape)
    return {name: tensors[saved] for name, saved in names.items()}
