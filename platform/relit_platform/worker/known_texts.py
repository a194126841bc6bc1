"""JSON text of a flat dictionary that is written at each step, and changes little in between.

Most values of an optimizer's settings, or of a data position, are the very objects that they were a
step ago. A value that cannot change is then not encoded again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from relit_platform.facts import Json

_NOTHING = object()
_FIXED = (int, float, bool, str, type(None))


class NotFixedError(Exception):
    """Something in the dictionary could change without being another object."""


class KnownTexts:
    """Of one dictionary. encode makes JSON of what is neither an integer nor a finite float."""

    def __init__(self, encode: Callable[[Any], Json] = lambda value: value) -> None:
        self._encode = encode
        self._known: dict[str, tuple[Any, str, str]] = {}  # value, text, text of the key

    def of(self, data: Mapping[str, Any], but: str = "") -> str:
        """`"key": value, ...` without braces, as json.dumps has it, of all keys but one.

        Raises NotFixedError for a value that is neither a scalar nor a tuple of scalars, and for a
        key that has a meaning of its own in a skeleton.
        """
        texts = []
        for key, value in data.items():
            if key == but:
                continue
            known = self._known.get(key)
            if known is None:
                if type(key) is not str or key[:1] == "$":
                    raise NotFixedError
                known = (_NOTHING, "", json.dumps(key))
            if known[0] is not value:
                name = known[2]
                known = self._known[key] = (value, f"{name}: {self._text(value)}", name)
            texts.append(known[1])
        return ", ".join(texts)

    def _text(self, value: Any) -> str:
        kind = type(value)
        if kind is int or (kind is float and math.isfinite(value)):
            return repr(value)
        fixed = kind in _FIXED
        if kind is tuple:
            fixed = all(type(item) in _FIXED for item in value)
        if not fixed:
            raise NotFixedError
        return json.dumps(self._encode(value))
