"""Forming a group under watch: a member that died is not waited for until the deadline."""

from __future__ import annotations

import threading

import pytest
from ranks import HOST, assignment

from relit_platform.errors import CollectiveBrokenError
from relit_platform.worker.forming import form_watched
from relit_platform.worker.process_group import Group, close_group, form_group, open_rendezvous

FORMING_S = 1.5


def test_the_group_of_an_undisturbed_forming_is_handed_on() -> None:
    asked: list[bool] = []
    place = assignment(0, 1, (HOST, 0))
    group = form_watched(lambda: form_group(place, None, 1.0), place, lambda: bool(asked))
    assert group.world == 1 and close_group(group)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_member_known_to_be_dead_is_not_waited_for(rank: int) -> None:
    """Rank 0 waits at its own store for 1; rank 1 tries to reach a store that is gone."""
    store, endpoint = open_rendezvous(HOST)
    mine = store if rank == 0 else None
    if rank == 1:
        del store
    place = assignment(rank, 2, endpoint)
    answers = iter([False, True])
    ended = threading.Event()

    def form() -> Group:
        try:
            return form_group(place, mine, 30.0, forming_timeout_s=FORMING_S)
        finally:
            ended.set()

    with pytest.raises(CollectiveBrokenError, match="a member ended"):
        form_watched(form, place, lambda: next(answers))
    assert not ended.is_set(), "it was the deadline that ended it"
    # torch's client tries once more after a random pause, so the attempt may outlive its deadline.
    assert ended.wait(60.0), "the attempt that was given up never ends"


def test_the_error_of_a_forming_is_raised_here() -> None:
    place = assignment(1, 2, (HOST, 1))
    with pytest.raises(CollectiveBrokenError, match="forming"):
        form_watched(
            lambda: form_group(place, None, 30.0, forming_timeout_s=0.3), place, lambda: False
        )


def test_a_group_that_comes_after_giving_up_is_closed() -> None:
    release, place = threading.Event(), assignment(0, 1, (HOST, 0))
    late: list[Group] = []

    def form() -> Group:
        release.wait(5)
        late.append(Group(rank=0, world=2, generation=1, transport=object()))
        return late[0]

    with pytest.raises(CollectiveBrokenError):
        form_watched(form, place, lambda: True)
    release.set()
    for thread in [t for t in threading.enumerate() if t.name == "relit-form"]:
        thread.join(5)
    assert late[0].closed
