"""What an s3:// URL says, and how s3fs and botocore are opened from it.

They get limits that their defaults lack, and what older S3 servers need.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import parse_qs, urlsplit

S3_PROTOCOLS = frozenset({"s3", "s3a"})
# What may stand after '?' in an s3:// URL.
URL_OPTIONS = frozenset({"endpoint_url", "region", "backend", "upload_bytes_per_s"})
# The defaults, 50 MiB parts ten at a time, take a gibibyte of memory.
TRANSFER = {"chunksize": 16 << 20, "max_concurrency": 4}
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 30
# Since 2025 the SDK appends a checksum trailer over https, which S3 look-alikes refuse (411) or
# store as part of the object. Shards carry checksums of their own.
PLAIN_CHECKSUMS = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}


def url_options(url: str) -> dict[str, str]:
    """What stands after '?', the last of each name."""
    return {key: values[-1] for key, values in parse_qs(urlsplit(url).query).items()}


def bucket_and_prefix(url: str) -> tuple[str, str]:
    """Where the objects lie; the prefix without slashes at its ends. Nothing is unquoted."""
    bucket, _, prefix = url.partition("?")[0].partition("://")[2].strip("/").partition("/")
    return bucket, prefix.strip("/")


def custom_endpoint(url: str) -> str:
    """The endpoint of the URL or the environment; empty for AWS itself."""
    return url_options(url).get("endpoint_url") or _endpoint_of_environment()


def s3_options(url: str) -> dict[str, Any]:
    """Options for s3fs from an `s3://bucket/prefix?endpoint_url=...&region=...` URL."""
    query = url_options(url)
    endpoint = custom_endpoint(url)
    config: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
        "retries": {"mode": "standard", "max_attempts": 3},
        "max_pool_connections": 16,
    }
    if endpoint:
        config |= PLAIN_CHECKSUMS
    options: dict[str, Any] = {"config_kwargs": config, "max_concurrency": 4}
    if endpoint:
        options["endpoint_url"] = endpoint
    if "region" in query:
        options["client_kwargs"] = {"region_name": query["region"]}
    return options


def _endpoint_of_environment() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
