"""What an import reads: a checkpoint of another tool as named tensors and a structure.

    model.safetensors, or several and an index     Hugging Face; relit's own export beside it
    a folder with .metadata                        torch.distributed.checkpoint
    a file of torch.save, or a folder with one     read by torch's weights-only loader

Tensors lie under registered objects, as in every checkpoint of relit. A source that holds one flat
dictionary of tensors is one object, called `model` unless `--as` says otherwise; of any other, each
name at the top is an object. Nothing here runs code that a file brings along.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from relit.errors import BadInputError, SourceRefusedError
from relit.exporting import ABOUT, hf_names
from relit_platform.worker.skeleton import tensor_names
from relit_storage.checkpoint.durable import open_regular
from relit_storage.checkpoint.foreign_files import (
    SUFFIX,
    TensorFiles,
    find_tensor_files,
    read_json,
)
from relit_storage.checkpoint.image import TensorSpec
from relit_storage.checkpoint.safetensors_file import INDEX_SUFFIX
from relit_storage.errors import CorruptShardError

Json = dict[str, Any]
Format = Literal["hf", "dcp", "torch"]
OnBytes = Callable[[int], None]
T = TypeVar("T")

DEFAULT_OBJECT = "model"
REST = f"state{SUFFIX}"  # beside model.safetensors in a whole export: what is no weight
DCP_METADATA = ".metadata"
TORCH_FILES = ("checkpoint.pt", "pytorch_model.bin")
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An opened source. specs are under the names they get; blocks gives the bytes of one in
    order, each valid until the next. origin: run and step it was exported from, where known.
    """

    format: Format
    objects: Json
    specs: tuple[TensorSpec, ...]
    blocks: Callable[[TensorSpec], Iterable[memoryview]] = field(repr=False)
    origin: Json = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(spec.num_bytes for spec in self.specs)


@dataclass(frozen=True, slots=True)
class Naming:
    """What `--as` said: a name for a single object, or new names for some of several."""

    single: str = ""
    renames: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Sequence[str]) -> Naming:
        """From NAME, or any number of OLD=NEW. BadInputError for a mixture."""
        pairs = dict(text.partition("=")[::2] for text in given if "=" in text)
        plain = [text for text in given if "=" not in text]
        names = [*plain, *pairs, *pairs.values()]
        twice = len(pairs) + len(plain) < len(given)
        if len(plain) > 1 or (plain and pairs) or not all(names) or twice:
            said = " ".join(f"--as {text}" for text in given)
            raise BadInputError(f"{said}: give one NAME, or OLD=NEW for each object.")
        return cls(plain[0] if plain else "", pairs)

    def flat(self) -> str:
        """The name of the object of a source that is a flat dictionary of tensors."""
        if self.renames:
            raise BadInputError("the source is a flat dictionary of tensors: --as takes one NAME.")
        return _checked(self.single or DEFAULT_OBJECT)

    def applied(self, found: Mapping[str, T]) -> dict[str, T]:
        """Objects under the names they get. BadInputError if one is not there, or met twice."""
        names = ", ".join(sorted(found)[:12])
        if self.single and len(found) != 1:
            raise BadInputError(f"the source holds the objects {names}; rename by --as OLD=NEW.")
        strange = sorted(self.renames.keys() - found.keys())
        if strange:
            raise BadInputError(f"the source has no object {strange[0]!r}, only {names}.")
        named = {
            _checked(self.single or self.renames.get(name, name)): value
            for name, value in found.items()
        }
        if len(named) != len(found):
            raise BadInputError("--as gives two objects the same name.")
        return named


def _checked(name: str) -> str:
    if not name or name.startswith("$"):
        raise BadInputError(f"an object cannot have the name {name!r}; rename it by --as OLD=NEW.")
    return name


@contextlib.contextmanager
def open_source(
    path: str, naming: Naming, on_bytes: OnBytes = lambda count: None
) -> Iterator[Source]:
    """Find out what lies at a path, and read its structure; tensors are read through `blocks`.

    on_bytes hears of bytes that are checked at once, as those of a torch.save file are.
    SourceRefusedError for what is damaged, hostile or of no known format; BadInputError.
    """
    path = os.path.abspath(os.path.expanduser(path))
    kind, file = detect(path)
    with contextlib.ExitStack() as stack:
        try:
            if kind == "hf":
                yield _open_hf(file, naming, stack)
                return
            from relit.torch_import import open_torch

            yield open_torch(kind, file, naming, stack, on_bytes)
        except CorruptShardError as error:
            raise SourceRefusedError(
                file=str(error.fields["file"]), reason=str(error.fields["reason"])
            ) from error


def bytes_to_check(path: str) -> int:
    """How many bytes opening a source reads, for a progress bar. SourceRefusedError."""
    kind, file = detect(os.path.abspath(os.path.expanduser(path)))
    try:
        return os.path.getsize(file) if kind == "torch" else 0
    except OSError as error:  # a link to nowhere, say
        raise SourceRefusedError(file=file, reason=f"cannot be read: {error.strerror}") from error


def detect(path: str) -> tuple[Format, str]:
    """The format of a source, and the file or folder to open. SourceRefusedError."""
    if os.path.isdir(path):
        return _detect_folder(path)
    if not os.path.exists(path):
        raise SourceRefusedError(file=path, reason="there is no such file or folder")
    if path.endswith((SUFFIX, INDEX_SUFFIX)):
        return "hf", path
    if os.path.basename(path) == DCP_METADATA:
        return "dcp", os.path.dirname(path)
    if path.endswith(TORCH_ENDINGS) or _is_zip(path):
        return "torch", path
    endings = ", ".join((SUFFIX, *TORCH_ENDINGS))
    raise SourceRefusedError(file=path, reason=f"is none of {endings}, nor a folder of them")


def _detect_folder(path: str) -> tuple[Format, str]:
    if os.path.lexists(os.path.join(path, DCP_METADATA)):
        return "dcp", path
    try:
        found = find_tensor_files(path)
        names = os.listdir(path)
    except CorruptShardError as error:
        raise SourceRefusedError(file=path, reason=str(error.fields["reason"])) from error
    except OSError as error:
        raise SourceRefusedError(file=path, reason=f"cannot be read: {error.strerror}") from error
    if found:
        return "hf", found
    for name in TORCH_FILES:
        if name in names:
            return "torch", os.path.join(path, name)
    wanted = f"*{SUFFIX}, {DCP_METADATA} (torch.distributed.checkpoint) or {TORCH_FILES[0]}"
    raise SourceRefusedError(file=path, reason=f"holds none of {wanted}")


def _is_zip(path: str) -> bool:
    try:
        with open(open_regular(path), "rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False


# ---- Hugging Face ----


def _open_hf(path: str, naming: Naming, stack: contextlib.ExitStack) -> Source:
    files = TensorFiles.open(path)
    stack.callback(files.close)
    about = os.path.join(os.path.dirname(path), ABOUT)
    if os.path.lexists(about):
        told = read_json(about)
        if told.get("format") == "hf" and isinstance(told.get("objects"), dict):
            return _open_own(about, told, files, naming, stack)
    return _open_weights(path, files, naming.flat())


def _open_weights(path: str, files: TensorFiles, name: str) -> Source:
    """One flat dictionary of tensors."""
    for key in (*files.specs, *files.aliases):
        if key.startswith("$"):
            raise SourceRefusedError(file=path, reason=f"the tensor name {key!r} begins with $")
    node: Json = {key: {"$T": f"{name}.{key}"} for key in sorted(files.specs)}
    # Tied names come behind the ones that are kept: an export keeps the first of them.
    node |= {key: {"$T": f"{name}.{kept}"} for key, kept in sorted(files.aliases.items())}
    own = {f"{name}.{key}": key for key in files.specs}
    return Source(
        format="hf",
        objects={name: node},
        specs=_renamed(files, own),
        blocks=lambda spec: files.blocks(own[spec.name]),
    )


def _open_own(
    about: str, told: Json, files: TensorFiles, naming: Naming, stack: contextlib.ExitStack
) -> Source:
    """Relit's own export: relit.json has the structure, state.safetensors what is no weight."""
    if naming != Naming():
        raise BadInputError(f"{ABOUT} names the objects of this export; --as changes none of them.")
    objects = told["objects"]
    try:
        wanted = list(tensor_names(objects))
        names, _ = hf_names(objects)
    except (TypeError, AttributeError, RecursionError) as error:
        raise SourceRefusedError(file=about, reason=f"does not parse: {error}") from error
    if not all(isinstance(name, str) for name in wanted):
        raise SourceRefusedError(file=about, reason="names tensors by what is no name")
    rest = set(wanted) - names.keys()
    where = {name: (files, key) for name, key in names.items()}
    sides = [(set(names.values()), files.specs.keys())]
    if rest:
        others = TensorFiles.open(os.path.join(os.path.dirname(about), REST))
        stack.callback(others.close)
        where |= {name: (others, name) for name in rest}
        sides.append((rest, others.specs.keys()))
    for said, found in sides:
        odd = sorted(said ^ found)
        if odd:
            reason = f"it and the files disagree about {odd[0]!r}; without it they would do"
            raise SourceRefusedError(file=about, reason=reason)

    def blocks(spec: TensorSpec) -> Iterator[memoryview]:
        there, key = where[spec.name]
        return there.blocks(key)

    specs = [_renamed(there, {name: key})[0] for name, (there, key) in sorted(where.items())]
    origin: Json = {key: told[key] for key in ("run_id", "step") if key in told}
    return Source(format="hf", objects=objects, specs=tuple(specs), blocks=blocks, origin=origin)


def _renamed(files: TensorFiles, own: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    """Specs under new names. own: the file's name by the new one."""
    found = ((name, files.specs[key]) for name, key in own.items())
    return tuple(TensorSpec(name, spec.dtype, spec.shape) for name, spec in found)
