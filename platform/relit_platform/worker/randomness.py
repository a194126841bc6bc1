"""Randomness as a pure function of (seed, step, rank): nothing to save, nothing to lose.

A newcomer that takes over a rank draws what the dead rank would have drawn, because every
generator is seeded anew at each step.
"""

from __future__ import annotations

import hashlib
import random
import struct
from typing import Any

import numpy as np
import torch

_UINT32 = (1 << 32) - 1


def reseed(seed: int, step: int, rank: int) -> None:
    """Seed python, numpy's global generator, torch CPU and each CUDA device in use.

    Called by the rank before it yields the first batch of `step`. Costs tens of microseconds
    and no device synchronisation. Any integer seed is allowed.
    """
    value = derive(seed, step, rank)
    cuda: Any = torch.cuda
    random.seed(value)
    np.random.seed(value & _UINT32)
    torch.default_generator.manual_seed(value)
    if cuda.is_initialized():
        for index, generator in enumerate(cuda.default_generators):
            generator.manual_seed(value ^ (index + 1))


def derive(seed: int, step: int, rank: int, purpose: str = "") -> int:
    """A 63-bit seed that depends on nothing but its arguments."""
    text = f"{seed}/{step}/{rank}/{purpose}".encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"relit.seed").digest()
    (value,) = struct.unpack("<Q", digest)
    return int(value) >> 1
