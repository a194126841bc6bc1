"""JSON of unknown origin: what the format does not allow is refused, not interpreted."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def load_strict(text: str) -> Any:
    """The value of a JSON text. A name used twice in one object and NaN or infinity are refused.

    Raises ValueError, or RecursionError for what is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def canonical(value: Any) -> str:
    """The one spelling of a JSON value: sorted keys, no spaces. ValueError for NaN or infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name appears twice")
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
