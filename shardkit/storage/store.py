"""The contract that every store keeps, and that tests/test_storage_conformance.py holds every store to.

A store maps keys (relative paths with "/", checked by `checked_key`) to objects. An object is replaced whole
and atomically: a reader sees the old bytes or the new ones, never a mixture, and each content has a `version`
of its own. A write is durable when `put` returns. Stores may be shared by threads, pickled, and used after a
fork. They do not retry: `shardkit.storage.resilient` does, around any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from shardkit.errors import ShardError
from shardkit.index import checked_basename
from shardkit.storage.errors import StoreError

__all__ = ["Body", "ObjectInfo", "Store", "checked_key", "checked_range"]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object: its key, size, version (S3: the ETag), and the metadata it was put with if that is known."""

    key: str
    bytes: int
    version: str
    metadata: Mapping[str, str] = field(default_factory=dict)


class Body(Protocol):
    """An open read of an object, or of a range of it; a context manager."""

    @property
    def info(self) -> ObjectInfo:
        """The whole object, whatever range is read."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the start of `buffer` (at least 1 byte long) with what comes next and return how much it was.

        Returns as soon as some bytes are there (in bodies over 1 MiB, a store may wait for up to 128 KiB);
        0 only at the end of the range. TransientError if the connection breaks, or those do not arrive
        within the store's read timeout, before that.
        """

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """Objects by key. All methods raise `StoreError`s of the kinds in `shardkit.storage.errors`."""

    @property
    def url(self) -> str:
        """What keys are relative to: "s3://bucket/prefix", "/folder", … without a "/" at its end."""

    def head(self, key: str) -> ObjectInfo:
        """Size, version and metadata; ObjectNotFoundError."""

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        """Bytes `start` to `stop` (None or beyond the end: the end) in one piece."""

    def open(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> Body:
        """The same range as a stream.

        ObjectNotFoundError; ObjectChangedError if the object is not of `version`; StoreError if `start` is
        not inside of the object (0 is inside of an empty one).
        """

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        """Write an object from memory or from a file, whole or not at all; large files in parts.

        With `if_absent`, ObjectExistsError if there is one, decided by the store in one atomic step, also
        when the acknowledgement of our own write was lost. `metadata` (ASCII; lower-case names) comes back
        from `head` where a store can keep it.
        """

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, sorted by key (by code point), without metadata."""

    def delete(self, key: str) -> None:
        """Remove an object; it is no error if there is none."""

    def close(self) -> None:
        """Let go of connections; the store may still be used and then opens new ones."""


def checked_key(store_url: str, key: str) -> str:
    """`key` if it is a relative path that stays below the store's url; StoreError otherwise."""
    try:
        return checked_basename(key, store_url)
    except ShardError as error:
        raise StoreError(store_url, f"bad key {key!r:.200}") from error


def checked_range(where: str, start: int, stop: int | None, size: int) -> tuple[int, int]:
    """(start, stop) within an object of `size` bytes, as `Store.open` defines it."""
    end = size if stop is None else min(stop, size)
    if start < 0 or (start >= size and start > 0) or end < start:
        raise StoreError(where, f"bytes {start:,} to {stop} of {size:,} were asked for", status=416)
    return start, end
