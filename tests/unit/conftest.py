"""Support modules of the unit tests (faulty_store) are importable by name.

pytest's importlib mode adds no folder to the path, so this one is added here.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The URL of an S3 server in this process, on a free loopback port, with bucket `relit`.

    RELIT_TEST_S3 names another one, whose credentials are in the environment.
    """
    import boto3

    if given := os.environ.get("RELIT_TEST_S3"):
        boto3.client("s3", endpoint_url=given).create_bucket(Bucket="relit")
        yield given
        return
    from moto.server import ThreadedMotoServer

    environment = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.delenv("AWS_ENDPOINT_URL", raising=False)
        patch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
        one_write_at_a_time(patch)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="relit")
        yield endpoint
        server.stop()


def one_write_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """moto looks whether an object is there and writes it then, in threads: of racing creates more
    than one could win, on a busy machine, which no store of that protocol does.
    """
    from moto.s3.responses import S3Response

    lock = threading.Lock()
    for name in ("put_object", "_key_response_post"):
        real = getattr(S3Response, name)

        def guarded(*args: Any, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            with lock:
                return real(*args, **kwargs)

        patch.setattr(S3Response, name, guarded)


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """Memory stands for the disk: what is tested is order and content, not the device."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="relit-test-") as root:
        yield Path(root)


@pytest.fixture
def node(tmpfs: Path) -> Iterator[Any]:
    """A node (node_harness) that is cleared away after the test."""
    from node_harness import Node

    made = Node(tmpfs)
    yield made
    made.clear()
