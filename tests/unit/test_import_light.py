from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "pyarrow", "s3fs", "botocore", "obstore", "sklearn")

USES = {
    "import relit": "import relit",
    "names": "import relit; [getattr(relit, name) for name in relit.__all__]",
    "help": "from relit.cli.main import main; main(['--help'])",
    "every verb's help": (
        "from relit.cli.main import _VERBS, main; [main([verb, '--help']) for verb in _VERBS]"
    ),
    "every checkpoint tool's help": (
        "from relit.cli.ckpt import _TOOLS; from relit.cli.main import main; "
        "[main(['ckpt', tool, '--help']) for tool in _TOOLS]"
    ),
    "checkpoints not found": (
        "import relit.checkpoints, relit.exporting; from relit.cli.main import main; "
        "assert main(['ckpt', 'verify', 'nope']) == 102"
    ),
    "safetensors imported": (
        'import json; data = b\'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}\'; '
        "open('w.safetensors', 'wb').write(len(data).to_bytes(8, 'little') + data + b'x'); "
        "from relit.cli.main import main; "
        "assert main(['ckpt', 'import', 'w.safetensors', '--run', 'r']) == 0"
    ),
    "a run read": (
        "import relit, tempfile; c = relit.Client(store=tempfile.mkdtemp()); assert c.list() == []"
    ),
    "a run not found": "from relit.cli.main import main; assert main(['status', 'nope']) == 102",
    "the keeper": "import relit.keeper",
}


@pytest.mark.parametrize("use", USES)
def test_the_face_loads_neither_torch_nor_ray(use: str, tmp_path: object) -> None:
    look = f"import sys, json; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    code = f"{USES[use]}\n{look}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=str(tmp_path),
        env={"PATH": "", "HOME": str(tmp_path), "RELIT_STORE": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_every_public_name_resolves_and_others_do_not() -> None:
    import relit

    assert [name for name in relit.__all__ if getattr(relit, name) is None] == []
    assert sorted(relit.__all__) == dir(relit)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        relit.nothing  # noqa: B018
