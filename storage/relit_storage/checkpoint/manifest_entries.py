"""What a manifest lists: the tensors of a job, their pieces, and the files of each rank."""

from __future__ import annotations

from dataclasses import dataclass

from relit_storage.checkpoint.pieces import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor: its place in the whole tensor, and its bytes [from, to) in a file."""

    file: str
    rank: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    byte_range: tuple[int, int]

    @property
    def box(self) -> Box:
        """Its place in the tensor."""
        return Box(self.offsets, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of the whole job, wherever its pieces lie; at most one piece of each rank, by
    rank. One piece that is all of it, or several that tile it.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A rank's files; names are relative to the root of any tier."""

    rank: int
    node_id: str
    file: str
    num_bytes: int
    chunk_bytes: int
    checksums: tuple[str, ...]
    extras_file: str
    extras_bytes: int
    extras_checksum: str
