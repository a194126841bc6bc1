"""Keep secrets out of everything that is stored or printed.

Two guards: `refuse` stops a specification that would store one, by the field's name or the
value's shape; `Redactor` masks the values of secret-like environment variables in any text on its
way to a log. Numbers are never secrets, so `max_tokens: 512` passes and `hf_token: "..."` does not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from relit.errors import SecretInSpecError

_SECRET = re.compile(
    r"password|passwd|passphrase|secret|api_?key|access_?key|private_?key|auth_?token|credential"
    r"|(?:^|_)token$|(?:^|_)pwd$"
)
# A text model's special tokens and counts are called *_token too.
_TEXT_TOKEN = re.compile(
    r"(?:^|_)(?:bos|eos|pad|unk|sep|cls|mask|start|end|stop|image|special|first|last|next|per"
    r"|eot|prefix|suffix)_token$"
)
_URL_CREDENTIALS = re.compile(r"([a-z][a-z0-9+.-]*://)[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)
_SHAPES = (
    ("a private key", re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")),
    ("an AWS access key id", re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")),
    ("a service token", re.compile(r"\b(?:ghp|gho|ghs|glpat|hf|xoxb)[_-][A-Za-z0-9_-]{20,}\b")),
    ("a service token", re.compile(r"\bsk-[A-Za-z0-9_-]{24,}\b")),
)
_SCANNED = ("config", "env", "tags", "store", "owner", "faults")
_MIN_MASKED = 6  # masking "1" or "yes" would garble every line and hides nothing


def is_secret_name(name: str) -> bool:
    """True if a field or variable of this name is expected to hold a secret."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    return bool(_SECRET.search(snake)) and not _TEXT_TOKEN.search(snake)


def refuse(spec: Mapping[str, Any]) -> None:
    """Raise SecretInSpecError for the first secret in a specification's plain data."""
    for top in _SCANNED:
        for path, name, value in _strings(spec.get(top), top, top):
            if path.startswith(("env.secrets.", "env.exclude.")):
                continue  # names of variables and patterns, not values
            why = _why_secret(name, value)
            if why:
                raise SecretInSpecError(field=path, why=why)


def _why_secret(name: str, value: str) -> str:
    if value and is_secret_name(name):
        return "has the name of a secret"
    if _URL_CREDENTIALS.search(value):
        return "holds a URL with a user and password in it"
    for what, shape in _SHAPES:
        if shape.search(value):
            return f"looks like {what}"
    return ""


def _strings(data: Any, path: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Every string below `data` as (path, name of the nearest key, value)."""
    if isinstance(data, str):
        yield path, name, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _strings(value, f"{path}.{key}", str(key))
    elif isinstance(data, (list, tuple)):
        for number, value in enumerate(data):
            yield from _strings(value, f"{path}.{number}", name)


class Redactor:
    """Masks secret values in text. Built once per process; cheap per line."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        # Longest first, so that a value which contains another is masked whole.
        self._secrets = sorted(
            ((value, name) for name, value in secrets.items() if len(value) >= _MIN_MASKED),
            key=lambda pair: -len(pair[0]),
        )

    @classmethod
    def from_environment(
        cls, names: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
    ) -> Redactor:
        """Knows every variable with a secret-like name, and those in `names`."""
        source = os.environ if environ is None else environ
        chosen = {k: v for k, v in source.items() if k in names or is_secret_name(k)}
        return cls(chosen)

    def text(self, text: str) -> str:
        """`text` with each known secret and each URL's user:password masked."""
        for value, name in self._secrets:
            if value in text:
                text = text.replace(value, f"[{name}]")
        return _URL_CREDENTIALS.sub(r"\1[redacted]@", text)

    def data(self, data: Any) -> Any:
        """The same over JSON data, keys left alone."""
        if isinstance(data, str):
            return self.text(data)
        if isinstance(data, Mapping):
            return {key: self.data(value) for key, value in data.items()}
        if isinstance(data, (list, tuple)):
            return [self.data(value) for value in data]
        return data
