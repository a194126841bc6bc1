"""Why workers have no place, in words that name both sides."""

from __future__ import annotations

import pytest

from relit_platform.machines.shortage import shortage
from relit_platform.run_config import ScalingConfig

FOUR = ScalingConfig(workers=3, spares=1, cpus_per_worker=2.0, gpus_per_worker=1.0)


@pytest.mark.parametrize(
    ("total", "free", "words", "no_words"),
    [
        ({"CPU": 16, "GPU": 4}, {"CPU": 8, "GPU": 4}, (), ()),
        ({"CPU": 16, "GPU": 4}, {"CPU": 8, "GPU": 2.5}, ("4 GPU wanted", "2.5 of 4"), ("CPU",)),
        ({"CPU": 16, "GPU": 4}, {"CPU": 8, "GPU": 2.5}, ("it waits",), ("add nodes",)),
        ({"CPU": 4}, {"CPU": 4}, ("8 CPU wanted, 4 of 4", "4 GPU wanted, 0 of 0"), ("it waits",)),
        ({"CPU": 4}, {"CPU": 4}, ("add nodes",), ()),
        ({}, {}, ("0 of 0 free",), ()),
    ],
)
def test_what_is_lacking_is_named(
    total: dict[str, float],
    free: dict[str, float],
    words: tuple[str, ...],
    no_words: tuple[str, ...],
) -> None:
    said = shortage(FOUR, total, free)
    assert bool(said) is bool(words or no_words)
    assert all(word in said for word in words)
    assert not any(word in said for word in no_words)
