"""A real S3 server (Ceph's gateway) on loopback, and the proxy that breaks its connections.

Both come from a kit that lies beside the checkout or where RELIT_S3_KIT says: `ceph-rgw.sh` and
`fault_proxy.py`. Where the kit or the installed server is missing, `missing()` says so and the
tests are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KIT = Path(os.environ.get("RELIT_S3_KIT", ROOT.parent / "shared" / "s3"))
BUCKET = "ckpt"


def missing() -> str:
    """Why there can be no real server here; empty if there can."""
    absent = [name for name in ("ceph-rgw.sh", "fault_proxy.py") if not (KIT / name).exists()]
    if absent:
        return f"{KIT} has no {' and no '.join(absent)}"
    return "" if shutil.which("radosgw") else "radosgw is not installed (ceph-rgw.sh install)"


@contextmanager
def server(folder: Path, num_bytes: int = 3 << 30) -> Iterator[dict[str, str]]:
    """A server of its own in `folder` that holds `num_bytes`; yields its clients' environment.

    S3_TLS_URL is its https address, AWS_CA_BUNDLE the authority that vouches for it.
    """
    settings = {"S3_DIR": str(folder), "S3_SIZE": str(num_bytes), "S3_TLS": "1"}
    environment = os.environ | settings

    def rgw(*arguments: str) -> str:
        command = ["bash", str(KIT / "ceph-rgw.sh"), *arguments]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert done.returncode == 0, f"ceph-rgw.sh {arguments[0]} failed"
        return done.stdout

    try:
        rgw("start")
        lines = [line.removeprefix("export ") for line in rgw("env").splitlines()]
        yield dict(shlex.split(line)[0].split("=", 1) for line in lines)
    finally:
        rgw("destroy")


def fault_proxy(upstream: str) -> Any:
    """A FaultProxy of the kit before `upstream`, to be used in a `with`."""
    spec = importlib.util.spec_from_file_location("fault_proxy", KIT / "fault_proxy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fault_proxy"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module.FaultProxy(upstream)
