"""Is this still the same run? Differences of configuration and code, in words.

Going on with another learning rate or another loss function gives a curve that nobody can
explain later, so each difference is shown, and allowed only by name.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

from relit.errors import DriftError, RunExistsError
from relit.reading import RunReader
from relit.spec import files
from relit.spec.code_snapshot import CodeSnapshot
from relit.spec.model import JobSpec
from relit_platform.run_config import RunConfig
from relit_storage.errors import ObjectMissingError
from relit_storage.run import layout

Changes = dict[str, tuple[Any, Any]]
_DECIDES_LOSSES = frozenset({"config", "entry", "init", "seed"})
_MAX_LISTED = 12


def stored_spec(reader: RunReader) -> JobSpec:
    """The specification a run was submitted with (or last resumed with)."""
    text = reader.store.get(layout.CONFIG).decode(errors="replace")
    return files.from_yaml(text, source=f"{reader.run_key}/{layout.CONFIG}")


def check_same_run(reader: RunReader, spec: JobSpec, config: RunConfig, code: CodeSnapshot) -> None:
    """For a run id that is taken: RunExistsError or DriftError unless all is the same."""
    changes = stored_spec(reader).diff(spec)
    if changes:
        raise RunExistsError(run=config.run_id, diff=describe(changes))
    old = reader.config()
    if old is not None:
        check_code(reader, old, code, allowed=False)


def check_config(changes: Changes, allowed: bool) -> None:
    """DriftError if what decides the losses differs; world size and cadence may always."""
    drift = {p: pair for p, pair in changes.items() if p.partition(".")[0] in _DECIDES_LOSSES}
    if drift and not allowed:
        raise DriftError(what="the config", diff=describe(drift), flag="config")


def check_code(reader: RunReader, old: RunConfig, code: CodeSnapshot, allowed: bool) -> None:
    """DriftError naming the files that differ from the code the run was started with."""
    if code.sha == old.code_sha or allowed:
        return
    try:
        before = _contents(reader.store.get(old.code_key))
    except (ObjectMissingError, zipfile.BadZipFile):
        before = {}
    diff = _file_diff(before, _contents(code.data))
    raise DriftError(what="the code", diff=diff, flag="code")


def describe(changes: Changes) -> str:
    """`a.b: old -> new`, one after the other, cut where it would not be read."""
    lines = [f"{path}: {_short(old)} -> {_short(new)}" for path, (old, new) in changes.items()]
    return _listed(lines)


def _contents(data: bytes) -> dict[str, int]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def _file_diff(before: dict[str, int], after: dict[str, int]) -> str:
    lines = [f"{name} changed" for name in after if name in before and before[name] != after[name]]
    lines += [f"{name} added" for name in after if name not in before]
    lines += [f"{name} removed" for name in before if name not in after]
    return _listed(lines)


def _listed(lines: list[str]) -> str:
    more = len(lines) - _MAX_LISTED
    shown = "; ".join(lines[:_MAX_LISTED])
    return f"{shown}; and {more} more" if more > 0 else shown


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
