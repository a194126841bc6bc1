"""Keep secrets out of specifications, and so out of everything that is stored with a run.

`refuse` stops a specification that would store one, by the field's name or the value's shape.
Numbers are never secrets, so `max_tokens: 512` passes and `hf_token: "..."` does not. What is
printed is masked by `Redactor` (relit_storage.run.redaction).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from relit.errors import SecretInSpecError
from relit_storage.run.redaction import Redactor, holds_credentials, is_secret_name

__all__ = ["Redactor", "is_secret_name", "refuse"]

_SHAPES = (
    ("a private key", re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")),
    ("an AWS access key id", re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")),
    ("a service token", re.compile(r"\b(?:ghp|gho|ghs|glpat|hf|xoxb)[_-][A-Za-z0-9_-]{20,}\b")),
    ("a service token", re.compile(r"\bsk-[A-Za-z0-9_-]{24,}\b")),
    ("a service token", re.compile(r"\bgithub_pat_[A-Za-z0-9_]{20,}")),
    ("a service token", re.compile(r"\bAIza[A-Za-z0-9_-]{35}")),
    ("a signed token", re.compile(r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+")),
    ("a signed URL", re.compile(r"[?&](?:X-Amz-Signature|sig|Signature|\w*token)=\S", re.I)),
)
_SCANNED = ("name", "run_id", "config", "env", "tags", "store", "owner", "faults", "init")


def refuse(spec: Mapping[str, Any]) -> None:
    """Raise SecretInSpecError for the first secret in a specification's plain data."""
    for top in _SCANNED:
        for path, name, value in _strings(spec.get(top), top, top):
            if path.startswith(("env.secrets.", "env.exclude.")) or not value:
                continue  # names of variables and patterns, not values
            why = _why_secret(name, value)
            if why:
                raise SecretInSpecError(field=path, why=why)


def _why_secret(name: str, value: str) -> str:
    if value and is_secret_name(name):
        return "has the name of a secret"
    if holds_credentials(value):
        return "holds a URL with a user and password in it"
    for what, shape in _SHAPES:
        if shape.search(value):
            return f"looks like {what}"
    return ""


def _strings(data: Any, path: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Every string below `data` as (path, name of the key it belongs to, value); keys too."""
    if isinstance(data, str):
        yield path, name, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            # What lies below a secret's name is its value, however deep.
            inner = name if is_secret_name(name) else str(key)
            yield f"{path}.{key}", "", str(key)
            yield from _strings(value, f"{path}.{key}", inner)
    elif isinstance(data, (list, tuple)):
        for number, value in enumerate(data):
            yield from _strings(value, f"{path}.{number}", name)
