"""A store in the memory of this process, for tests; the simplest implementation of the interface."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardkit.storage.store import (
    BaseBody,
    BaseStore,
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    checked_key,
    checked_range,
    open_source,
)

_spaces: dict[str, dict[str, tuple[ObjectInfo, bytes]]] = {}
_lock = threading.Lock()
_versions = itertools.count(1)


class MemoryStore(BaseStore):
    """Keeps objects in a dict that all stores of the process with the same name in their URL share.

    "memory://name/some/prefix" shows the objects of "memory://name" whose keys start with "some/prefix/".
    """

    def __init__(self, url: str = "memory://default") -> None:
        self._url = url.rstrip("/")
        name, _, prefix = self._url.partition("://")[2].partition("/")
        self._name = name
        self._prefix = f"{prefix}/" if prefix else ""

    @property
    def url(self) -> str:
        return self._url

    def head(self, key: str) -> ObjectInfo:
        return self._find(key)[0]

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> MemoryBody:
        info, data = self._find(key)
        start, stop = checked_range(self.where(key), info, start, stop, version)
        return MemoryBody(info, memoryview(data)[start:stop])

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        checked_key(self._url, key)
        with open_source(self.where(key), data) as source:
            content = source.read()
        info = ObjectInfo(key, len(content), f"v{next(_versions)}", dict(metadata or {}))
        with _lock:
            space = _spaces.setdefault(self._name, {})
            if if_absent and self._prefix + key in space:
                raise ObjectExistsError(self.where(key), "already exists", status=412)
            space[self._prefix + key] = (info, content)
        return info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with _lock:
            space = dict(_spaces.get(self._name, {}))
        for name in sorted(space):
            if name.startswith(self._prefix + prefix):
                info = space[name][0]
                yield ObjectInfo(name[len(self._prefix) :], info.bytes, info.version)

    def delete(self, key: str) -> None:
        checked_key(self._url, key)
        with _lock:
            _spaces.get(self._name, {}).pop(self._prefix + key, None)

    def _find(self, key: str) -> tuple[ObjectInfo, bytes]:
        checked_key(self._url, key)
        with _lock:
            found = _spaces.get(self._name, {}).get(self._prefix + key)
        if found is None:
            raise ObjectNotFoundError(self.where(key), "there is no such object", status=404)
        info, data = found
        return ObjectInfo(key, info.bytes, info.version, info.metadata), data


class MemoryBody(BaseBody):
    """A body that reads from a view of the object's bytes."""

    def __init__(self, info: ObjectInfo, view: memoryview) -> None:
        self.info = info
        self._view = view

    def readinto(self, buffer: memoryview, /) -> int:
        count = min(len(buffer), len(self._view))
        buffer[:count] = self._view[:count]
        self._view = self._view[count:]
        return count

    @property
    def left(self) -> int:
        return len(self._view)
