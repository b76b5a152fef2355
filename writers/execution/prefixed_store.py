"""The part of a store below a prefix, with keys that leave the prefix out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from shardkit.storage.store import Body, ObjectInfo, Store

__all__ = ["PrefixedStore"]


class PrefixedStore:
    """Keeps the contract of `Store`; `prefix` ends with a "/"."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    @property
    def url(self) -> str:
        return f"{self._store.url}/{self._prefix.rstrip('/')}"

    def head(self, key: str) -> ObjectInfo:
        return self._ours(self._store.head(self._prefix + key))

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        return self._store.get(self._prefix + key, start, stop, version=version)

    def open(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> Body:
        return self._store.open(self._prefix + key, start, stop, version=version)

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        return self._ours(self._store.put(self._prefix + key, data, if_absent=if_absent, metadata=metadata))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return (self._ours(info) for info in self._store.list(self._prefix + prefix))

    def delete(self, key: str) -> None:
        self._store.delete(self._prefix + key)

    def close(self) -> None:
        self._store.close()

    def _ours(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, key=info.key.removeprefix(self._prefix))
