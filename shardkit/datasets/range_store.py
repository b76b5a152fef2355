"""Present byte ranges of files as objects of a store, for datasets whose shards are such ranges.

These are flat files of tokens and row files (`RangeRows`). The key of an object is the shard's name,
which lists its pieces (`shardkit.formats.tokens: Piece`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardkit.errors import ShardError
from shardkit.formats.tar.shard_list import fixed_folder, is_pattern, matches
from shardkit.formats.tokens import (
    Piece,
    pieces_of,
)
from shardkit.manifest import Manifest
from shardkit.storage.resilient import ResilientStore, connect
from shardkit.storage.retry import RetryPolicy
from shardkit.storage.store import (
    BaseBody,
    BaseStore,
    Body,
    ObjectInfo,
    ObjectNotFoundError,
    StorageOptions,
    Store,
    StoreError,
    TransientError,
    checked_range,
)
from shardkit.storage.url import is_remote, local_path, open_store, split_url

_SEPARATOR = "\n"  # separates the versions of a shard's files in the version of the shard


@dataclass(frozen=True, slots=True)
class RangeRows:
    """A dataset whose shards are ranges of files: its location and manifest, and the version of each file."""

    folder: Path | None
    store: ResilientStore | None
    manifest: Manifest
    versions: Mapping[str, str]

    def objects(self) -> dict[int, tuple[int, str]]:
        """Return {shard number: (stored size in bytes, version of its files)} for the shard cache."""
        shards = enumerate(self.manifest.shards)
        return {n: (info.stored.bytes, self.version_of(info.stored.basename)) for n, info in shards}

    def dates(self) -> dict[str, tuple[int, int]]:
        """Return {name: (modification time in ns, size in bytes)} of the local files."""
        parts = {name: version.split("-") for name, version in self.versions.items()}
        return {name: (int(part[0]), int(part[-1])) for name, part in parts.items()}

    def name_of(self, number: int) -> str:
        """Return the name of shard `number` for reports."""
        return self.manifest.shards[number].stored.basename

    def place_of(self, number: int, row: int) -> tuple[str, int]:
        """Return (name of a file, number of a row in it) of a row of shard `number`, for reports."""
        return self.name_of(number), row

    def version_of(self, shard: str) -> str:
        """Return the version of the files that a shard, given by name, is in."""
        return _SEPARATOR.join(self.versions[piece.file] for piece in pieces_of(shard))


class RangeStore(BaseStore):
    """A read-only store whose keys may be names of shards, which are ranges of objects in `store`.

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
        infos = {file: self._store.head(file) for file in dict.fromkeys(piece.file for piece in pieces)}
        found = [infos[piece.file] for piece in pieces]
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
        expected = [None] * len(pieces) if version is None else version.split(_SEPARATOR)
        size = sum(piece.bytes for piece in pieces)
        start, stop = checked_range(self.where(key), ObjectInfo(key, size, ""), start, stop, None)
        parts: list[tuple[Piece, str | None, int, int]] = []
        before = 0
        for piece, its_version in zip(pieces, expected, strict=True):
            low, high = (piece.start + min(max(edge - before, 0), piece.bytes) for edge in (start, stop))
            before += piece.bytes
            parts.append((piece, its_version, low, high))
        bodies: list[tuple[Body | Callable[[], Body], int]] = []
        seen: dict[str, ObjectInfo] = {}
        try:
            for piece, its_version, low, high in parts:
                if low >= high:
                    continue
                one = its_version or (seen[piece.file].version if piece.file in seen else None)
                if bodies and one is not None:  # opened when it is read, because idle connections time out
                    bodies.append((partial(self._store.open, piece.file, low, high, version=one), high - low))
                    continue
                body = self._store.open(piece.file, low, high, version=its_version)
                bodies.append((body, high - low))
                seen[piece.file] = body.info
            for piece, _, _, _ in parts:  # no byte of some files is read, but the version names theirs, too
                if piece.file not in seen:
                    if bodies and version is not None:
                        continue  # `version` states the size, too: it was listed with it
                    seen[piece.file] = self._store.head(piece.file)
                _check_size(self.where(key), piece, seen[piece.file])
        except BaseException:
            _Range(bodies, ObjectInfo(key, 0, "")).close()
            raise
        found = [its_version or seen[piece.file].version for piece, its_version, _, _ in parts]
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
    """The body of a shard: the concatenated bodies of its pieces."""

    def __init__(self, bodies: Sequence[tuple[Body | Callable[[], Body], int]], info: ObjectInfo) -> None:
        """Concatenate `bodies`, open or functions that open them, each with the number of bytes to read."""
        self.info, self._bodies = info, [*bodies]

    @property
    def left(self) -> int:
        return sum(left for _, left in self._bodies)

    def readinto(self, buffer: memoryview, /) -> int:
        while self._bodies:
            body, left = self._bodies[0]
            if callable(body):
                body = body()
                self._bodies[0] = body, left
            if left:
                count = body.readinto(buffer[:left])
                if not count:  # an error, because the next piece's bytes would take the place of these
                    raise TransientError(self.info.key, f"ended early: {left:,} bytes of a piece are missing")
                self._bodies[0] = body, left - count
                return count
            self._bodies.pop(0)
            body.close()
        return 0

    def close(self) -> None:
        while self._bodies:
            body, _ = self._bodies.pop()
            if not callable(body):
                body.close()


AnyStore = RangeStore | ResilientStore


def connect_ranges(folder: str, storage: StorageOptions | None, *, is_cached: bool = False) -> AnyStore:
    """Return a store of byte ranges of the files in a folder or at a URL; remote requests are retried.

    `is_cached`: the caller reads local files through a cache, too, which needs the store that retries.
    """
    options = storage or StorageOptions()
    if not is_remote(folder):
        ranges = RangeStore(open_store(folder or ".", options))
        return ResilientStore(ranges, RetryPolicy.of(options)) if is_cached else ranges
    ranges = RangeStore(open_store(connect(folder, options).pinned().url, options))  # pins branches
    policy = RetryPolicy.of(options)
    return ResilientStore(ranges, policy, connections=options.connections, shares_limit=True)


def has_that_name(path: str, store: AnyStore, name: str) -> bool:
    """Return whether a file exists whose name is literally `name`, although that looks like a pattern."""
    if not is_remote(path):
        return local_path(path).exists()
    try:
        store.head(name)
    except ObjectNotFoundError:
        return False
    return True


def split_place(path: str, is_file_name: Callable[[str], bool]) -> tuple[str, str]:
    """Split a path or URL into (folder, file name or pattern); the name is "" if it may be a folder's.

    `is_file_name` tells whether a URL ends with the name of such a file.
    """
    if is_pattern(path) and not (not is_remote(path) and local_path(path).exists()):
        folder = fixed_folder(path)
        return folder, path[len(folder) :].lstrip("/") if folder else path
    if is_remote(path):
        return split_url(path) if is_file_name(path) else (path.rstrip("/"), "")
    place = local_path(path)
    return (str(place), "") if place.is_dir() else (str(place.parent), place.name)


def list_matching(store: AnyStore, pattern: str) -> list[ObjectInfo]:
    """List the objects that may match a pattern, sorted; "" lists those directly in the folder."""
    if is_remote(store.url):
        prefix = fixed_folder(pattern) if pattern else ""
        return list(store.list(f"{prefix}/" if prefix else ""))
    names = sorted(file.relative_to(store.url).as_posix() for file in _files(Path(store.url), pattern or "*"))
    names = [name for name in names if matches(name, pattern or "*")]
    return [store.head(name) for name in names]


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    try:
        yield from (file for file in folder.glob(pattern) if file.is_file())
    except OSError as error:
        raise ShardError(folder, f"cannot be listed: {error.strerror or error}") from error


def _pieces(key: str) -> list[Piece] | None:
    try:
        return pieces_of(key)
    except ValueError:
        return None


def _joined(key: str, pieces: Sequence[Piece], versions: Sequence[str]) -> ObjectInfo:
    return ObjectInfo(key, sum(piece.bytes for piece in pieces), _SEPARATOR.join(versions))


def _check_size(where: str, piece: Piece, info: ObjectInfo) -> None:
    if info.bytes < piece.stop:
        raise StoreError(where, f"{piece.file} has {info.bytes:,} bytes and ends before this range does")
