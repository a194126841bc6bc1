"""Whether modules and optimizers still hold the very objects that they held, in a few microseconds.

A state's structure is walked with much Python, and at nearly every step in vain. A watch keeps what
a walk went through: the containers, and the identity of every key and value in them. As it keeps
the objects, too, no other one can have the same identity. All comparisons are loops in C. What it
takes for a change may be none (a key deleted and added again): then somebody walks once more.

It sees which objects there are, not what has become of them: for tensors there is `Places`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain, repeat
from operator import attrgetter, contains, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

# What `state_dict` is made of, and where somebody can change how it is made.
_CONTAINERS = itemgetter(
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_NUM_CONTAINERS, _NUM_DICTS = 6, 3  # three dicts of what counts, then a set of names
OWN_STATE = ("state_dict", "_save_to_state_dict", "get_extra_state")
MAX_MISSES = 4  # in a row: what changes all the time is not worth a watch
# A script module, an optimizer whose constructor was never called, a state of another kind.
_UNUSUAL = (KeyError, TypeError, AttributeError, RuntimeError)
_LAYOUT = attrgetter("shape", "dtype", "device")


def submodules(root: nn.Module) -> Iterator[nn.Module]:
    """As root.modules(), in another order and a few times faster."""
    seen: set[nn.Module] = set()
    todo: list[nn.Module | None] = [root]
    while todo:
        module = todo.pop()
        if module is not None and module not in seen:
            seen.add(module)
            yield module
            todo.extend(module._modules.values())


class Contents:
    """Some dictionaries and sets that must go on holding the same objects in the same order."""

    def __init__(self, dicts: Sequence[dict[Any, Any]], sized: Sequence[Sized] = ()) -> None:
        """sized: of these only the length counts."""
        self._dicts = dicts
        self._sized = [*dicts, *sized]
        self._held = [*chain.from_iterable(dicts), *chain.from_iterable(map(dict.values, dicts))]
        self._found = self._look()

    def same(self) -> bool:
        """True if nothing was added, taken away, replaced or moved."""
        return self._look() == self._found

    def _look(self) -> list[int]:
        return [
            *map(len, self._sized),
            *map(id, chain.from_iterable(self._dicts)),
            *map(id, chain.from_iterable(map(dict.values, self._dicts))),
        ]


class ModuleWatch:
    """The tree below one module: its parameters, buffers and children, and what makes its state.

    KeyError, TypeError for a module that is none of torch's own making.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = list(submodules(root))
        self._kinds = list(map(type, self._modules))
        owns = map(vars, self._modules)
        self._containers: list[Any] = [*chain.from_iterable(map(_CONTAINERS, owns))]
        self._ids = list(map(id, self._containers))
        by_kind = [self._containers[i::_NUM_CONTAINERS] for i in range(_NUM_CONTAINERS)]
        dicts = [*chain.from_iterable(by_kind[:_NUM_DICTS])]
        self._contents = Contents(dicts, [*chain.from_iterable(by_kind[_NUM_DICTS:])])
        self._not_saved = [(names, frozenset(names)) for names in by_kind[_NUM_DICTS] if names]

    def same(self) -> bool:
        """True if the tree holds the same objects, and its state is made in the same way."""
        owns = list(map(vars, self._modules))
        return (
            list(map(type, self._modules)) == self._kinds
            and list(map(id, chain.from_iterable(map(_CONTAINERS, owns)))) == self._ids
            and self._contents.same()
            and all(names == kept for names, kept in self._not_saved)
            and not any(any(map(contains, owns, repeat(name))) for name in OWN_STATE)
        )

    def tensors(self) -> list[Any]:
        """All parameters and buffers that are saved, some more than once if they are shared."""
        found: list[Any] = []
        for module in self._modules:
            found += module._parameters.values()
            unsaved = module._non_persistent_buffers_set
            found += [its for name, its in module._buffers.items() if name not in unsaved]
        return [its for its in found if its is not None]


class OptimizerWatch:
    """An optimizer's groups of parameters, without their settings, and what it keeps for each.

    TypeError, AttributeError for a state that is not one dictionary for each parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state: Any = optimizer.state
        hooks = (
            optimizer._optimizer_state_dict_pre_hooks,
            optimizer._optimizer_state_dict_post_hooks,
        )
        self._contents = Contents([self._state, *self._state.values()], hooks)
        self._held = self._look()
        self._found = list(map(id, self._held))

    def same(self) -> bool:
        """True if there are the same groups and parameters, with the same objects as state."""
        return list(map(id, self._look())) == self._found and self._contents.same()

    def tensors(self) -> list[Any]:
        """All that is kept for parameters."""
        return [its for kept in self._state.values() for its in kept.values()]

    def _look(self) -> list[Any]:
        """Its class, state, own `state_dict`, groups, the lists in them, and all parameters."""
        optimizer = self._optimizer
        groups = optimizer.param_groups
        found: list[Any] = [type(optimizer), optimizer.state, groups]
        found.append(vars(optimizer).get("state_dict"))
        for group in groups:
            params = group["params"]
            found += (None, group, params)
            found += params
        return found


class Places:
    """Where tensors lie and how they are laid out: what `.data =` or `resize_` change."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._found = self._look()

    def same(self) -> bool:
        """True if each tensor is where it was, of the same shape, strides, dtype and device."""
        try:
            return self._look() == self._found
        except RuntimeError:  # it has become one without an address
            return False

    def _look(self) -> list[Any]:
        return [
            *map(Tensor.data_ptr, self._tensors),
            *map(Tensor.stride, self._tensors),
            *map(_LAYOUT, self._tensors),
        ]


class Watches:
    """The watches over a rank's registered objects, for all who ask about them at a boundary.

    What is asked twice in one moment is looked at once. A moment begins when `begin` is called,
    and whoever has let users' code run (a `state_dict` of their own, a loop's body) calls it before
    anybody asks again. What was asked before stays as it was then, as in a walk of one after the
    other.
    """

    def __init__(self) -> None:
        self._watches: dict[int, tuple[Any, Any]] = {}  # holder and watch, by the holder's id
        self._misses: dict[int, int] = {}  # in a row
        self._seen: dict[int, Any] = {}  # in this moment

    def begin(self) -> None:
        """A new moment: what was seen before counts no more."""
        self._seen.clear()

    def token(self, holder: Any) -> Any:
        """The same object as last time if a module or optimizer holds the very objects that it
        held then. None: it has to be walked each time.
        """
        key = id(holder)
        if key not in self._seen:
            self._seen[key] = self._look(key, holder)
        return self._seen[key]

    def _look(self, key: int, holder: Any) -> Any:
        kept, watch = self._watches.get(key, (None, None))
        misses = self._misses.get(key, 0)
        if watch is not None and kept is holder:
            if _still(watch):
                self._misses[key] = 0
                return watch
            misses = self._misses[key] = misses + 1
        if misses >= MAX_MISSES:
            watch = None
        else:
            watch = _watch(holder)
        self._watches[key] = (holder, watch)
        return watch


def _still(watch: Any) -> bool:
    try:
        return bool(watch.same())
    except _UNUSUAL:
        return False


def _watch(holder: Any) -> Any:
    try:
        if isinstance(holder, nn.Module):
            return ModuleWatch(holder)
        if isinstance(holder, torch.optim.Optimizer):
            return OptimizerWatch(holder)
    except _UNUSUAL:
        pass
    return None
