"""A JobSpec's file form: YAML in and out without loss, and overrides as `a.b=value`."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from relit.errors import BadInputError, SpecError
from relit.spec.model import JobSpec

_MAX_SPEC_BYTES = 1 << 20


# PyYAML follows YAML 1.1, where `lr: 1e-3` is a string. Everyone means a number.
_FLOAT = re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice; plain YAML keeps the last one silently."""


class _Dumper(yaml.SafeDumper):
    """Quotes strings that `_Loader` would read as numbers."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            line = key_node.start_mark.line + 1
            raise SpecError(source="the file", problems=f"line {line}: key {key!r} is given twice")
        seen.add(key)
    loader.flatten_mapping(node)
    return {
        loader.construct_object(k, deep=True): loader.construct_object(v, deep=True)
        for k, v in node.value
    }


# Beside its own errors PyYAML lets through what a number of 5,000 digits, a list as a key and
# 1,000 nested brackets raise.
_NOT_YAML = (yaml.YAMLError, ValueError, TypeError, RecursionError)

_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def from_yaml(text: str, overrides: Sequence[str] = (), source: str = "the file") -> JobSpec:
    """Parse and validate; SpecError or SecretInSpecError name what to change."""
    try:
        data = yaml.load(text, Loader=_Loader)
    except _NOT_YAML as error:
        where = " ".join(str(error).split())
        raise SpecError(source=source, problems=f"not YAML: {where:.300}") from None
    if not isinstance(data, dict):
        raise SpecError(source=source, problems=f"expected a mapping, found {data!r:.80}")
    return JobSpec.parse(apply_overrides(data, overrides), source)


def load(path: str, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a specification file. Relative paths in it are meant from the file's own folder."""
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > _MAX_SPEC_BYTES:
            raise BadInputError(f"{path} is larger than {_MAX_SPEC_BYTES} bytes; not a spec.")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read specification {path}: {error}.") from None
    spec = from_yaml(text, overrides, source=path)
    if spec.env.working_dir is None:
        return spec
    folder = (file.parent / Path(spec.env.working_dir).expanduser()).resolve()
    env = spec.env.model_copy(update={"working_dir": str(folder)})
    return spec.model_copy(update={"env": env})


def to_yaml(spec: JobSpec) -> str:
    """The specification as YAML; `from_yaml(to_yaml(spec)) == spec`.

    Pure ASCII: PyYAML breaks lines inside quoted strings at some Unicode characters.
    """
    return yaml.dump(spec.to_plain(), Dumper=_Dumper, sort_keys=False)


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with each `a.b=value` set; the value is read as YAML."""
    changed = copy.deepcopy(data)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise BadInputError(f"override {override!r} is not of the form a.b=value.")
        try:
            value = yaml.load(text, Loader=_Loader)
        except _NOT_YAML:
            value = text
        _set(changed, path.strip().split("."), value, override)
    return changed


def override(spec: JobSpec, overrides: Sequence[str]) -> JobSpec:
    """The specification with overrides applied and validated again."""
    if not overrides:
        return spec
    return JobSpec.parse(apply_overrides(spec.to_plain(), overrides), "the overrides")


def _set(data: dict[str, Any], path: list[str], value: Any, override: str) -> None:
    target = data
    for part in path[:-1]:
        nested = target.setdefault(part, {})
        if not isinstance(nested, dict):
            raise BadInputError(f"override {override!r}: {part} holds {nested!r}, not a mapping.")
        target = nested
    target[path[-1]] = value
