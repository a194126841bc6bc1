"""What becomes of the local Ray cluster after the demo: ended, or held open for a look at it."""

from __future__ import annotations

import time

from rich.console import Console

from relit.cluster import end_if_unused, local_cluster, touch_path

HOLD_S = 8 * 3600.0
TOUCH_EVERY_S = 15.0  # well within relit.keeper.IDLE_S


def hold_cluster(console: Console) -> None:
    """Block until Ctrl-C, the cluster's end, or eight hours; tells the keeper that it is in use."""
    cluster = local_cluster()
    if cluster is None:
        return
    console.print(f"Ray's dashboard stays at {cluster.dashboard_url} until Ctrl-C")
    deadline_s = time.monotonic() + HOLD_S
    try:
        while time.monotonic() < deadline_s and local_cluster() is not None:
            touch_path().touch()
            time.sleep(TOUCH_EVERY_S)
    except KeyboardInterrupt:
        console.print("The cluster ends by itself when nothing runs on it")


def end_cluster(console: Console) -> None:
    """End the local cluster that the demo has started, unless something else runs on it now."""
    if end_if_unused():
        console.print("The local Ray cluster has ended; no process is left.", style="dim")
