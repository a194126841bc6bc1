"""What is saved under some names goes into what is registered, maybe under others.

    <object>.<key>    weights go by name into a module, or into anything whose state is a flat
                      dictionary of tensors. Shapes must be equal; a dtype may be another one of its
                      kind, and is then converted
    <object>          all else, an optimizer say, goes as a whole, unless weights alone are wanted

Names and shapes are compared before the first tensor is read, and tensors are read object by
object: memory holds those of one object.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from relit_platform.errors import InitialStateError, StateError
from relit_platform.facts import Json
from relit_platform.worker.placing import like_registered
from relit_platform.worker.sharding import is_dtensor
from relit_platform.worker.skeleton import EXTRA_STATE, is_weights, tensor_names, weight_keys
from relit_platform.worker.state_tree import DTYPES, StateHolder, dtype_name, restore, state_of
from relit_storage.checkpoint.image import ITEM_BYTES

MAX_LISTED = 8
Spec = tuple[str, tuple[int, ...]]  # safetensors dtype, shape


@dataclass(frozen=True, slots=True)
class Saved:
    """What there is: structure by object, and tensors by saved name."""

    objects: Mapping[str, Json]
    specs: Mapping[str, Spec]
    read: Callable[[str], Tensor] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is taken over. run and step name the source in errors.

    objects_may_lack: what is registered and not saved at all stays as the code made it. rename:
    registered names by beginnings of saved ones, up to a dot; the longest that fits is taken.
    """

    run: str
    step: int
    weights_only: bool = True
    strict: bool = True
    objects_may_lack: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)

    def renamed(self, name: str) -> str:
        """A saved name as it is registered."""
        old = owner_of(name, self.rename)
        return self.rename[old] + name[len(old) :] if old else name

    def error(self, reason: str) -> InitialStateError:
        """The error to raise for a source that does not do."""
        return InitialStateError(run=self.run, step=self.step, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was taken over, by registered names. missing: registered, and not found in the source;
    unexpected: found, and not registered. converted: "name F32 -> BF16". whole: nothing that is
    registered was left as the code made it.
    """

    run: str
    step: int
    loaded: int
    num_bytes: int
    objects: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    converted: tuple[str, ...]
    whole: bool

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """Plain JSON; lists of names are cut behind `most`, beside them are their lengths."""
        names = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "converted": self.converted,
        }
        return {
            "run": self.run,
            "from_step": self.step,
            "loaded": self.loaded,
            "bytes": self.num_bytes,
            "objects": list(self.objects),
            **{f"num_{what}": len(listed) for what, listed in names.items()},
            **{what: list(listed[:most]) for what, listed in names.items()},
        }


def take_over(objects: Mapping[str, StateHolder], saved: Saved, rule: Rule) -> Report:
    """Load what is saved into what is registered, by the rule; what came of it.

    InitialStateError before anything was changed if names (under a strict rule) or shapes differ;
    whatever `saved.read` raises. The objects keep no reference to what it gives.
    """
    try:
        match = _Match(objects, saved, rule)
    except (TypeError, AttributeError, RecursionError) as error:
        raise rule.error(f"its structure does not parse: {error}") from error
    match.check()
    try:
        for name in match.modules:
            match.load_weights(name)
        for name in match.others:
            node = match.rest[name]
            tensors = {key: saved.read(key) for key in tensor_names(node)}
            restore({name: objects[name]}, tensors, {name: node})
    except InitialStateError:
        raise
    except (StateError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise rule.error(f"{type(error).__name__}: {error}") from error
    return match.report()


class _Match:
    """Which saved tensor goes where: all that can be known without reading one.

    modules: what is registered and flat. rest: structure of what is saved and no weight, by the
    name it is registered under; others: those of them that are registered.
    """

    def __init__(self, objects: Mapping[str, StateHolder], saved: Saved, rule: Rule) -> None:
        self._objects, self._saved, self._rule = objects, saved, rule
        states = {name: state_of(holder) for name, holder in objects.items()}
        self.modules = [name for name, state in states.items() if _is_flat(state)]
        self._slots: dict[str, Tensor] = {
            f"{name}.{key}": tensor
            for name in self.modules
            for key, tensor in states[name].items()
            if isinstance(tensor, Tensor)
        }
        self._ties = _ties(self._slots)
        self._sources = {rule.renamed(k): n for k, n in weight_keys(saved.objects).items()}
        self._found = {k: self._sources[k] for k in self._slots if k in self._sources}
        nodes = {} if rule.weights_only else saved.objects
        self.rest = {rule.renamed(n): node for n, node in nodes.items() if not is_weights(node)}
        self.others = [n for n in objects if n not in self.modules and n in self.rest]
        self._missing, self._whole = self._lacking()
        unexpected = [key for key in self._sources if key not in self._slots]
        unexpected += [name for name in self.rest if name not in self.others]
        self._unexpected = tuple(sorted(unexpected))

    def _lacking(self) -> tuple[tuple[str, ...], bool]:
        """What the source should have and has not; whether it has all that is registered."""
        covered = {self._ties[key] for key in self._found}
        keys = [key for key in self._slots if self._ties[key] not in covered]
        holders = [n for n in self._objects if n not in self.modules and n not in self.rest]
        lacking = keys if self._rule.weights_only else [*keys, *holders]
        if self._rule.objects_may_lack:
            there = {self._rule.renamed(name) for name in self._saved.objects}
            lacking = [key for key in lacking if owner_of(key, self._objects) in there]
        return tuple(lacking), not keys and not holders

    def check(self) -> None:
        """InitialStateError for all that keeps this from being loaded, in one sentence."""
        problems = [p for key, name in self._found.items() if (p := self._problem(key, name))]
        if problems:
            raise self._rule.error(_listed(problems))
        if self._rule.strict:
            said = [f"registered, but not saved: {_listed(self._missing)}"] * bool(self._missing)
            if self._unexpected:
                said.append(f"saved, but not registered: {_listed(self._unexpected)}")
            if said:
                raise self._rule.error("; ".join(said))
        if not self._found and not self.others:
            raise self._rule.error("no name that is saved in it is registered")

    def load_weights(self, name: str) -> None:
        """Read and load what there is for one module, or what is like one."""
        tensors = {key: self._saved.read(self._found[key]) for key in self._of(name, self._found)}
        if not tensors:
            return
        self._check_ties(tensors)
        holder, start = self._objects[name], len(name) + 1
        if isinstance(holder, nn.Module):
            state = OrderedDict((key[start:], self._placed(key, t)) for key, t in tensors.items())
            # Versions come from the code, not from the file.
            state._metadata = getattr(holder.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
            holder.load_state_dict(state, strict=False)
        else:
            whole = {key: self._slots[key] for key in self._of(name, self._slots)}
            node = {key[start:]: {"$T": key} for key in whole}
            restore({name: holder}, {**whole, **tensors}, {name: node})

    def report(self) -> Report:
        """What was taken over."""
        names = set(self._found.values())
        names.update(t for name in self.others for t in tensor_names(self.rest[name]))
        owners = {owner_of(key, self._objects) for key in self._found}
        converted = (self._converted(key, name) for key, name in self._found.items())
        return Report(
            run=self._rule.run,
            step=self._rule.step,
            loaded=len(names),
            num_bytes=sum(_num_bytes(self._saved.specs[name]) for name in names),
            objects=tuple(sorted(owners | set(self.others))),
            missing=self._missing,
            unexpected=self._unexpected,
            converted=tuple(text for text in converted if text),
            whole=self._whole,
        )

    def _of(self, name: str, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if owner_of(key, self._objects) == name]

    def _problem(self, key: str, saved: str) -> str:
        if saved not in self._saved.specs:
            return f"{key} is named in it, but not saved"
        slot, (dtype, shape) = self._slots[key], self._saved.specs[saved]
        if shape != tuple(slot.shape):
            return f"{key} was saved as {shape}, registered is {tuple(slot.shape)}"
        if dtype not in DTYPES or _kind(DTYPES[dtype]) != _kind(slot.dtype):
            return f"{key} was saved as {dtype}, registered is {dtype_name(slot)}"
        return ""

    def _converted(self, key: str, saved: str) -> str:
        ours, theirs = dtype_name(self._slots[key]), self._saved.specs[saved][0]
        return "" if ours == theirs else f"{key} {theirs} -> {ours}"

    def _check_ties(self, tensors: Mapping[str, Tensor]) -> None:
        """One memory cannot take two values: the last of them would win in silence."""
        first: dict[str, str] = {}
        for key, tensor in tensors.items():
            other = first.setdefault(self._ties[key], key)
            if other != key and not torch.equal(tensors[other], tensor):
                raise self._rule.error(f"{other} and {key} are tied, and differ in it")

    def _placed(self, key: str, tensor: Tensor) -> Tensor:
        slot = self._slots[key]
        placed: Tensor = like_registered(tensor, slot) if is_dtensor(slot) else tensor
        return placed


def owner_of(name: str, beginnings: Iterable[str]) -> str:
    """The longest of some names that `name` is, or is below; "" for none."""
    fitting = [one for one in beginnings if name == one or name.startswith(f"{one}.")]
    return max(fitting, key=len, default="")


def _is_flat(state: Any) -> bool:
    """The state of a module, or of what has one like it."""
    if not isinstance(state, Mapping) or not all(type(key) is str for key in state):
        return False
    values = [value for key, value in state.items() if not key.endswith(EXTRA_STATE)]
    return bool(values) and all(isinstance(value, Tensor) for value in values)


def _ties(slots: Mapping[str, Tensor]) -> dict[str, str]:
    """By name, the first name of the same memory: that of tied weights, else the name itself."""
    first: dict[Any, str] = {}
    ties = {}
    for key, tensor in slots.items():
        place: Any = key
        if not is_dtensor(tensor) and tensor.numel():
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        ties[key] = first.setdefault(place, key)
    return ties


def _kind(dtype: torch.dtype) -> str:
    """What may be converted into what: numbers with a point, and nothing else."""
    return "float" if dtype.is_floating_point else str(dtype)


def _num_bytes(spec: Spec) -> int:
    return math.prod(spec[1]) * ITEM_BYTES[spec[0]]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_LISTED])
    more = len(names) - MAX_LISTED
    return f"{shown} and {more} more" if more > 0 else shown
