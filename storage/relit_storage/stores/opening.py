"""From a URL to a store, and from a store to the proof that it keeps its promises.

    /path  ~/path  ./path  file:///path     a directory (LocalStore)
    memory://name[/prefix]                  this process only; one store per name
    s3://bucket/prefix[?endpoint_url=...&region=...&upload_bytes_per_s=...&backend=fsspec]
    anything else that fsspec knows         must pass `probe`

s3 is served by obstore, all else by fsspec; `backend=fsspec` asks for the portable one there too.

A URL travels in configs, events and logs, so it never carries a credential: those come from the
environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE) or the provider chain.
"""

from __future__ import annotations

import math
import re
import threading
from urllib.parse import unquote, urlsplit

from relit_storage.errors import StoreAddressError
from relit_storage.stores.backoff import Backoff
from relit_storage.stores.fsspec_store import FsspecStore
from relit_storage.stores.local import LocalStore
from relit_storage.stores.memory import MemoryStore
from relit_storage.stores.obstore_store import ObstoreStore
from relit_storage.stores.prefixed import PrefixedStore
from relit_storage.stores.probing import Guarantees, probe
from relit_storage.stores.protocol import ObjectStore
from relit_storage.stores.s3_options import S3_PROTOCOLS, URL_OPTIONS, url_options

__all__ = ["Guarantees", "open_store", "probe", "redact_url"]

_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def open_store(url: str, *, deadline_s: float = 60.0) -> ObjectStore:
    """The store at `url`. Touches nothing; the first verb does.

    `deadline_s` bounds each verb of a remote store. StoreAddressError if the URL names no store
    or carries a credential.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        if not url.strip():
            raise StoreAddressError(url="''", reason="it is empty")
        return LocalStore(url)
    if scheme == "file":
        return LocalStore(_file_path(url))
    if scheme == "memory":
        name, _, prefix = rest.strip("/").partition("/")
        return PrefixedStore(_memory_store(name), prefix) if prefix else _memory_store(name)
    _refuse_credentials(url)
    _require_known(url, scheme)
    return _remote(url, scheme, Backoff(deadline_s=deadline_s))


def _remote(url: str, scheme: str, backoff: Backoff) -> ObjectStore:
    options = url_options(url)
    fast = scheme in S3_PROTOCOLS
    backend = options.get("backend", "obstore" if fast else "fsspec")
    if backend not in ("obstore", "fsspec") or (backend == "obstore" and not fast):
        reason = f"backend={backend} is none for {scheme}: s3 has obstore and fsspec, others fsspec"
        raise StoreAddressError(url=redact_url(url), reason=reason)
    cap = _upload_cap(url, options.get("upload_bytes_per_s"))
    if backend == "obstore":
        return ObstoreStore(url, backoff=backoff, upload_bytes_per_s=cap)
    if cap is not None:
        reason = "only the obstore backend keeps upload_bytes_per_s"
        raise StoreAddressError(url=redact_url(url), reason=reason)
    return FsspecStore(url, backoff=backoff)


def _upload_cap(url: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        cap = float(text)
    except ValueError:
        cap = 0.0
    if not 0 < cap < math.inf:
        reason = f"upload_bytes_per_s={text} is no number of bytes above 0"
        raise StoreAddressError(url=redact_url(url), reason=reason)
    return cap


def redact_url(url: str) -> str:
    """`url` with user info and unknown query values replaced by `***`; for logs and errors."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    address, question, query = rest.partition("?")
    # A secret key may contain '/': with a ':' before the '@', all up to the last '@' may be one.
    address = re.sub(r"^([^@]*:.*|[^/@]*)@", "***@", address)
    shown = [
        part if part.partition("=")[0] in URL_OPTIONS else f"{part.partition('=')[0]}=***"
        for part in query.split("&")
        if part
    ]
    return f"{scheme}://{address}{question}{'&'.join(shown)}"


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        reason = f"file:// names a host, {redact_url(parts.netloc)!r}; write file:///path"
        raise StoreAddressError(url=redact_url(url), reason=reason)
    if not parts.path.startswith("/"):
        raise StoreAddressError(url=redact_url(url), reason="file:// needs an absolute path")
    return unquote(url.partition("://")[2].removeprefix("localhost"))


def _memory_store(name: str) -> MemoryStore:
    if not name:
        raise StoreAddressError(url="memory://", reason="a memory store needs a name")
    with _memory_lock:
        return _memory_stores.setdefault(name, MemoryStore(name))


def _refuse_credentials(url: str) -> None:
    scheme, _, rest = url.partition("://")
    address, _, query = rest.partition("?")
    s3 = scheme in S3_PROTOCOLS
    names = [part.partition("=")[0] for part in query.split("&") if part]
    strange = [name for name in names if name not in URL_OPTIONS]
    user, at, _ = address.partition("@")
    bucket = address.partition("/")[0]
    endpoint = unquote(query)
    if (at and (s3 or ":" in user)) or (s3 and ":" in bucket) or "@" in endpoint:
        reason = (
            "it carries a credential; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "AWS_PROFILE, in the environment instead"
        )
        raise StoreAddressError(url=redact_url(url).partition("?")[0], reason=reason)
    if strange:
        reason = (
            f"{strange[0]!r} is not among its options {sorted(URL_OPTIONS)}; credentials belong "
            "into the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE)"
        )
        raise StoreAddressError(url=redact_url(url), reason=reason)


def _require_known(url: str, scheme: str) -> None:
    if not urlsplit(url).netloc:
        raise StoreAddressError(url=redact_url(url), reason="it names no bucket or host")
    import fsspec  # here: `import relit` must stay light

    try:
        fsspec.get_filesystem_class(scheme)
    except (ValueError, ImportError) as error:
        raise StoreAddressError(url=redact_url(url), reason=str(error)) from error
