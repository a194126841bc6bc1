"""The keyed permutation is a bijection for every size and the same for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relit_storage.data.permutation import derive_key, permutation, permute

# Frozen outputs: a change here would reorder the data of every run that resumes.
GOLDEN = [
    (1, 0, [0]),
    (7, 123, [4, 6, 2, 0, 3]),
    (2000, 123, [901, 834, 1435, 197, 899]),
    (1_000_000, 99, [635810, 820777, 941317, 895657, 285322]),
]


@pytest.mark.parametrize(("size", "key", "head"), GOLDEN)
def test_golden(size: int, key: int, head: list[int]) -> None:
    assert permutation(size, key)[:5].tolist() == head


def test_golden_key() -> None:
    assert derive_key(1, "rows", 0, 0) == 3466264999816689960
    assert derive_key(1, "rows", 0, 0) != derive_key(1, "rows", 0, 1)
    assert derive_key("a", "b") != derive_key("ab", "")


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=150, deadline=None)
def test_bijection(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permutation(size, key)), np.arange(size))


@given(st.integers(1, 2**52), st.integers(0, 2**64 - 1), st.data())
@settings(max_examples=100, deadline=None)
def test_large_domains_stay_inside(size: int, key: int, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    image = permute(np.array(index), np.array([size]), np.array([key], np.uint64))
    assert len(set(image.tolist())) == len(index)
    assert image.min() >= 0 and image.max() < size


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2**64 - 1)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_many_small_ones_in_one_call(windows: list[tuple[int, int]]) -> None:
    index = np.concatenate([np.arange(size) for size, _ in windows])
    size = np.concatenate([np.full(size, size) for size, _ in windows])
    key = np.concatenate([np.full(size, key, np.uint64) for size, key in windows])
    alone = np.concatenate([permutation(size, key) for size, key in windows])
    assert np.array_equal(permute(index, size, key), alone)


def test_shuffles() -> None:
    size = 100_000
    image = permutation(size, 99)
    assert abs(np.corrcoef(np.arange(size), image)[0, 1]) < 0.01
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.01
    # Tenths of the input spread over tenths of the output as independent draws would.
    table = np.histogram2d(np.arange(size), image, bins=10)[0]
    assert ((table - size / 100) ** 2 / (size / 100)).sum() < 140  # 81 degrees: p < 1e-4
    assert np.mean(permutation(size, 1) == permutation(size, 2)) < 1e-3


def test_small_sizes_reach_every_arrangement() -> None:
    seen = {tuple(permutation(4, key).tolist()) for key in range(2000)}
    assert len(seen) >= 20
