"""State of registered objects as named tensors plus a JSON skeleton, and back.

`flatten` copies nothing: the tensors alias the live state, so the caller copies them before
the next update. Tensors are named `<registered name>.<path>`; everything else (numbers,
strings, lists, tuples, dicts, numpy values) is kept in the skeleton. Nothing is pickled, so
loading can run no code. Tensors that share all their memory (tied weights) appear once. Of a
DTensor, this rank's part appears under its name, and beside it where all parts lie.

Skeleton of one value (a key that begins with "$" marks what JSON does not have):

    {"$T": name}             tensor, or an alias of one     {"$f": hex}       nan, inf, -inf
    {"$t": [...]}            tuple                          {"$d": [[k, v]]}  dict, other keys
    {"$c": [[k, v]]}         collections.Counter            {"$n": [dtype, shape, base64]}
    {"$s": [dtype, base64]}  numpy scalar
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from relit_platform.errors import NotSavableError, StateError, StateMismatchError
from relit_platform.facts import Json
from relit_platform.worker.placing import like_registered, pattern_of, placed
from relit_platform.worker.sharding import (
    StateTensors,
    any_dtensor,
    is_dtensor,
    lies_like,
    local_of,
    sharding_of,
    storage_of,
)

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_MAX_DEPTH = 64


class Stateful(Protocol):
    """What most objects offer: models, optimizers, schedulers, scalers."""

    def state_dict(self) -> Any:
        """The object's state; tensors in it may alias the live ones."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over a state of the same structure."""
        ...


StateHolder = Stateful | tuple[Callable[[], Any], Callable[[Any], Any]]


def dtype_name(tensor: Tensor) -> str:
    """The safetensors name of a tensor's dtype; raises NotSavableError if it has none."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise NotSavableError(path="tensor", type_name=str(tensor.dtype))
    return name


def flatten(objects: Mapping[str, StateHolder]) -> tuple[StateTensors, Json]:
    """The state of all registered objects: tensors by name (no copy) and the skeleton.

    Called by the rank at a boundary; a fraction of a millisecond for a small model. Raises
    NotSavableError naming the path of what cannot be saved.
    """
    walk = Flattening()
    skeleton = {name: walk.encode(state_of(holder), name, 0) for name, holder in objects.items()}
    return walk.tensors, skeleton


def restore(
    objects: Mapping[str, StateHolder],
    tensors: Mapping[str, Tensor],
    skeleton: Json,
    *,
    give: bool = False,
) -> None:
    """Load what `flatten` gave into objects of the same structure, on any mesh or none.

    tensors are whole, or DTensors that lie where the registered ones do (`sharded_like`); a
    registered DTensor takes its part of a whole one. The objects keep no reference to `tensors`,
    unless the caller has no other use for them and says give: an optimizer then keeps what it is
    given instead of a copy. Names and shapes are compared before anything is changed; raises
    StateMismatchError listing both sides, or what an object's own load_state_dict complained about.
    """
    states = checked(objects, tensors, skeleton)
    if any_dtensor():
        for name, holder in objects.items():
            pattern = pattern_of(holder, state_of(holder), states[name])
            states[name] = placed(states[name], pattern, like_registered)
    given: set[int] | None = set() if give else None
    for name, holder in objects.items():
        _load(name, holder, states[name], given)


def checked(
    objects: Mapping[str, StateHolder], tensors: Mapping[str, Tensor], skeleton: Json
) -> dict[str, Any]:
    """The saved state of each object, of names and shapes that fit; raises StateMismatchError.

    Nothing is changed or copied, and of `tensors` only the shapes count.
    """
    _compare(skeleton, objects, "registered objects")
    states = unflatten(tensors, {name: skeleton[name] for name in objects})
    for name, holder in objects.items():
        if isinstance(holder, nn.Module):
            _compare_module(name, holder, states[name])
    return states


def sharded_like(objects: Mapping[str, StateHolder], skeleton: Json) -> dict[str, Any]:
    """By the name of a saved tensor, the registered DTensor that it is for: so a reader can read
    this rank's part only.

    Left out is what goes to several places that differ. A saved tensor of another shape than its
    DTensor is something else (an optimizer's step): it is to be read whole. Raises StateError for
    a skeleton that is none.
    """
    if not any_dtensor() or not isinstance(skeleton, dict):
        return {}
    known = {name: node for name, node in skeleton.items() if name in objects}
    found: dict[str, Any] = {}
    elsewhere: set[str] = set()

    def note(leaf: Any, like: Any) -> Any:
        if not isinstance(leaf, SavedName):
            return leaf
        if not lies_like(found.setdefault(leaf, like), like):
            elsewhere.add(leaf)
        return None

    for name, state in unflatten(SavedNames(), known).items():
        pattern = pattern_of(objects[name], state_of(objects[name]), state)
        elsewhere.update(_names_in(placed(state, pattern, note)))
    return {name: like for name, like in found.items() if name not in elsewhere}


def unflatten(tensors: Mapping[str, Tensor], skeleton: Json) -> dict[str, Any]:
    """The states that `flatten` took apart, by registered name; they hold the given tensors.

    Raises StateMismatchError if a tensor is missing, StateError if the skeleton is none.
    """
    try:
        return {name: _decode(node, tensors, name) for name, node in skeleton.items()}
    except (TypeError, ValueError, KeyError, IndexError, struct.error, RecursionError) as error:
        raise StateError(f"the saved structure of the state does not parse: {error}") from error


def state_of(holder: StateHolder) -> Any:
    """What a registered object gives as its state; tensors alias the live ones."""
    return holder[0]() if isinstance(holder, tuple) else holder.state_dict()


class Flattening:
    """One walk over the state: the tensors found so far, and which memory they cover."""

    def __init__(self) -> None:
        self.tensors = StateTensors()
        self._by_address: dict[int, tuple[str, ...]] = {}
        self._by_storage: dict[tuple[object, ...], str] = {}

    def copy(self) -> Flattening:
        """A walk that goes on from here, on its own."""
        other = Flattening()
        other.tensors = self.tensors.copy()
        other._by_address = dict(self._by_address)
        other._by_storage = dict(self._by_storage)
        return other

    def encode(self, value: Any, path: str, depth: int) -> Json:
        """The skeleton of a value; its tensors are added to `tensors`."""
        kind = type(value)
        if kind in PLAIN_TENSORS:
            return {"$T": self._tensor(value, path)}
        if kind is int or kind is bool or kind is str or value is None:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$f": struct.pack(">d", value).hex()}
        if depth > _MAX_DEPTH:
            raise NotSavableError(path=path, type_name="structure that contains itself")
        if kind is list:
            return [self.encode(v, f"{path}.{i}", depth + 1) for i, v in enumerate(value)]
        if isinstance(value, dict):
            return self._dict(value, path, depth + 1)
        if kind is tuple or kind is torch.Size:
            return {"$t": [self.encode(v, f"{path}.{i}", depth + 1) for i, v in enumerate(value)]}
        if is_dtensor(value):
            return {"$T": self._part(value, path)}
        return _encode_numpy(value, path)

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Json:
        if isinstance(value, Counter):
            return {"$c": self._pairs(value, path, depth)}
        for key in value:
            if type(key) is not str or key[:1] == "$":
                return {"$d": self._pairs(value, path, depth)}
        return {key: self.encode(v, f"{path}.{key}", depth) for key, v in value.items()}

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[list[Json]]:
        pairs = []
        for key, item in value.items():
            if isinstance(key, Tensor):
                raise NotSavableError(path=f"{path} (a key)", type_name="Tensor")
            name = f"{path}.{key}"
            plain = type(key) is int or type(key) is str
            head = key if plain else self.encode(key, f"{name} (a key)", depth)
            pairs.append([head, self.encode(item, name, depth)])
        return pairs

    def _tensor(self, tensor: Tensor, path: str) -> str:
        _check_dense(tensor, path)
        if tensor.requires_grad or type(tensor) is not Tensor:
            tensor = tensor.detach()
        path = self._free(path)
        address = tensor.data_ptr()
        if address:  # tensors without elements have no memory to share
            there = self._by_address.get(address, ())
            for name in there:
                if _same_memory(self.tensors[name], tensor):
                    return name
            self._by_address[address] = (*there, path)
        self.tensors[path] = tensor
        return path

    def _part(self, tensor: Any, path: str) -> str:
        """This rank's part of a DTensor. An empty part has a storage, if no address: so what is
        tied on one rank is tied on all.
        """
        local = local_of(tensor)
        _check_dense(local, path)
        if type(local) is not Tensor:
            kind = type(local)
            raise NotSavableError(path=path, type_name=f"{kind.__module__}.{kind.__qualname__}")
        sharding = sharding_of(tensor, path)
        place = (storage_of(local), local.storage_offset(), local.shape, local.stride())
        path = self._by_storage.setdefault((*place, local.dtype, sharding), self._free(path))
        self.tensors[path] = local
        self.tensors.shardings[path] = sharding
        return path

    def _free(self, path: str) -> str:
        while path in self.tensors:  # {"a.b": x, "a": {"b": y}}
            path += "'"
        return path


def _check_dense(tensor: Tensor, path: str) -> None:
    plain = tensor.layout is torch.strided and not tensor.is_nested
    if not plain or tensor.dtype not in _NAMES:
        raise NotSavableError(path=path, type_name=f"tensor of {tensor.layout}, {tensor.dtype}")


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Of two tensors that begin at the same address."""
    return (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype is other.dtype
        and one.device == other.device
    )


def _encode_numpy(value: Any, path: str) -> Json:
    if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.names is None:
        raw = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"$n": [value.dtype.str, list(value.shape), raw]}
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return {"$s": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    kind = type(value)
    raise NotSavableError(path=path, type_name=f"{kind.__module__}.{kind.__qualname__}")


def _decode(node: Json, tensors: Mapping[str, Tensor], path: str) -> Any:
    """The value of a skeleton node. Tensors are the given ones: `_load` keeps none of them."""
    if isinstance(node, list):
        return [_decode(item, tensors, path) for item in node]
    if not isinstance(node, dict):
        return node
    marker = next(iter(node)) if len(node) == 1 else ""
    if marker[:1] != "$":
        return {key: _decode(item, tensors, f"{path}.{key}") for key, item in node.items()}
    body = node[marker]
    if marker == "$T":
        if body not in tensors:
            raise StateMismatchError(missing=[], unexpected=[body], detail="Tensor not saved.")
        return tensors[body]
    if marker == "$t":
        return tuple(_decode(item, tensors, path) for item in body)
    if marker in ("$d", "$c"):
        pairs = [(_decode(k, tensors, path), _decode(v, tensors, path)) for k, v in body]
        return dict(pairs) if marker == "$d" else Counter(dict(pairs))
    return _decode_leaf(marker, body, path)


def _decode_leaf(marker: str, body: Any, path: str) -> Any:
    if marker == "$f":
        return struct.unpack(">d", bytes.fromhex(body))[0]
    if marker == "$n":
        dtype, shape, raw = body
        return np.frombuffer(base64.b64decode(raw), dtype=dtype).reshape(shape).copy()
    if marker == "$s":
        dtype, raw = body
        return np.frombuffer(base64.b64decode(raw), dtype=dtype)[0]
    raise StateError(f"the saved state at {path} has an unknown marker {marker!r}.")


def _compare(saved: Iterable[str], registered: Iterable[str], what: str) -> None:
    saved_names, registered_names = set(saved), set(registered)
    if saved_names != registered_names:
        raise StateMismatchError(
            missing=sorted(saved_names - registered_names),
            unexpected=sorted(registered_names - saved_names),
            detail=f"Compared: {what}.",
        )


def _compare_module(name: str, module: nn.Module, saved: Any) -> None:
    """A module loads what fits before it complains, so look first."""
    current = module.state_dict()
    _compare(saved, current, f"the state of {name!r}")
    for key, tensor in current.items():
        if not isinstance(tensor, Tensor):
            continue
        found = saved[key]
        if not isinstance(found, Tensor) or found.shape != tensor.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise StateMismatchError(
                missing=[],
                unexpected=[],
                detail=f"{name}.{key} was saved as {shape}, registered is {tuple(tensor.shape)}.",
            )


def _load(name: str, holder: StateHolder, state: Any, given: set[int] | None) -> None:
    try:
        if isinstance(holder, tuple):
            holder[1](_owned(state, given))
        elif isinstance(holder, nn.Module):
            # Modules copy into their parameters; their versions come from the code, not the file.
            whole = OrderedDict(state)
            whole._metadata = getattr(holder.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
            holder.load_state_dict(whole)
        else:
            holder.load_state_dict(_owned(state, given))
    except (RuntimeError, ValueError, KeyError, IndexError, AssertionError) as error:
        raise StateMismatchError(missing=[], unexpected=[], detail=f"{name}: {error}") from error


def _owned(value: Any, given: set[int] | None) -> Any:
    """The same structure with tensors of its own memory: optimizers keep what they are given.

    given: ids of the tensors that were handed out already, each of which may be kept once; None:
    every one is copied.
    """
    if isinstance(value, Tensor):
        if given is None or id(value) in given:
            return value.clone()
        given.add(id(value))
        return value
    if isinstance(value, list):
        return [_owned(item, given) for item in value]
    if type(value) is tuple:
        return tuple(_owned(item, given) for item in value)
    if type(value) is dict:
        return {key: _owned(item, given) for key, item in value.items()}
    return value


class SavedName(str):
    """Stands for the saved tensor of this name."""


class SavedNames(Mapping[str, Any]):
    """Has a `SavedName` for every name, where there would be tensors: for `unflatten`."""

    def __getitem__(self, key: str) -> Any:
        return SavedName(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _names_in(state: Any) -> Iterator[str]:
    if isinstance(state, SavedName):
        yield state
    elif isinstance(state, dict):
        for item in state.values():
            yield from _names_in(item)
    elif isinstance(state, list | tuple):
        for item in state:
            yield from _names_in(item)
