"""The members of a remote tar from its headers, while the tar streams by: nothing of it is kept.

For tars that no cache has room for. Payloads that are longer than a request costs are passed over by opening
the object anew behind them, so a tar of videos costs a request a video instead of its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardkit.index import Column, ShardInfo
from shardkit.storage.store import Body, Store
from shardkit.tar.decode import encoding_of
from shardkit.tar.headers import Member, walk_members
from shardkit.tar.index import TarIndex, group_members, split_name
from shardkit.tar.index_file import Scanned

__all__ = ["skim_tar"]

SKIP_BYTES = 8 << 20  # what arrives in the time that another request takes to begin
_PIECE_BYTES = 1 << 17


def skim_tar(store: Store, info: ShardInfo, version: str) -> tuple[Scanned, TarIndex] | None:
    """What a scan of a plain tar finds; None if only its bytes tell: it is compressed, or holds arrays.

    ShardError if it is damaged; ObjectChangedError if it is not of `version`; StoreError.
    """
    if info.compression:
        return None
    where = f"{store.url}/{info.stored.basename}"
    with _Passing(store, info.stored.basename, info.stored.bytes, version) as data:
        try:
            index = group_members(_without_arrays(walk_members(data, where)), where)
        except _ArraysError:
            return None
    columns = tuple(Column(extension, encoding_of(extension)) for extension in index.extensions)
    return Scanned(len(index), info.stored.bytes, columns), index


class _ArraysError(Exception):
    """A column of arrays is described by the headers of all of them."""


def _without_arrays(members: Iterator[Member]) -> Iterator[Member]:
    for member in members:
        parts = split_name(member.name)
        if parts is not None and parts[1].rpartition(".")[2] == "npy":
            raise _ArraysError
        yield member


class _Passing:
    """An object's bytes, each slice at or behind the start of the one before; nothing else is kept."""

    def __init__(self, store: Store, key: str, size: int, version: str) -> None:
        self._store, self._key, self._size, self._version = store, key, size, version
        self._body: Body | None = None
        self._buffer = memoryview(bytearray(_PIECE_BYTES))
        self._begin = self._end = 0  # of what the buffer holds
        self._last = (0, b"")  # the end marker is looked at twice

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, span: slice) -> bytes:
        start, stop, _ = span.indices(self._size)
        at, data = start, bytearray()
        if start < self._end and start == self._last[0]:
            data += self._last[1][: max(0, stop - start)]
            at += len(data)
        while at < stop:
            if not self._begin <= at < self._end:
                self._fill(at)
                continue
            data += self._buffer[at - self._begin : min(stop, self._end) - self._begin]
            at = min(stop, self._end)
        self._last = (start, bytes(data))
        return self._last[1]

    def _fill(self, at: int) -> None:
        """Read the next piece, or skip to where it begins."""
        assert at >= self._end
        if self._body is not None and at - self._end > SKIP_BYTES:
            self._close()
        if self._body is None:
            self._body = self._store.open(self._key, at, version=self._version)
            self._end = at
        count = self._body.readinto(self._buffer)
        assert count, "a body ends where its object does"
        self._begin, self._end = self._end, self._end + count

    def _close(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None

    def __enter__(self) -> _Passing:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
