"""The store of a transfer: opened from a URL, and closed when the transfer ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from shardkit.storage.resilient import connect
from shardkit.storage.store import StorageOptions, Store
from shardkit.storage.url import is_remote, open_store

__all__ = ["transfer_store"]


@contextmanager
def transfer_store(
    place: str | os.PathLike[str] | Store, storage: StorageOptions | None = None
) -> Iterator[Store]:
    """The store at a URL, tried again where that may help, and closed at the end.

    A store that was given is used as it is and left open.
    """
    if not isinstance(place, str | os.PathLike):
        yield place
        return
    store: Store = connect(place, storage) if is_remote(place) else open_store(place)
    try:
        yield store
    finally:
        store.close()
