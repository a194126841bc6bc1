"""A committed step in formats that others read: Hugging Face, torch.distributed.checkpoint, torch.

    hf      model.safetensors (several files and an index above a size): the weights under their
            own names. The rest, unless left out, in state.safetensors
    dcp     a directory for torch.distributed.checkpoint, keys <registered name>.<path>
    torch   checkpoint.pt, a torch.save of {registered name: state}

Beside each lies relit.json: which run and step it was, the data position and the ids. Weights are
the registered objects whose state is one flat dictionary of tensors, as an nn.Module's is. Tensors
come out whole, however many ranks saved them, and every byte is checked on the way. The folder
appears whole or not at all. torch is imported for dcp and torch alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from relit.errors import BadInputError
from relit.torch_export import write_with_torch
from relit_platform.worker.skeleton import is_tensor, is_weights, tensor_names
from relit_storage.checkpoint.copy_reading import CopyReader
from relit_storage.checkpoint.durable import sync_dir
from relit_storage.checkpoint.manifest_entries import TensorEntry
from relit_storage.checkpoint.safetensors_file import (
    Named,
    write_json,
    write_sharded,
    write_tensors,
)
from relit_storage.errors import CorruptShardError

Json = dict[str, Any]
Format = Literal["hf", "dcp", "torch"]
OnBytes = Callable[[int], None]
ABOUT = "relit.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What of a step is exported: the structure of the objects, and the tensors in it."""

    objects: Json
    tensors: tuple[TensorEntry, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        pieces = (piece.byte_range for tensor in self.tensors for piece in tensor.pieces)
        return sum(end - begin for begin, end in pieces)


def select(reader: CopyReader, *, weights_only: bool) -> Selection:
    """Reads the structure that rank 0 saved. CorruptShardError; BadInputError without weights."""
    objects = reader.extras(0).get("objects")
    file = reader.manifest.shard(0).extras_file
    if not isinstance(objects, dict):
        raise CorruptShardError(file=file, reason="the structure of the state is not in it")
    if weights_only:
        objects = {name: node for name, node in objects.items() if is_weights(node)}
        if not objects:
            raise BadInputError("no registered object is a flat dictionary of tensors.")
    try:
        wanted = set(tensor_names(objects))
    except (TypeError, RecursionError) as error:
        reason = f"the structure of the state does not parse: {error}"
        raise CorruptShardError(file=file, reason=reason) from error
    tensors = tuple(tensor for tensor in reader.manifest.tensors if tensor.name in wanted)
    missing = wanted - {tensor.name for tensor in tensors}
    if missing:
        reason = f"it names tensors that were not saved: {list(missing)[:3]}"
        raise CorruptShardError(file=file, reason=reason)
    return Selection(objects=objects, tensors=tensors)


def export(
    reader: CopyReader,
    selection: Selection,
    folder: str,
    to: Format,
    *,
    max_file_bytes: int,
    on_bytes: OnBytes = lambda count: None,
) -> list[str]:
    """Write the folder, which must be new or empty; the names of its files. Blocks for all of it.

    CorruptShardError; BadInputError if the folder is in use or cannot be written, or if the format
    cannot hold the state: nothing is left behind.
    """
    try:
        with _new_folder(folder) as pending:
            if to == "hf":
                _write_hf(reader, selection, pending, max_file_bytes, on_bytes)
            else:
                write_with_torch(
                    reader, selection.objects, selection.tensors, pending, to, on_bytes
                )
            write_json(os.path.join(pending, ABOUT), _about(reader, selection, to))
            names = os.listdir(pending)
    except OSError as error:
        cause = error.strerror or error
        raise BadInputError(f"{folder} cannot be written: {cause}; choose another one.") from error
    return sorted(names)


@contextlib.contextmanager
def _new_folder(folder: str) -> Iterator[str]:
    """A folder beside the wanted one, which gets its name in the end."""
    path = os.path.abspath(os.path.expanduser(folder))
    if os.path.lexists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise BadInputError(f"{folder} is there already and not an empty directory.")
    parent, name = os.path.split(path)
    os.makedirs(parent, exist_ok=True)
    pending = os.path.join(parent, f".{name}.{secrets.token_hex(4)}.tmp")
    os.mkdir(pending)
    try:
        yield pending
        sync_dir(pending)
        os.rename(pending, path)
        sync_dir(parent)
    except BaseException:
        shutil.rmtree(pending, ignore_errors=True)
        raise


def _about(reader: CopyReader, selection: Selection, to: Format) -> Json:
    manifest = reader.manifest
    about = {
        "v": 1,
        "run_id": manifest.run_id,
        "step": manifest.step,
        "generation": manifest.generation,
        "cursor": manifest.cursor,
        "ids": dict(manifest.ids),
        "format": to,
        "registered": sorted(selection.objects),
    }
    return {**about, "objects": selection.objects} if to == "hf" else about


# ---- Hugging Face ----


def _write_hf(
    reader: CopyReader, selection: Selection, folder: str, max_file_bytes: int, on_bytes: OnBytes
) -> None:
    by_name = {tensor.name: tensor for tensor in selection.tensors}
    names, aliases = hf_names(selection.objects)
    if not names:
        raise BadInputError("no registered object is a flat dictionary of tensors; use --to torch.")
    weights = [Named(hf_name, by_name[saved]) for saved, hf_name in names.items()]
    write_sharded(
        folder, "model", reader, weights, aliases, max_file_bytes=max_file_bytes, on_bytes=on_bytes
    )
    rest = [Named(tensor.name, tensor) for name, tensor in by_name.items() if name not in names]
    if rest:
        path = os.path.join(folder, "state.safetensors")
        write_tensors(path, reader, rest, {}, on_bytes)


def hf_names(objects: Json) -> tuple[dict[str, str], dict[str, str]]:
    """(Name by saved name, aliases as safetensors' own save_model writes them: alias -> kept).

    An import reads the export back by them. BadInputError if two tensors would have one name.
    """
    weights = {name: node for name, node in objects.items() if is_weights(node)}
    names: dict[str, str] = {}
    aliases: dict[str, str] = {}
    owners: dict[str, str] = {}
    for registered, node in weights.items():
        for key, value in node.items():
            if not is_tensor(value):
                continue  # extra state of a module: in relit.json
            name = key if len(weights) == 1 else f"{registered}.{key}"
            owner = owners.setdefault(name, registered)
            if owner != registered:
                raise BadInputError(
                    f"tensors of {owner!r} and of {registered!r} would both be called {name!r} in "
                    "a safetensors file; --to torch keeps the objects apart."
                )
            if value["$T"] in names:
                aliases[name] = names[value["$T"]]
            else:
                names[value["$T"]] = name
    return names, aliases
