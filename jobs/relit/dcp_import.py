"""A folder of torch.distributed.checkpoint, read without running anything it brings along.

torch reads its .metadata by pickle, and values that are no tensors too; both can run code. Here
the classes that .metadata names become inert stand-ins of the same shape, made anew for each file,
and any other name is refused. Values are read by torch's weights-only loader. What is saved as
text of a dictionary's key, as torch does with an optimizer's numbered parameters, is a number
again where the optimizer's own groups say so.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeGuard

from relit.errors import PickleRefusedError, SourceRefusedError
from relit.torch_import import bytes_of, load_slice, refuse, tensor_fault
from relit_storage.checkpoint.durable import open_regular, read_file
from relit_storage.checkpoint.image import ITEM_BYTES, TensorSpec
from relit_storage.checkpoint.manifest_schema import MAX_NUMBER
from relit_storage.checkpoint.pieces import Box, boxes_tile

if TYPE_CHECKING:
    from torch import Tensor

METADATA = ".metadata"
MAX_METADATA_BYTES = 256 << 20
MAX_DEPTH = 60
MAX_OPEN = 64  # files at a time
MAX_KEY = 500  # objects in a tuple, those of inner ones included; torch's have a few
_OURS = frozenset(
    {
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
        "torch.distributed._shard.sharded_tensor.metadata",  # up to torch 2.3
    }
)


def _size(items: Any = ()) -> tuple[Any, ...]:
    """Stands in for torch.Size. Of a tuple alone: `_weigh` knows what is in one."""
    if type(items) is not tuple:
        raise ValueError("a size that is none")
    return items


_PLAIN: Mapping[str, Any] = {
    "torch.Size": _size,
    "collections.OrderedDict": dict,
}
_INERT = frozenset({"torch.serialization._get_layout", "pathlib.PosixPath", "pathlib.WindowsPath"})
# What Python writes for such classes. Others reserve memory of any size, or look things up.
_OPCODES = frozenset(
    {
        "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET",
        "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
        "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2",
        "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL",
        "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD",
    }
)  # fmt: skip
_IN_PLACE = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"})


class _Thing:
    """Stands in for an object of the file: what it was made from, and nothing that acts."""

    kind = ""
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """A field of a data class; None if it has none of that name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Reader(pickle.Unpickler):
    """Builds lists, dicts, tuples, numbers, text and stand-ins; PickleRefusedError for the rest."""

    def __init__(self, file: IO[bytes], path: str, dtypes: Mapping[str, str]) -> None:
        super().__init__(file)
        self._path = path
        self._dtypes = dtypes
        self._kinds: dict[str, type[_Thing]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a class, or the safetensors name of a dtype. Called by pickle."""
        full = f"{module}.{name}"
        if full in _PLAIN:
            return _PLAIN[full]
        if full in self._dtypes:
            return self._dtypes[full]
        if module not in _OURS and full not in _INERT:
            raise PickleRefusedError(file=self._path, name=full)
        if full not in self._kinds:
            self._kinds[full] = type("Stand" + str(len(self._kinds)), (_Thing,), {"kind": name})
        return self._kinds[full]


def _check_opcodes(raw: bytes, path: str) -> None:
    """Before pickle's own reader sees it: SourceRefusedError for what it should not do.

    That reader makes room for a memo of any number that it reads. And it hashes keys, on the C
    stack and without a bound: so what a key may be is weighed here.
    """
    stack: list[int] = []  # for each object there, how many objects its hash visits at most
    marks: list[int] = []
    memo: dict[Any, int] = {}
    for number, (opcode, argument, place) in enumerate(pickletools.genops(io.BytesIO(raw))):
        if opcode.name not in _OPCODES:
            refuse(path, f"does {opcode.name} at {place}, which no metadata needs")
        if opcode.name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            key = len(memo) if argument is None else argument
            if key > number:
                refuse(path, f"remembers an object as number {key} at {place}")
            memo[key] = stack[-1]
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        else:
            _weigh(opcode, stack, marks)
        if stack and stack[-1] > MAX_KEY:
            refuse(path, f"has a tuple of more than {MAX_KEY} objects at {place}")


def _weigh(opcode: pickletools.OpcodeInfo, stack: list[int], marks: list[int]) -> None:
    """Do to the weights what an opcode does to the objects. ValueError, IndexError."""
    if opcode.name == "MARK":
        marks.append(len(stack))
        return
    taken, begin = opcode.stack_before, len(stack)
    if pickletools.markobject in taken:
        taken, begin = taken[: taken.index(pickletools.markobject)], marks.pop()
    begin -= len(taken)
    if begin < (marks[-1] if marks else 0):
        raise ValueError(f"{opcode.name} takes more than there is")
    weights = stack[begin:]
    del stack[begin:]
    if opcode.name.startswith("TUPLE"):
        stack.append(1 + sum(weights))
    elif opcode.name == "REDUCE":
        stack.append(weights[1])  # of the arguments: a size is made of them
    elif opcode.name in _IN_PLACE:
        stack.append(weights[0])
    else:  # lists, dictionaries and stand-ins are hashed by what they are, or not at all
        stack += [1] * len(opcode.stack_after)


@dataclass(frozen=True, slots=True)
class _Place:
    """Bytes [begin, begin + count) of a file of the folder."""

    file: str
    begin: int
    count: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor: its parts, and where each lies."""

    spec: TensorSpec
    parts: tuple[tuple[Box, _Place], ...]


class DcpFolder:
    """An opened folder. Its state holds tensors without memory; `blocks` reads one at a time.

    SourceRefusedError from every method. Close it.
    """

    def __init__(self, folder: str) -> None:
        from relit_platform.worker.state_tree import DTYPES

        self._folder = folder
        self._path = os.path.join(folder, METADATA)
        self._torch_dtypes = DTYPES
        self._files: dict[str, int] = {}
        self._entries: dict[int, _Entry] = {}
        try:
            self.state: Any = self._read_state()
        except BaseException:
            self.close()
            raise

    def blocks(self, tensor: Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor of `state`. Memory holds the tensor, and one part of it."""
        import torch

        entry = self._entries.get(id(tensor))
        if entry is None:  # inside a value that is no tensor itself, and so in memory
            yield from bytes_of(tensor)
            return
        spec = entry.spec
        if len(entry.parts) == 1:
            yield from bytes_of(self._part(spec, *entry.parts[0]))
            return
        whole = torch.empty(spec.shape, dtype=self._torch_dtypes[spec.dtype])
        for box, place in entry.parts:
            room = whole
            for dim, (begin, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
                room = room.narrow(dim, begin, size)
            room.copy_(self._part(spec, box, place))
        yield from bytes_of(whole)

    def is_loaded(self, tensor: Tensor) -> bool:
        """False for a stand-in in `state`, whose bytes `blocks` reads from files."""
        return id(tensor) not in self._entries

    def close(self) -> None:
        """Close all files. Safe to repeat."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _part(self, spec: TensorSpec, box: Box, place: _Place) -> Tensor:
        from torch import Tensor

        found = load_slice(self._fd(place.file), place.begin, place.count, self._where(place))
        dtype = self._torch_dtypes[spec.dtype]
        if not isinstance(found, Tensor) or (found.dtype, tuple(found.shape)) != (dtype, box.shape):
            refuse(self._where(place), f"holds no {spec.dtype} {box.shape} of {spec.name!r}")
        if reason := tensor_fault(found):
            refuse(self._where(place), f"{spec.name!r} {reason}")
        return found

    def _where(self, place: _Place) -> str:
        return os.path.join(self._folder, place.file)

    def _fd(self, file: str) -> int:
        """Valid until the next call, which may close the file that was used longest ago."""
        if file not in self._files:
            while len(self._files) >= MAX_OPEN:
                os.close(self._files.pop(next(iter(self._files))))
            path = os.path.join(self._folder, file)
            try:
                self._files[file] = open_regular(path)
            except OSError as error:
                refuse(path, f"cannot be opened: {error.strerror}")
        self._files[file] = fd = self._files.pop(file)  # the last in order
        return fd

    # ---- .metadata ----

    def _read_state(self) -> Any:
        meta = self._load_metadata()
        items, paths = meta.get("state_dict_metadata"), meta.get("planner_data")
        if not isinstance(items, dict) or not all(type(name) is str for name in items):
            refuse(self._path, "names no tensors")
        places = self._places(meta.get("storage_data"))
        values: dict[str, Any] = {}
        for name, item in items.items():
            kind = item.kind if isinstance(item, _Thing) else ""
            if kind == "TensorStorageMetadata":
                values[name] = self._placeholder(self._entry(name, item, places))
            elif kind == "BytesStorageMetadata" and (name, None) in places:
                place = places[name, None]
                fd = self._fd(place.file)
                values[name] = load_slice(fd, place.begin, place.count, self._where(place))
            else:
                refuse(self._path, f"does not say where {name!r} lies")
        if not isinstance(paths, dict):
            return values
        return numbered(nested(values, self._checked_paths(values, paths), self._path))

    def _load_metadata(self) -> _Thing:
        import torch

        dtypes = {str(dtype): name for name, dtype in self._torch_dtypes.items()}
        others = {str(v): "" for v in vars(torch).values() if isinstance(v, torch.dtype)}
        try:
            raw = read_file(self._path, MAX_METADATA_BYTES)
            _check_opcodes(raw, self._path)
            meta = _Reader(io.BytesIO(raw), self._path, others | dtypes).load()
        except OSError as error:
            refuse(self._path, f"cannot be read: {error.strerror}")
        except SourceRefusedError:
            raise
        except Exception as error:  # pickle's reader lets through whatever damaged bytes lead to
            refuse(self._path, f"does not parse: {type(error).__name__}: {error}", error)
        if not isinstance(meta, _Thing) or meta.kind != "Metadata":
            refuse(self._path, "is no metadata of torch.distributed.checkpoint")
        return meta

    def _places(self, data: Any) -> dict[tuple[str, tuple[int, ...] | None], _Place]:
        if not isinstance(data, dict):
            refuse(self._path, "says nothing of files")
        places: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
        for index, info in data.items():
            if not isinstance(index, _Thing) or not isinstance(info, _Thing):
                refuse(self._path, "has a place that is none")
            name, offsets = index.get("fqn"), index.get("offset")
            file, begin, count = (info.get(k) for k in ("relative_path", "offset", "length"))
            if info.get("transform_descriptors"):
                refuse(self._path, "has tensors stored in another form (compressed, say)")
            plain = type(file) is str and file not in ("", ".", "..") and "\0" not in file
            if type(name) is not str or not naturals((begin, count)):
                refuse(self._path, "has a place that is none")
            if not plain or file != os.path.basename(file):
                refuse(self._path, f"places {name!r} in a file that is none of its own folder")
            if offsets is not None and not naturals(offsets):
                refuse(self._path, f"has a part of {name!r} without a place")
            if (name, offsets) in places:
                refuse(self._path, f"has two places of {name!r} at {offsets}")
            places[name, offsets] = _Place(file, begin, count)
        return places

    def _entry(self, name: str, item: _Thing, places: Mapping[Any, _Place]) -> _Entry:
        shape, chunks, properties = (item.get(k) for k in ("size", "chunks", "properties"))
        state = getattr(properties, "state", None)
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not naturals(shape) or not isinstance(chunks, list):
            refuse(self._path, f"has no shape of {name!r}")
        if type(dtype) is not str or dtype not in ITEM_BYTES:
            refuse(self._path, f"{name!r} has a dtype that relit does not keep")
        spec = TensorSpec(name, dtype, shape)
        boxes = [self._box(name, chunk) for chunk in chunks]
        if reason := spec.fault or boxes_tile(shape, boxes):
            refuse(self._path, f"{name!r} {reason}")
        lost = [box for box in boxes if (name, box.offsets) not in places]
        if lost:
            refuse(self._path, f"does not say where {name!r} lies from {lost[0].offsets} on")
        return _Entry(spec, tuple((box, places[name, box.offsets]) for box in boxes))

    def _box(self, name: str, chunk: Any) -> Box:
        offsets, sizes = (chunk.get(k) if isinstance(chunk, _Thing) else None for k in _CHUNK)
        if not naturals(offsets) or not naturals(sizes) or len(offsets) != len(sizes):
            refuse(self._path, f"has a part of {name!r} without a place")
        return Box(offsets, sizes)

    def _placeholder(self, entry: _Entry) -> Tensor:
        import torch

        dtype = self._torch_dtypes[entry.spec.dtype]
        tensor = torch.empty(entry.spec.shape, dtype=dtype, device="meta")
        self._entries[id(tensor)] = entry
        return tensor

    def _checked_paths(self, values: Mapping[str, Any], paths: Any) -> dict[str, tuple[Any, ...]]:
        for name in values:
            path = paths.get(name)
            steps = type(path) is tuple and 0 < len(path) <= MAX_DEPTH
            if not steps or not all(type(step) is str or naturals((step,)) for step in path):
                refuse(self._path, f"has no proper path of {name!r}")
        return {name: paths[name] for name in values}


_CHUNK = ("offsets", "sizes")


class _Branch(dict[Any, Any]):
    """A level that paths lead through, as opposed to a dictionary that was saved as a value."""


def nested(values: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]], file: str) -> Any:
    """The state whose values lie at these paths: text leads into dictionaries, numbers into lists.

    SourceRefusedError for paths that cannot all be, `file` names it.
    """
    root = _Branch()
    for name, value in values.items():
        here = root
        for step in paths[name][:-1]:
            here = here.setdefault(step, _Branch())
            if not isinstance(here, _Branch):
                refuse(file, f"the path of {name!r} leads through a value")
        if paths[name][-1] in here:
            refuse(file, f"two values have the path of {name!r}")
        here[paths[name][-1]] = value
    return _grown(root, file)


def _grown(branch: Any, file: str) -> Any:
    if not isinstance(branch, _Branch):
        return branch
    grown = {step: _grown(value, file) for step, value in branch.items()}
    if all(type(step) is str for step in grown):
        return grown
    if set(grown) != set(range(len(grown))):
        refuse(file, "a list has a hole")
    return [grown[number] for number in range(len(grown))]


def numbered(state: Any) -> Any:
    """With the keys of optimizers' states as numbers again, where their groups have numbers."""
    if not isinstance(state, dict):
        return state
    return {name: _numbered_optimizer(value) for name, value in state.items()}


def _numbered_optimizer(value: Any) -> Any:
    groups = value.get("param_groups") if isinstance(value, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return value
    lists = [group["params"] for group in groups if isinstance(group.get("params"), list)]
    names = {item for items in lists for item in items if isinstance(item, (str, int))}
    state = value.get("state", {})  # torch leaves an empty dictionary out
    if not isinstance(state, dict):
        return value
    by_text = {str(item): item for item in names}
    rest = {key: item for key, item in value.items() if key != "state"}
    return {"state": {by_text.get(key, key): item for key, item in state.items()}, **rest}


def naturals(value: Any) -> TypeGuard[tuple[int, ...]]:
    """True for a tuple of whole numbers of 63 bits that are not negative."""
    return isinstance(value, tuple) and all(
        type(item) is int and 0 <= item <= MAX_NUMBER for item in value
    )
