"""Metadata that would harm pickle's own reader never reaches it; few files are open at a time."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from relit import dcp_import
from relit.dcp_import import MAX_KEY, DcpFolder, _check_opcodes
from relit.errors import SourceRefusedError

SIZE = b"ctorch\nSize\n"
TUPLE_TOO_LARGE = f"a tuple of more than {MAX_KEY} objects"


def doubled(levels: int) -> bytes:
    """A tuple that holds the one before twice, and so on: hashing it would take for ever."""
    return b")\x94" + b"".join(b"h" + bytes([n]) + b"\x86\x94" for n in range(levels))


def sizes(levels: int) -> bytes:
    """A size that holds the one before, and so on."""
    return b")\x94" + b"".join(SIZE + b"h" + bytes([n]) + b"\x85\x85R\x94" for n in range(levels))


HARMFUL: list[tuple[str, bytes, str]] = [
    ("a memo of 255", b"]q\xff", "number 255"),
    ("a memo of 2**31", b"]r" + (2**31).to_bytes(4, "little"), f"number {2**31}"),
    ("a deep key", b"})" + b"\x85" * 100_000 + b"Ns", TUPLE_TOO_LARGE),
    ("a deep key, in threes", b"})" + b"NN\x87" * 300 + b"Ns", TUPLE_TOO_LARGE),
    ("a deep key of marks", b"}" + b"(" * 600 + b"t" * 600 + b"Ns", TUPLE_TOO_LARGE),
    ("a deep key, built on", b"})" + b"\x85Nb" * 600 + b"Ns", TUPLE_TOO_LARGE),
    ("a deep key of sizes", b"}" + sizes(250) + b"Ns", TUPLE_TOO_LARGE),
    ("a wide key", b"}(" + b"N" * 600 + b"tNs", TUPLE_TOO_LARGE),
    ("a key for ever", b"}" + doubled(60) + b"Ns", TUPLE_TOO_LARGE),
    ("a size of a list", SIZE + b"](NNe\x85R", "a size that is none"),
    ("past a mark", b"}N(Ns", "takes more"),
    ("past the end", b"}s", "takes more"),
    ("a mark too few", b"Nt", "does not parse"),
]


@pytest.mark.parametrize(("body", "words"), [h[1:] for h in HARMFUL], ids=[h[0] for h in HARMFUL])
def test_what_would_harm_the_reader_is_refused(tmp_path: Path, body: bytes, words: str) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + body + b".")
    with pytest.raises(SourceRefusedError, match=words):
        DcpFolder(str(tmp_path))


@pytest.mark.parametrize("protocol", range(2, 6))
def test_what_pickle_writes_passes(protocol: int) -> None:
    words = {f"w{n}": [n, n * 0.5, None, (n, (True, f"{n}"))] for n in range(3000)}
    shape = torch.Size(range(64))
    data: dict[Any, Any] = {**words, ("a", 1): [shape, shape], shape: {"x": words}, "": [[]] * 999}
    raw = pickle.dumps(data, protocol)
    _check_opcodes(raw, "f")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_import, "MAX_OPEN", 2)
    tensors = {f"w{n}": torch.full((3,), float(n)) for n in range(5)}
    writer = FileSystemWriter(tmp_path, single_file_per_rank=False)
    save(dict(tensors), storage_writer=writer, no_dist=True)
    assert len(list(tmp_path.glob("*.distcp"))) == 5
    folder = DcpFolder(str(tmp_path))
    for name in ("w0", "w1", "w0", "w2", "w0", "w3", "w4", "w1", "w0"):
        found = b"".join(map(bytes, folder.blocks(folder.state[name])))
        assert found == tensors[name].numpy().tobytes()
        assert len(folder._files) <= 2
    folder.close()
    assert not folder._files
