"""Create-if-absent over a store whose clients repeat themselves and whose answers get lost."""

from __future__ import annotations

from collections.abc import Callable

from relit_storage.errors import ObjectMissingError, StoreUnavailableError
from relit_storage.stores.answers import KeyTakenError
from relit_storage.stores.protocol import ObjectStore

CREATE_TRIES = 4


def create_once(store: ObjectStore, key: str, data: bytes, create: Callable[[], None]) -> bool:
    """True if the object under `key` is ours after `create`, one conditional request.

    A refusal is settled by reading back: a request whose answer was lost is repeated, and then
    the object that is in the way may be our own. Blocks; raises what `create` and `get` raise.
    """
    for _ in range(CREATE_TRIES):
        try:
            create()
            return True
        except KeyTakenError:
            try:
                return store.get(key) == data
            except ObjectMissingError:
                continue  # it was deleted in between
    raise StoreUnavailableError(url=store.url, key=key, cause="created and deleted in a loop")
