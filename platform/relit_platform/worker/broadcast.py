"""State of one rank to others over the group, and the check that ranks agree.

A newcomer takes a rank whose state only survivors hold: the holder calls `send_state` with the
ranks that need it, each of these calls `receive_state`. Tensors travel packed into flat buffers
of at most 64 MiB, the rest as JSON; nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from relit_platform.errors import ReplicasDivergedError
from relit_platform.facts import Json
from relit_platform.worker.process_group import Group
from relit_platform.worker.state_tree import DTYPES, dtype_name

PACK_BYTES = 64 << 20
MESSAGE_LIMIT_BYTES = 1 << 30
_ALIGN = 16  # any dtype may begin there


class _Piece(NamedTuple):
    """A run of bytes of one tensor inside one flat buffer."""

    name: str
    tensor_start: int
    buffer_start: int
    num_bytes: int


def send_state(
    group: Group, ranks: Sequence[int], tensors: Mapping[str, Tensor], message: Json
) -> int:
    """Send tensors and a JSON message to `ranks`; blocks until all have them.

    Each of `ranks` must be in `receive_state` from this rank. Returns the tensor bytes sent to
    each. Raises CollectiveBrokenError.
    """
    if not ranks:
        return 0
    specs = [(name, dtype_name(t), list(t.shape)) for name, t in tensors.items()]
    header = json.dumps({"tensors": specs, "message": message}).encode()
    group.send(torch.tensor([len(header)], dtype=torch.int64), ranks)
    group.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), ranks)
    sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    for buffer, pieces in _buffers(sizes):
        for piece in pieces:
            raw = _bytes_of(tensors[piece.name].detach().contiguous().cpu())
            start = piece.tensor_start
            _cut(buffer, piece).copy_(raw[start : start + piece.num_bytes])
        group.send(buffer, ranks)
    return sum(sizes.values())


def receive_state(group: Group, rank: int) -> tuple[dict[str, Tensor], Json]:
    """Receive what `rank` sends with `send_state`: CPU tensors of this process's own, message.

    Blocks. Raises CollectiveBrokenError.
    """
    length = torch.zeros(1, dtype=torch.int64)
    group.receive(length, rank)
    num_bytes = int(length)
    if not 0 < num_bytes <= MESSAGE_LIMIT_BYTES:
        raise group.broken("receive", ValueError(f"message of {num_bytes} bytes"))
    raw = torch.empty(num_bytes, dtype=torch.uint8)
    group.receive(raw, rank)
    header = json.loads(raw.numpy().tobytes())
    tensors = {
        name: torch.empty(shape, dtype=DTYPES[dtype]) for name, dtype, shape in header["tensors"]
    }
    sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    for buffer, pieces in _buffers(sizes):
        group.receive(buffer, rank)
        for piece in pieces:
            start = piece.tensor_start
            whole = _bytes_of(tensors[piece.name])
            whole[start : start + piece.num_bytes].copy_(_cut(buffer, piece))
    return tensors, header["message"]


def gather_values(group: Group, values: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Every rank's signed 64-bit integers, by rank; blocks. Equal counts on all ranks."""
    mine = torch.tensor(list(values), dtype=torch.int64)
    return tuple(tuple(int(v) for v in row.tolist()) for row in group.all_gather(mine))


def agree(group: Group, values: Mapping[str, int]) -> None:
    """Check that every rank has the same signed 64-bit value under each name; blocks.

    All ranks must pass the same names in the same order. Raises ReplicasDivergedError naming
    the first that differs and every rank's value.
    """
    if group.world == 1:
        return
    rows = gather_values(group, list(values.values()))
    for index, name in enumerate(values):
        column = [row[index] for row in rows]
        if any(value != column[0] for value in column):
            raise ReplicasDivergedError(what=name, values=dict(enumerate(column)))


def state_digest(tensors: Mapping[str, Tensor]) -> int:
    """A signed 64-bit digest of names and bytes, the same on every rank with equal state.

    Reads every byte once (xxh3: some 20 GB/s); device tensors are copied to the host first.
    """
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        raw = _bytes_of(tensor.detach().contiguous().cpu()).numpy()
        digest.update(raw.data)
    value: int = digest.intdigest()
    return value - (1 << 64) if value >= 1 << 63 else value


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def _cut(buffer: Tensor, piece: _Piece) -> Tensor:
    return buffer[piece.buffer_start : piece.buffer_start + piece.num_bytes]


def _buffers(sizes: Mapping[str, int]) -> Iterator[tuple[Tensor, list[_Piece]]]:
    """Flat buffers and what lies in each; both sides compute the same from the sizes alone.

    One buffer is reused, so each must be done with before the next is asked for.
    """
    total = sum(math.ceil(size / _ALIGN) * _ALIGN for size in sizes.values())
    room = torch.empty(min(total, PACK_BYTES), dtype=torch.uint8)
    pieces: list[_Piece] = []
    used = 0
    for name, size in sizes.items():
        start = 0
        while start < size:
            if used == PACK_BYTES:
                yield room[:used], pieces
                pieces, used = [], 0
            num_bytes = min(size - start, PACK_BYTES - used)
            pieces.append(_Piece(name, start, used, num_bytes))
            start += num_bytes
            used = min(math.ceil((used + num_bytes) / _ALIGN) * _ALIGN, PACK_BYTES)
    if pieces:
        yield room[:used], pieces
