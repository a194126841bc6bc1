"""A bar for work that reads or writes gigabytes: on stderr, and only where a person looks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def byte_bar(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A function that takes the number of bytes done; the bar is gone when the block ends."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(label, total=total_bytes)
        yield lambda count: progress.advance(task, count)


def size_text(num_bytes: int) -> str:
    """Bytes for people: 1.5 GB, 12.0 kB, 7 B."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
