"""Many seeds, each one run with its own faults. RELIT_SIM_SEEDS says how many (default 200).

A failure prints its seed and the last events; RELIT_SIM_FIRST=<seed> RELIT_SIM_SEEDS=1 repeats it.
"""

from __future__ import annotations

import os

import pytest
from sim_run import SimRun

SEEDS = int(os.environ.get("RELIT_SIM_SEEDS", "200"))
FIRST = int(os.environ.get("RELIT_SIM_FIRST", "0"))
PER_TEST = 25


def play(seed: int) -> SimRun:
    run = SimRun(seed)
    try:
        run.finish()
    except BaseException as error:
        events = "\n".join(run.clock.trace)
        raise AssertionError(f"seed {seed}: {error!r}\n{events}") from error
    return run


@pytest.mark.parametrize("first", list(range(FIRST, FIRST + SEEDS, PER_TEST)))
def test_every_seed_ends_whole(first: int) -> None:
    for seed in range(first, min(first + PER_TEST, FIRST + SEEDS)):
        play(seed)


def test_some_runs_find_their_spacing_by_themselves() -> None:
    kinds = {fact.kind for seed in range(12) for fact in play(seed).supervisor.facts}
    assert "ckpt.respaced" in kinds


def test_a_seed_decides_everything() -> None:
    one, other = play(7), play(7)
    assert list(one.clock.trace) == list(other.clock.trace)
