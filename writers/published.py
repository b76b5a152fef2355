"""Whether the dataset that a build made is where it goes: what processes that share the work look at.

At most one of them publishes at a time; the others see that it is done, and are done.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from shardkit.errors import BuildError
from shardkit.storage.local import LocalStore
from shardkit.storage.resilient import connect
from shardkit.storage.store import ObjectNotFoundError, Store, StoreError
from shardkit.upload.contents import INDEX_NAMES, MARKER_NAME
from shardkit.writers.publish import CARD_NAME
from shardkit.writers.publish_remote import RemoteOutput

__all__ = ["Watch"]


class Watch:
    """Made before the work begins: with `replace`, a dataset that was there then does not count."""

    def __init__(self, output: Path | RemoteOutput, *, replace: bool) -> None:
        self._output = output
        self._before = self._index() if replace else None

    def shows(self, card: bytes) -> bool:
        """Whether a dataset of this very card is there, whole; BuildError if that cannot be known."""
        try:
            index = self._index()
            if index is None or index == self._before or self._holds(MARKER_NAME):
                return False
            return self._store.get(CARD_NAME) == card
        except ObjectNotFoundError:
            return False
        except StoreError as error:
            raise BuildError(f"output {self._output}: {error}; the same command continues") from error

    @cached_property
    def _store(self) -> Store:
        if isinstance(self._output, Path):
            return LocalStore(self._output)
        return connect(self._output.url, self._output.storage)

    def _index(self) -> tuple[str, str] | None:
        for name in INDEX_NAMES:
            try:
                return name, self._store.head(name).version
            except ObjectNotFoundError:
                continue
        return None

    def _holds(self, name: str) -> bool:
        try:
            self._store.head(name)
        except ObjectNotFoundError:
            return False
        return True
