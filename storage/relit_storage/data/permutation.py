"""A keyed bijection of [0, n) that needs no memory: the shuffle behind every data order.

A Feistel network over the smallest power of two that holds n, with cycle walking: an image outside
[0, n) is encrypted again until it falls inside, which keeps the map a bijection and costs under
two encryptions on average. All arithmetic is on 64-bit integers, so the result is the same on
every machine and for ever (NumPy's and torch's shuffles are not promised stable); golden vectors
in tests/unit/test_permutation.py hold it. Affine permutations were rejected: they shuffle badly.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

MAX_SIZE = 1 << 52  # sizes pass through float64 once, exactly, to find their bit length
_ROUNDS = 6  # even: the halves of an odd number of bits trade places in each round
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def derive_key(*parts: int | str) -> int:
    """A 64-bit key from a tuple of integers and strings; distinct tuples give unrelated keys."""
    text = json.dumps(parts, separators=(",", ":")).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def mix(words: Words) -> Words:
    """The splitmix64 finaliser, element by element: every input bit reaches every output bit."""
    out = words ^ (words >> np.uint64(30))
    out *= np.uint64(0xBF58476D1CE4E5B9)
    out ^= out >> np.uint64(27)
    out *= np.uint64(0x94D049BB133111EB)
    out ^= out >> np.uint64(31)
    return out


def permute(index: Ints, size: Ints, key: Words) -> Ints:
    """Image of each `index` under the permutation of [0, size) that `key` names.

    One-dimensional; `size` and `key` have one element for all or one per index, so that many
    small permutations (windows) cost one call. Requires 0 <= index < size <= MAX_SIZE. About
    20-60 ns an element from 4,000 elements on; a call costs some 100 us however few there are.
    """
    bits = _domain_bits(size)
    bound = size.astype(np.uint64)
    out = _encrypt(index.astype(np.uint64), bits, key)
    outside = np.flatnonzero(out >= bound)
    while outside.size:
        again = _encrypt(out[outside], _at(bits, outside), _at(key, outside))
        out[outside] = again
        outside = outside[again >= _at(bound, outside)]
    return out.astype(np.int64)


def permutation(size: int, key: int) -> Ints:
    """The whole permutation of [0, size) as an array: 8 bytes an element."""
    index = np.arange(size, dtype=np.int64)
    return permute(index, np.array([size], np.int64), np.array([key & _WORD], np.uint64))


def _domain_bits(size: Ints) -> Words:
    """Bits of the domain: the smallest b >= 2 with 2**b >= size."""
    _, bit_length = np.frexp((size - 1).astype(np.float64))
    bits: Words = np.maximum(bit_length, 2).astype(np.uint64)
    return bits


def _encrypt(words: Words, bits: Words, key: Words) -> Words:
    right_bits = (bits + np.uint64(1)) >> np.uint64(1)
    right_mask = (np.uint64(1) << right_bits) - np.uint64(1)
    left_mask = (np.uint64(1) << (bits - right_bits)) - np.uint64(1)
    left, right = words >> right_bits, words & right_mask
    for number in range(1, _ROUNDS + 1):
        scrambled = mix(right + (key + np.uint64((number * _GOLDEN) & _WORD)))
        scrambled ^= left
        scrambled &= left_mask if number % 2 else right_mask
        left, right = right, scrambled
    joined: Words = (left << right_bits) | right
    return joined


def _at(values: Words, index: npt.NDArray[np.intp]) -> Words:
    return values if values.size == 1 else values[index]
