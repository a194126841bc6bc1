"""One process's way into one bucket: credentials, endpoint, and the two clients over them.

obstore moves objects; botocore finds credentials (environment, profile, web identity, instance
role), refreshes them before they expire, and makes the few calls of a multipart upload that obstore
does not have.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlsplit

from relit_storage.stores.s3_options import (
    PLAIN_CHECKSUMS,
    bucket_and_prefix,
    custom_endpoint,
    url_options,
)

CREDENTIALS_TTL = timedelta(minutes=5)  # botocore renews those with less than ten minutes to live
MAX_CONNECTIONS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Access:
    """Opened clients; thread-safe; of no use after a fork. `credentials` None is anonymous.

    objects: obstore's S3Store of the bucket. calls: botocore's client. pool: urllib3's.
    timeout_s bounds a request, and in a part's each piece.
    """

    bucket: str
    region: str
    base_url: str
    credentials: Any
    objects: Any
    calls: Any
    pool: Any
    timeout_s: float

    @property
    def encrypted(self) -> bool:
        """Whether TLS guards the bytes on their way."""
        return self.base_url.startswith("https:")

    def object_url(self, key: str) -> str:
        """The address of an object, for requests that are signed by hand."""
        return f"{self.base_url}/{quote(key, safe='/-_.~')}"


def open_access(url: str, timeout_s: float) -> S3Access:
    """Clients for an s3:// URL, each of whose requests ends within `timeout_s`.

    Reads the environment and the profile files, and may ask an instance's metadata service.
    """
    import botocore.session  # here and below: most processes of a run open no remote store
    import urllib3

    bucket, _ = bucket_and_prefix(url)
    session = botocore.session.get_session()
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    region = url_options(url).get("region") or session.get_config_variable("region") or "us-east-1"
    credentials = session.get_credentials()
    calls = _botocore_client(session, url, region, timeout_s, anonymous=credentials is None)
    endpoint = calls.meta.endpoint_url.rstrip("/")
    host = urlsplit(endpoint).hostname or ""
    # As botocore does: a custom endpoint has the bucket in the path, AWS in the host name, where
    # a dot would not fit the certificate.
    in_path = ".amazonaws.com" not in host or "." in bucket
    base_url = f"{endpoint}/{bucket}" if in_path else endpoint.replace("://", f"://{bucket}.", 1)
    ca_bundle = session.get_config_variable("ca_bundle")
    objects = _obstore_client(bucket, region, base_url, credentials, timeout_s, ca_bundle)
    pool = _connections(urllib3, base_url, ca_bundle)
    return S3Access(
        bucket=bucket,
        region=region,
        base_url=base_url,
        credentials=credentials,
        objects=objects,
        calls=calls,
        pool=pool,
        timeout_s=timeout_s,
    )


@functools.cache
def _loader(data_path: str | None) -> Any:
    """The reader of botocore's service descriptions, which take a while: one for all clients."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


def _botocore_client(session: Any, url: str, region: str, timeout_s: float, anonymous: bool) -> Any:
    from botocore import UNSIGNED
    from botocore.config import Config

    config = Config(
        connect_timeout=min(10.0, timeout_s),
        read_timeout=timeout_s,
        retries={"total_max_attempts": 1},  # the patience is ours
        max_pool_connections=MAX_CONNECTIONS,
        **(PLAIN_CHECKSUMS if custom_endpoint(url) else {}),
        **({"signature_version": UNSIGNED} if anonymous else {}),
    )
    endpoint = custom_endpoint(url) or None
    return session.create_client("s3", region_name=region, endpoint_url=endpoint, config=config)


def _obstore_client(
    bucket: str,
    region: str,
    base_url: str,
    credentials: Any,
    timeout_s: float,
    ca_bundle: str | None,
) -> Any:
    from obstore.store import S3Store

    options: Any = {
        "allow_http": base_url.startswith("http:"),
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=min(10.0, timeout_s)),
    }
    if ca_bundle:
        with open(ca_bundle, "rb") as file:
            options["root_certificate"] = file.read()
    in_path = base_url.endswith(f"/{bucket}")
    provider: Any = None if credentials is None else _Provider(credentials)
    return S3Store(
        bucket,
        region=region,
        endpoint=base_url.removesuffix(f"/{bucket}") if in_path else base_url,
        virtual_hosted_style_request=not in_path,
        skip_signature=provider is None,
        credential_provider=provider,
        unsigned_payload=base_url.startswith("https:"),  # TLS guards it; the hash costs half a core
        client_options=options,
        retry_config={"max_retries": 0},  # the patience is ours
    )


class _Provider:
    """Gives obstore the credentials of the chain, again and again, so that they never expire."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def __call__(self) -> dict[str, Any]:
        frozen = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + CREDENTIALS_TTL,
        }


def _connections(urllib3: Any, base_url: str, ca_bundle: str | None) -> Any:
    options: dict[str, Any] = {"maxsize": MAX_CONNECTIONS, "retries": False}
    if base_url.startswith("https:"):
        options |= {"cert_reqs": "CERT_REQUIRED", "ca_certs": ca_bundle or _default_roots()}
    from urllib.request import getproxies, proxy_bypass

    from relit_storage.stores.file_sending import POOLS

    scheme, host = urlsplit(base_url).scheme, urlsplit(base_url).hostname or ""
    proxy = getproxies().get(scheme)
    use_proxy = proxy and not proxy_bypass(host)
    pool = urllib3.ProxyManager(proxy, **options) if use_proxy else urllib3.PoolManager(**options)
    pool.pool_classes_by_scheme = POOLS
    return pool


def _default_roots() -> str:
    from botocore.httpsession import where  # certifi's, or the copy that botocore carries

    return str(where())
