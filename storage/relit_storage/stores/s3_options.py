"""How s3fs is opened: limits that its defaults lack, and what older S3 servers need."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import parse_qs, urlsplit

S3_PROTOCOLS = frozenset({"s3", "s3a"})
URL_OPTIONS = frozenset({"endpoint_url", "region"})  # what may stand after '?' in an s3:// URL
# The defaults, 50 MiB parts ten at a time, take a gibibyte of memory.
TRANSFER = {"chunksize": 16 << 20, "max_concurrency": 4}
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 30


def s3_options(url: str) -> dict[str, Any]:
    """Options for s3fs from an `s3://bucket/prefix?endpoint_url=...&region=...` URL."""
    query = {key: values[-1] for key, values in parse_qs(urlsplit(url).query).items()}
    endpoint = query.get("endpoint_url") or _endpoint_of_environment()
    config: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
        "retries": {"mode": "standard", "max_attempts": 3},
        "max_pool_connections": 16,
    }
    if endpoint:
        # Since 2025 the SDK appends a checksum trailer over https, which S3 look-alikes refuse
        # (411) or store as part of the object. Shards carry checksums of their own.
        config["request_checksum_calculation"] = "when_required"
        config["response_checksum_validation"] = "when_required"
    options: dict[str, Any] = {"config_kwargs": config, "max_concurrency": 4}
    if endpoint:
        options["endpoint_url"] = endpoint
    if "region" in query:
        options["client_kwargs"] = {"region_name": query["region"]}
    return options


def _endpoint_of_environment() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
