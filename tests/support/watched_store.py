"""A memory store that can be killed at any operation, and a reader who looks after every one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from shardkit.hashing import hash_bytes
from shardkit.publish.contents import checkable_hash, find_contents
from shardkit.storage.memory import MemoryBody, MemoryStore
from shardkit.storage.store import ObjectInfo, ObjectNotFoundError, Store

__all__ = ["FalseIndexError", "PulledPlugError", "WatchedStore", "check_reader", "fresh_memory", "objects"]

T = TypeVar("T")
_numbers = itertools.count()


class PulledPlugError(BaseException):
    """Not an Exception: nothing may handle it, as nothing handles a kill."""


class FalseIndexError(BaseException):
    """A reader saw an index without its files. Not an Exception: it must not pass for a failed request."""


class WatchedStore:
    """`below`, which stops working at operation `limit`: before it, or with `late` just after its effect.

    `watch` is called with its number after every operation. `puts` has the names of what was put.
    """

    def __init__(
        self,
        below: MemoryStore,
        *,
        limit: int | None = None,
        late: bool = False,
        watch: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._below, self._limit, self._late, self._watch = below, limit, late, watch
        self._lock = threading.RLock()
        self.operations = 0
        self.puts: list[str] = []

    @property
    def url(self) -> str:
        return self._below.url

    def head(self, key: str) -> ObjectInfo:
        return self._do(lambda: self._below.head(key))

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        return self._do(lambda: self._below.get(key, start, stop, version=version))

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> MemoryBody:
        return self._do(lambda: self._below.open(key, start, stop, version=version))

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        def action() -> ObjectInfo:
            info = self._below.put(key, data, if_absent=if_absent, metadata=metadata)
            self.puts.append(key)
            return info

        return self._do(action)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(self._do(lambda: list(self._below.list(prefix))))

    def delete(self, key: str) -> None:
        self._do(lambda: self._below.delete(key))

    def close(self) -> None:
        pass

    def _do(self, action: Callable[[], T]) -> T:
        with self._lock:
            self.operations += 1
            dead = self._limit is not None and self.operations >= self._limit
            if dead and (not self._late or self.operations != self._limit):
                raise PulledPlugError
            try:
                return action()
            finally:
                self._watch(self.operations)
                if dead:
                    raise PulledPlugError


def fresh_memory() -> MemoryStore:
    """A memory store that no other test has used."""
    return MemoryStore(f"memory://watched-{next(_numbers)}/prefix")


def objects(store: Store) -> dict[str, bytes]:
    """All that a store holds."""
    return {info.key: store.get(info.key) for info in store.list()}


def check_reader(store: Store, fingerprints: set[str]) -> None:
    """FalseIndexError unless a reader sees no index, or that of a known dataset with every file whole."""
    found = find_contents(store)
    if len(found) > 1 or not {contents.manifest.fingerprint for contents in found} <= fingerprints:
        raise FalseIndexError(f"{len(found)} indexes, or an unknown one")
    for contents in found:
        for file in contents.files:
            name = checkable_hash(file)
            assert name is not None
            try:
                data = store.get(file.basename)
            except ObjectNotFoundError as error:
                raise FalseIndexError(f"the index is there, {file.basename} is not") from error
            if hash_bytes(data, [name])[name] != file.hashes[name]:
                raise FalseIndexError(f"the index is there, {file.basename} is another's")
