"""`flatten` for a rank that saves at every step: what did not change is not walked again.

Between two steps the values of tensors change, but rarely which tensors there are. So states are
watched (watching.py), and where that is not possible signed (signing.py). A watch that sees no
change, or equal signatures, mean that the tensors and the text of the last walk still hold: the
tensors kept from it alias the same memory, and as long as they are kept no other tensor can lie
there. An optimizer's settings change with the learning rate: their text is made each time, of what
is known of the parts that stayed (known_texts.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from relit_platform.worker.known_texts import KnownTexts, NotFixedError
from relit_platform.worker.sharding import StateTensors
from relit_platform.worker.signing import Signed, sign, without_settings
from relit_platform.worker.state_tree import PLAIN_TENSORS, Flattening, StateHolder, state_of
from relit_platform.worker.watching import MAX_MISSES, Places, Watches

_SETTINGS = "param_groups"


class StateMemo:
    """Flattens one set of registered objects again and again. Used by the rank's own thread."""

    def __init__(self, watches: Watches | None = None) -> None:
        """watches: those that were asked at this boundary already, if anybody did."""
        self._signatures: list[tuple[str, Any]] | None = None
        self._walk = Flattening()
        self._texts: dict[str, str] = {}
        self._watches = watches or Watches()
        self._watched: dict[str, _Watched] = {}
        self._misses: dict[str, int] = {}

    def flatten(self, objects: Mapping[str, StateHolder]) -> tuple[StateTensors, bytes]:
        """The tensors as `state_tree.flatten` names them, and its skeleton as JSON text.

        The same dict of tensors as at the last call means that nothing but their values changed.
        Raises NotSavableError.
        """
        signed = {name: self._sign(name, holder) for name, holder in objects.items()}
        self._watches.begin()
        self._renew(objects, signed)
        walk, texts = self._walk, dict(self._texts)
        for name, its in signed.items():
            text = its.settings_text
            if its.settings is not None:
                walk, text = _with_settings(walk, its.settings, f"{name}.{_SETTINGS}")
            if text:
                texts[name] = f'{texts[name][:-1]}, "{_SETTINGS}": {text}}}'
        same = len(walk.tensors) == len(self._walk.tensors)
        body = ", ".join(f"{json.dumps(name)}: {texts[name]}" for name in objects)
        return self._walk.tensors if same else walk.tensors, f"{{{body}}}".encode()

    def _sign(self, name: str, holder: StateHolder) -> Signed:
        """What the state is made of: as it was if the watch sees no change."""
        token, watched = self._watches.token(holder), self._watched.pop(name, None)
        if watched is not None:
            known = watched.known(token)
            if known is not None:
                self._watched[name] = watched
                self._misses[name] = 0
                return known
            self._misses[name] = self._misses.get(name, 0) + 1
        signed = sign(holder)
        if token is None or not signed.is_read_off:
            self._watches.begin()  # users' code ran, which may change what comes after it
        if token is not None and signed.is_read_off and self._misses.get(name, 0) < MAX_MISSES:
            found = _Watched.of(token, holder, signed)
            if found is not None:
                self._watched[name] = found
        return signed

    def _renew(self, objects: Mapping[str, StateHolder], signed: Mapping[str, Signed]) -> None:
        """Walk the states unless they are those of the last time."""
        signatures = [(name, its.signature) for name, its in signed.items()]
        whole = all(signature is not None for _, signature in signatures)
        if whole and signatures == self._signatures:
            self._signatures = signatures  # the very objects, which are compared in no time
            return
        walk = Flattening()
        texts = {}
        for name, holder in objects.items():
            state = signed[name].state
            if state is None:
                state, _ = without_settings(state_of(holder))
            texts[name] = json.dumps(walk.encode(state, name, 0))
        self._walk, self._texts = walk, texts
        self._signatures = signatures if whole else None


class _Watched:
    """A module or an optimizer as it was found, and what says that it is still so."""

    def __init__(self, token: Any, holder: Any, signed: Signed) -> None:
        self._token = token
        self._places = Places(token.tensors())
        self._signed = signed._replace(settings=None)
        settings = signed.settings
        self._settings = None if settings is None else _Settings(holder, settings)

    @classmethod
    def of(cls, token: Any, holder: Any, signed: Signed) -> _Watched | None:
        """None for what has to be looked at each time."""
        if not all(type(tensor) in PLAIN_TENSORS for tensor in token.tensors()):
            return None
        try:
            watched = cls(token, holder, signed)
        except RuntimeError:  # a sparse tensor, say, has no address
            return None
        settings = watched._settings
        return watched if settings is None or settings.agree(signed.settings) else None

    def known(self, token: object) -> Signed | None:
        """What was found, with the present settings; None if it is to be looked at again."""
        if token is not self._token or not self._places.same():
            return None
        if self._settings is None:
            return self._signed
        text = self._settings.text()
        return self._signed._replace(settings_text=text) if text else None


class _Settings:
    """The text of an optimizer's groups, as long as they are the same groups of parameters."""

    def __init__(self, optimizer: Any, settings: list[dict[str, Any]]) -> None:
        self._optimizer = optimizer
        self._numbers = [json.dumps(group["params"]) for group in settings]
        self._texts = [KnownTexts(_encoded) for _ in settings]

    def text(self) -> str:
        """As JSON; "" if a setting is such that it has to be walked."""
        groups = []
        places = zip(self._optimizer.param_groups, self._texts, self._numbers, strict=True)
        try:
            for group, texts, numbers in places:
                own = texts.of(group, but="params")
                comma = ", " if own else ""  # an optimizer may have no settings at all
                groups.append(f'{{{own}{comma}"params": {numbers}}}')
        except NotFixedError:
            return ""
        return f"[{', '.join(groups)}]"

    def agree(self, settings: Any) -> bool:
        """False if the text is not that of a walk. Asked once of a watch: to read again at each
        step all that lies beside a snapshot would cost more than what is spared here.
        """
        text = self.text()
        return not text or text == json.dumps(_encoded(settings))


def _encoded(value: Any) -> Any:
    return Flattening().encode(value, "", 1)


def _with_settings(walk: Flattening, settings: Any, path: str) -> tuple[Flattening, str]:
    """The walk that has seen an optimizer's settings, too, and their text.

    They are nearly always plain numbers, for which the walk need not be copied.
    """
    alone = Flattening()
    node = alone.encode(settings, path, 1)
    if alone.tensors:
        walk = walk.copy()
        node = walk.encode(settings, path, 1)
    return walk, json.dumps(node)
