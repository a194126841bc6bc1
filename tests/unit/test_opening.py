"""From a URL to a store; no URL carries a credential."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from relit_storage.errors import (
    StoreAddressError,
)
from relit_storage.stores.memory import MemoryStore
from relit_storage.stores.opening import open_store, redact_url
from relit_storage.stores.prefixed import PrefixedStore


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAKEY:hunter2@bucket/x",
        "s3://AKIAKEY:hunt/er2@bucket/x",
        "s3://user@bucket/x",
        "s3://bucket/x?secret=hunter2",
        "s3://bucket/x?endpoint_url=http://user:hunter2@host",
        "ftp://user:hunter2@host/x",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StoreAddressError) as caught:
        open_store(url)
    assert "AWS_ACCESS_KEY_ID" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "er2" not in str(caught.value)
    assert "AKIAKEY" not in redact_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "  ",
        "memory://",
        "file://host/x",
        "file://",
        "s3://",
        "nosuch://bucket/x",
        "s3://bucket/x?backend=boto",
        "ftp://host/x?backend=obstore",
        "s3://bucket/x?upload_bytes_per_s=0",
        "s3://bucket/x?upload_bytes_per_s=fast",
        "s3://bucket/x?upload_bytes_per_s=inf",
        "s3://bucket/x?upload_bytes_per_s=1e6&backend=fsspec",
    ],
)
def test_addresses_that_name_no_store(url: str) -> None:
    with pytest.raises(StoreAddressError):
        open_store(url)


def test_opening_again_by_url_finds_the_same_objects(tmp_path: Path, s3_endpoint: str) -> None:
    bucket = f"s3://relit/{uuid.uuid4().hex}?endpoint_url={s3_endpoint}&region=us-east-1"
    for url in (str(tmp_path / "a b%20c"), f"file://{tmp_path}/f", "memory://again", bucket):
        store = PrefixedStore(open_store(url), "exp/run")
        store.put("key", url.encode())
        assert open_store(store.url).get("key") == url.encode()


def test_home_and_relative_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert open_store("~/store").url == f"file://{tmp_path}/store"
    assert open_store("./store").url == f"file://{tmp_path}/store"


def test_views_of_two_runs_do_not_see_each_other() -> None:
    ground = MemoryStore()
    one, two = PrefixedStore(ground, "exp/a"), PrefixedStore(ground, "exp/ab/")
    one.put("key", b"1")
    assert two.list("") == []
    assert one.list("") == ["key"]
    assert ground.list("") == ["exp/a/key"]
