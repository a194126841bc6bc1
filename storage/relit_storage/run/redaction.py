"""Secrets by name, and their values masked in text on its way to a log, an event or a report.

A value is a secret if the environment variable that holds it has the name of one, or if the
specification names the variable under env.secrets. Every floor that writes text uses this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

_SECRET = re.compile(
    r"password|passwd|passphrase|secret|api_?key|access_?key|private_?key|auth_?token|credential"
    r"|(?:^|_)token$|(?:^|_)pwd$|authorization"
)
# A text model's special tokens and counts are called *_token too.
_TEXT_TOKEN = re.compile(
    r"(?:^|_)(?:bos|eos|pad|unk|sep|cls|mask|start|end|stop|image|special|first|last|next|per"
    r"|eot|prefix|suffix)_token$"
)
_FOLDERS = frozenset({"PWD", "OLDPWD"})  # the shell's working folders, in every environment
_URL_CREDENTIALS = re.compile(r"([a-z][a-z0-9+.-]*://)[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)
_MIN_MASKED = 6  # masking "1" or "yes" would garble every line and hides nothing


def is_secret_name(name: str) -> bool:
    """True if a field or variable of this name is expected to hold a secret."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    return bool(_SECRET.search(snake)) and not _TEXT_TOKEN.search(snake)


def holds_credentials(text: str) -> bool:
    """True if there is a URL with a user and a password in the text."""
    return bool(_URL_CREDENTIALS.search(text))


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
        chosen = {
            k: v
            for k, v in source.items()
            if k in names or (is_secret_name(k) and k not in _FOLDERS)
        }
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
