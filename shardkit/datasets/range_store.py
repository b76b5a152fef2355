"""Present byte ranges of token files as objects of a store; the key of an object is a token shard's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardkit.formats.tokens import (
    Piece,
    pieces_of,
)
from shardkit.storage.store import (
    BaseBody,
    BaseStore,
    Body,
    ObjectInfo,
    Store,
    StoreError,
    TransientError,
    checked_range,
)

SEPARATOR = "\n"  # separates the versions of a shard's files in the version of the shard


class RangeStore(BaseStore):
    """A read-only store whose keys may be names of token shards, which are ranges of objects in `store`.

    Requests for other keys are passed to `store`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        return self._store.url

    def head(self, key: str) -> ObjectInfo:
        if (pieces := _pieces(key)) is None:
            return self._store.head(key)
        found = [self._store.head(piece.file) for piece in pieces]
        for piece, info in zip(pieces, found, strict=True):
            _check_size(self.where(key), piece, info)
        return _joined(key, pieces, [info.version for info in found])

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> _Range:
        pieces = _pieces(key)
        if pieces is None:
            body = self._store.open(key, start, stop, version=version)
            end = body.info.bytes if stop is None else min(stop, body.info.bytes)
            return _Range([(body, end - start)], body.info)
        expected = [None] * len(pieces) if version is None else version.split(SEPARATOR)
        size = sum(piece.bytes for piece in pieces)
        start, stop = checked_range(self.where(key), ObjectInfo(key, size, ""), start, stop, None)
        bodies: list[tuple[Body, int]] = []
        found, before = [], 0
        try:
            for piece, its_version in zip(pieces, expected, strict=True):
                low, high = (piece.start + min(max(edge - before, 0), piece.bytes) for edge in (start, stop))
                before += piece.bytes
                if low < high:
                    body = self._store.open(piece.file, low, high, version=its_version)
                    bodies.append((body, high - low))
                    info = body.info
                else:  # no byte of this file is read, but its version is a part of the shard's version
                    info = self._store.head(piece.file)
                _check_size(self.where(key), piece, info)
                found.append(its_version or info.version)
        except BaseException:
            _Range(bodies, ObjectInfo(key, 0, "")).close()
            raise
        return _Range(bodies, _joined(key, pieces, found))

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        raise StoreError(self.where(key), "is read-only: it is a range of other files")

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        raise StoreError(self.where(key), "is read-only: it is a range of other files")

    def close(self) -> None:
        self._store.close()


class _Range(BaseBody):
    """The body of a token shard: the concatenated bodies of its pieces."""

    def __init__(self, bodies: Sequence[tuple[Body, int]], info: ObjectInfo) -> None:
        """Concatenate `bodies`, each given with the number of bytes to read from it."""
        self.info, self._bodies = info, [*bodies]

    @property
    def left(self) -> int:
        return sum(left for _, left in self._bodies)

    def readinto(self, buffer: memoryview, /) -> int:
        while self._bodies:
            body, left = self._bodies[0]
            if left:
                count = body.readinto(buffer[:left])
                if not count:  # an error, because the next piece's bytes would take the place of these
                    raise TransientError(self.info.key, f"ended early: {left:,} bytes of a piece are missing")
                self._bodies[0] = body, left - count
                return count
            self._bodies.pop(0)[0].close()
        return 0

    def close(self) -> None:
        while self._bodies:
            self._bodies.pop()[0].close()


def _pieces(key: str) -> list[Piece] | None:
    try:
        return pieces_of(key)
    except ValueError:
        return None


def _joined(key: str, pieces: Sequence[Piece], versions: Sequence[str]) -> ObjectInfo:
    return ObjectInfo(key, sum(piece.bytes for piece in pieces), SEPARATOR.join(versions))


def _check_size(where: str, piece: Piece, info: ObjectInfo) -> None:
    if info.bytes < piece.stop:
        raise StoreError(where, f"{piece.file} has {info.bytes:,} bytes and ends before this range does")
