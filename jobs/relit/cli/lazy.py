"""A group whose verbs are imported when they are used, so that `relit --help` is instant."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """Verbs by name, each given as "module:attribute". Called by click alone."""

    def __init__(self, *args: Any, verbs: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._verbs = dict(verbs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order given, which is that of use, not of the alphabet."""
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb, or None for click's own message with suggestions. Imports its module."""
        if cmd_name not in self._verbs:
            return None
        module, _, name = self._verbs[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command
