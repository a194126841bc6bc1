"""The metric rows of a rank that may not be in the run directory yet, ready to lie in snapshots.

Each of them goes into many snapshots, at each step all of them. So they are kept as the beginning
of the JSON beside a snapshot, with its checksum: a row is encoded once, and appended to both.
Nothing is joined and nothing is summed anew until rows are forgotten, a few times a second.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ROWS_KEPT = 4096  # while the store is away; else a few seconds' worth
ROWS_IN_EXTRAS = 1024  # at 200 bytes a row, 200 KB at the most beside each snapshot
ROWS_DROPPED = 64  # at once, when there are more
_BEGIN = b'{"rows":['


@dataclass(frozen=True, slots=True)
class _Row:
    step: int
    fields: dict[str, Any]


class UnwrittenRows:
    """Of one rank, as they came; used by its own thread."""

    def __init__(self) -> None:
        self._rows: deque[_Row] = deque(maxlen=ROWS_KEPT)
        self._lengths: deque[int] = deque()  # of the texts that are in _text
        self._text = bytearray(_BEGIN)
        self._crc = zlib.crc32(_BEGIN)

    @property
    def oldest(self) -> int:
        """Step of the oldest row kept, 0 without one."""
        return self._rows[0].step if self._rows else 0

    def append(self, fields: dict[str, Any], text: bytes | None = None) -> None:
        """Keep one more row. text: its JSON, if that is known."""
        encoded = json.dumps(fields).encode() if text is None else text
        self._rows.append(_Row(int(fields["step"]), fields))
        piece = b"," + encoded if self._lengths else encoded
        self._text += piece
        self._crc = zlib.crc32(piece, self._crc)
        self._lengths.append(len(encoded))
        if len(self._lengths) > ROWS_IN_EXTRAS:
            self._cut(ROWS_DROPPED)

    def forget(self, written: int) -> None:
        """Drop the rows up to this step: they are in the run directory."""
        while self._rows and self._rows[0].step <= written:
            self._rows.popleft()
        self._cut(len(self._lengths) - len(self._rows))

    def merge(self, rows: Iterable[Mapping[str, Any]], last_step: int) -> None:
        """Add rows that are not here, and drop those of later steps than last_step."""
        merged = {int(row["step"]): dict(row) for row in rows}
        merged.update({row.step: row.fields for row in self._rows})
        self._rows.clear()
        self._cut(len(self._lengths))
        for step in sorted(merged):
            if step <= last_step:
                self.append(merged[step])

    def after(self, step: int) -> tuple[dict[str, Any], ...]:
        """The rows of later steps than this one."""
        return tuple(row.fields for row in self._rows if row.step > step)

    def newest(self) -> list[dict[str, Any]]:
        """What `text` holds."""
        rows = list(self._rows)
        return [row.fields for row in rows[len(rows) - len(self._lengths) :]]

    def text(self) -> tuple[bytearray, int]:
        """`{"rows":[` and the newest rows, and its crc32; to be read at once, never changed."""
        return self._text, self._crc

    def _cut(self, count: int) -> None:
        """Take the oldest `count` rows out of the text."""
        if count <= 0:
            return
        length = sum(self._lengths.popleft() for _ in range(count))
        length += count if self._lengths else count - 1  # commas
        del self._text[len(_BEGIN) : len(_BEGIN) + length]
        self._crc = zlib.crc32(self._text)


def row_text(fields: Mapping[str, Any], logged: Mapping[str, float]) -> bytes | None:
    """JSON of a step's row, several times as fast as json.dumps; None if a name of `logged` is one
    of the row's own, which it then replaces.

    fields begin with step, loss and at_s; all others are integers, but the digest.
    """
    row, loss = fields, fields["loss"]
    number = repr(loss) if math.isfinite(loss) else json.dumps(loss)
    own = (
        f'{{"step": {row["step"]}, "loss": {number}, "at_s": {row["at_s"]!r}, '
        f'"epoch": {row["epoch"]}, "lo": {row["lo"]}, "hi": {row["hi"]}, '
        f'"samples": {row["samples"]}, "digest": "{row["digest"]}", '
        f'"world": {row["world"]}, "generation": {row["generation"]}'
    )
    if not logged:
        return f"{own}}}".encode()
    if any(name in _OWN for name in logged):
        return None
    return f"{own}, {json.dumps(dict(logged))[1:]}".encode()


_OWN = frozenset(
    ("step", "loss", "at_s", "epoch", "lo", "hi", "samples", "digest", "world", "generation")
)
