"""The run's code on a node: unpacked once, however many ranks begin at the same time."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

from relit_platform.worker.entry import _unpack


def archive() -> bytes:
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as zipped:
        zipped.writestr("job.py", "x = 1\n")
    return body.getvalue()


def test_the_rank_that_comes_second_leaves_nothing(tmp_path: Path) -> None:
    root, data = tmp_path / "code" / "abc", archive()
    for _ in range(2):
        _unpack(data, hashlib.sha256(data).hexdigest(), str(root))
    assert [path.name for path in root.parent.iterdir()] == ["abc"]
    assert (root / "job.py").read_text() == "x = 1\n"
