"""Forming a group while the manager watches: a member that dies meanwhile costs no timeout.

The transport's own rendezvous waits for a member that will not come until its deadline of many
seconds, and cannot be called off. So it runs in a thread of its own, and when it takes longer than
it should, the manager, who hears of every process that ends, is asked whether it still can succeed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from relit_platform.errors import CollectiveBrokenError
from relit_platform.facts import Assignment
from relit_platform.worker.process_group import Group, close_group

ASK_EVERY_S = 0.1  # forming takes a few milliseconds when everybody comes


class _Attempt:
    """One call of `form` in a daemon thread; a group that comes too late is closed there."""

    def __init__(self, form: Callable[[], Group]) -> None:
        self._form = form
        self._lock = threading.Lock()
        self._given_up = False
        self.group: Group | None = None
        self.error: BaseException | None = None
        self.over = threading.Event()

    def run(self) -> None:
        """The thread's body."""
        try:
            group = self._form()
            with self._lock:
                late = self._given_up
                self.group = None if late else group
            if late:
                close_group(group)
        except BaseException as error:  # handed to the caller, whatever it is
            self.error = error
        finally:
            self.over.set()

    def give_up(self) -> bool:
        """Nobody wants the group any more; False if it is there already."""
        with self._lock:
            self._given_up = self.group is None
            return self._given_up


def form_watched(
    form: Callable[[], Group], assignment: Assignment, lost: Callable[[], bool]
) -> Group:
    """`form()`'s group; raises what it raises, or CollectiveBrokenError once `lost()` says so.

    Called by the rank's own thread. An attempt that was given up ends by its own deadline.
    """
    attempt = _Attempt(form)
    threading.Thread(target=attempt.run, name="relit-form", daemon=True).start()
    while not attempt.over.wait(ASK_EVERY_S):
        if lost() and attempt.give_up():
            raise CollectiveBrokenError(
                operation="forming",
                generation=assignment.generation,
                rank=assignment.rank,
                cause="a member ended before it came",
            )
    if attempt.error is not None:
        raise attempt.error
    assert attempt.group is not None
    return attempt.group
