"""The contract of every store, its errors and its options; tests/storage/test_storage_conformance.py checks
it.

A store maps keys (relative paths with "/", checked by `checked_key`) to objects. An object is replaced whole
and atomically: a reader sees the old bytes or the new ones, never a mixture, and each content has its own
`version`. A write is durable when `put` returns. Stores can be shared by threads, pickled, and used after a
fork. They make each request once: `shardkit.storage.resilient` retries, around any of them.

Errors come in kinds that a caller can act on: `TransientError` and its `ThrottledError` can be retried, the
others do not go away by themselves.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Protocol, Self, cast, get_args

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError, ShardkitError, clean_message, without_password
from shardkit.files import Closing
from shardkit.hashing import new_hash
from shardkit.manifest import MAX_BASENAME_CHARS

__all__ = [
    "METADATA_NAME",
    "BaseBody",
    "BaseStore",
    "Body",
    "Checksums",
    "CommitStore",
    "Encryption",
    "ObjectChangedError",
    "ObjectExistsError",
    "ObjectInfo",
    "ObjectNotFoundError",
    "StorageOptions",
    "Store",
    "StoreError",
    "ThrottledError",
    "TransientError",
    "checked_key",
    "checked_range",
    "commits_of",
    "hash_object",
    "open_source",
    "read_body",
    "read_object",
    "without_password",
]

Checksums = Literal["when_supported", "when_required"]
Encryption = Literal["AES256", "aws:kms", "aws:kms:dsse"]
METADATA_NAME = "shardkit-xxh3-128"  # of every object that is published: the hash of its bytes
_READ_BYTES = 1 << 20
_THREADS = 8  # of `put_folder`
_MOST_CHARACTERS = 2000  # of a server's words in an error


class StoreError(ShardkitError):
    """A request to a store failed: on which object, why, and with which HTTP status if there was one.

    Both texts are clean (`clean_message`), also in logs, and bounded: servers write parts of them.
    """

    def __init__(self, where: str, problem: str, *, status: int | None = None) -> None:
        where, problem = (clean_message(text)[:_MOST_CHARACTERS] for text in (where, problem))
        self.where, self.problem, self.status = where, problem, status
        super().__init__(f"{where}: {problem}" + ("" if status is None else f" (status {status})"))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.where, self.problem, self.status))


def _rebuild(kind: type[StoreError], where: str, problem: str, status: int | None) -> StoreError:
    return kind(where, problem, status=status)


class ObjectNotFoundError(StoreError):
    """The object (or the bucket) does not exist."""


class ObjectExistsError(StoreError):
    """The object was to be created, and exists already."""


class ObjectChangedError(StoreError):
    """The object no longer has the version that was asked for."""


class TransientError(StoreError):
    """A timeout, a broken connection, a 5xx: retrying may help."""


class ThrottledError(TransientError):
    """The store asks for fewer requests (503 SlowDown, 429): retry later, with fewer at a time."""

    retry_after_seconds: float | None = None
    """When to come back, if the store says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageOptions:
    """How to reach a store. What is None comes from the AWS environment and configuration files.

    Plain data: can be pickled and compared.
    """

    endpoint_url: str | None = None
    """URL of an S3-compatible server; default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, S3_ENDPOINT_URL
    (MosaicML's name), then AWS itself."""
    region: str | None = None
    """Region of the bucket; default: as the AWS configuration says."""
    profile: str | None = None
    """Profile of the AWS configuration files; default: AWS_PROFILE."""
    path_style: bool | None = None
    """Put the bucket in the path, not in the host name; default: if an endpoint is set."""
    checksums: Checksums | None = None
    """S3's flexible checksums; default: as the AWS configuration says, or when_required if an endpoint is
    set."""
    connect_timeout_seconds: float = 5.0
    """Longest wait for a connection."""
    read_timeout_seconds: float = 10.0
    """Longest silence on a connection."""
    retry_seconds: float = 600.0
    """How long to retry a failing operation: shorter outages cost only time."""
    first_contact_seconds: float = 60.0
    """How long to retry until the store has answered once, since its address may be wrong. Loaders wait for
    as long as for a batch, commands that only read 5 seconds."""
    connections: int = 32
    """Maximum number of connections of a process to a store."""
    anonymous: bool = False
    """Make unsigned requests, without any credentials: for public buckets."""
    requester_pays: bool = False
    """Agree to pay for requests to buckets whose requesters pay."""
    encryption: Encryption | None = None
    """Server-side encryption to ask for with each write; default: the bucket's own."""
    kms_key_id: str | None = None
    """Key of the encryption aws:kms; default: the bucket's."""
    follow_urls: bool = False
    """Let a list of tars name other places than its own folder or bucket: requests go there, signed with
    these credentials."""

    def __post_init__(self) -> None:
        if self.endpoint_url is not None:  # S3 signs requests by keys: a password here would only be shown
            object.__setattr__(self, "endpoint_url", without_password(self.endpoint_url))
        if self.checksums not in (None, *get_args(Checksums)):
            raise ValueError(f"checksums must be one of {', '.join(get_args(Checksums))}: {self.checksums!r}")
        if self.encryption not in (None, *get_args(Encryption)):
            raise ValueError(
                f"encryption must be one of {', '.join(get_args(Encryption))}: {self.encryption!r}"
            )
        if self.kms_key_id is not None and not (self.encryption or "").startswith("aws:kms"):
            raise ValueError('kms_key_id is the key of encryption="aws:kms": give both')
        if self.anonymous and self.profile is not None:
            raise ValueError("anonymous requests have no profile: leave one of the two out")
        waits = (self.retry_seconds, self.first_contact_seconds)
        timeouts = (self.connect_timeout_seconds, self.read_timeout_seconds, *waits)
        if not (min(timeouts) > 0 and self.connections > 0):
            raise ValueError("timeouts, times to retry and connections must be above 0")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object: key, size, version (S3: the ETag), and the metadata it was put with, if known."""

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
        """Fill the start of `buffer` (at least 1 byte long) with the next bytes and return their number.

        Returns as soon as some bytes are available (in bodies over 1 MiB, a store may wait for up to
        128 KiB); 0 only at the end of the range. Raises TransientError if the connection breaks, or nothing
        arrives within the store's read timeout, before the end.
        """

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """Objects by key. All methods raise subclasses of `StoreError`."""

    @property
    def url(self) -> str:
        """The root of all keys, such as "s3://bucket/prefix" or "/folder", without a trailing "/"."""

    def head(self, key: str) -> ObjectInfo:
        """Return size, version and metadata; ObjectNotFoundError if there is no such object."""

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        """Return the bytes from `start` to `stop` (None or beyond the end: the end)."""

    def open(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> Body:
        """Open the same range as a stream.

        ObjectNotFoundError; ObjectChangedError if the object does not have `version`; StoreError if `start`
        is not inside the object (0 is inside an empty one).
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

        With `if_absent`, raise ObjectExistsError if the object exists: the store decides in one atomic step,
        also if the acknowledgement of our own write was lost. `metadata` (ASCII; lower-case names) comes back
        from `head` if the store can keep it.
        """

    def put_folder(self, prefix: str, folder: Path, last: str, data: bytes) -> None:
        """Write all files of a local folder to `prefix/…`, and then `data` to `prefix/last` with `if_absent`.

        So who finds `prefix/last` finds all of them. ObjectExistsError if it exists. A store on the same disk
        may take the folder away.
        """

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose key starts with `prefix`, sorted by key (code points), without metadata."""

    def delete(self, key: str) -> None:
        """Remove an object, if it exists."""

    def close(self) -> None:
        """Close connections; a store that is used again opens new ones."""


class CommitStore(Store, Protocol):
    """A store whose unit is the commit: a `put` is one, and costs as much as many files together."""

    has_commits: bool

    def commit(
        self, files: Mapping[str, bytes | Path], deleted: Collection[str] = ()
    ) -> Mapping[str, ObjectInfo]:
        """Write and delete files in one atomic step; return what was written, as the store then has it."""


def commits_of(store: Store) -> CommitStore | None:
    """Return `store` if its unit is the commit."""
    return cast(CommitStore, store) if getattr(store, "has_commits", False) else None


class BaseBody(Closing):
    """What bodies share: reading the rest in one piece."""

    info: ObjectInfo

    @property
    def left(self) -> int:
        """Number of bytes of the range that are still to come."""
        raise NotImplementedError

    def readinto(self, buffer: memoryview, /) -> int:
        raise NotImplementedError

    def read(self) -> bytes:
        """Return the rest."""
        data = bytearray(self.left)
        view, filled = memoryview(data), 0
        while filled < len(data):
            filled += self.readinto(view[filled:])
        return bytes(data)

    def close(self) -> None:
        """Nothing is held, unless a body says otherwise."""


class BaseStore:
    """What stores share: a `get` is an `open` that is read, a `put_folder` a `put` of each file."""

    @property
    def url(self) -> str:
        raise NotImplementedError

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> BaseBody:
        raise NotImplementedError

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        with self.open(key, start, stop, version=version) as body:
            return body.read()

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        raise NotImplementedError

    def put_folder(self, prefix: str, folder: Path, last: str, data: bytes) -> None:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        keys = [f"{prefix}/{path.relative_to(folder).as_posix()}" for path in files]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self.put, keys, files))
        self.put(f"{prefix}/{last}", data, if_absent=True)

    def close(self) -> None:
        """Nothing is held, unless a store says otherwise."""

    def where(self, key: str) -> str:
        """Return what errors call an object."""
        return f"{self.url}/{key}"


def checked_key(store_url: str, key: str) -> str:
    """Return `key` if a store can have it: a relative path that stays below the store's URL; else StoreError.

    Keys are no names of files: colons and control characters are allowed. What is written to a disk under a
    name that comes from outside has to pass `shardkit.manifest.checked_basename`, too.
    """
    parts = key.split("/")
    if not key or len(key) > MAX_BASENAME_CHARS:
        problem = f"must have 1 to {MAX_BASENAME_CHARS:,} characters"
    elif key.startswith("/") or "\\" in key or "\0" in key or ".." in parts or "." in parts:
        problem = "leaves the dataset's folder"
    elif any(0xD800 <= ord(character) <= 0xDFFF for character in key):
        problem = "is not Unicode text"
    else:
        return key
    raise StoreError(store_url, f"bad key {key!r:.200}: {problem}")


def checked_range(
    where: str, info: ObjectInfo, start: int, stop: int | None, version: str | None
) -> tuple[int, int]:
    """Return (start, stop) within an object, which must have `version`, as `Store.open` defines it."""
    if version not in (None, info.version):
        raise ObjectChangedError(where, f"has version {info.version}, not {version}")
    size = info.bytes
    end = size if stop is None else min(stop, size)
    if start < 0 or (start >= size and start > 0) or end < start:
        raise StoreError(where, f"bytes {start:,} to {stop} are not a range of {size:,} bytes", status=416)
    return start, end


def open_source(where: str, data: bytes | Path) -> BinaryIO:
    """Open what is to be put at `where`; StoreError if it cannot be read."""
    try:
        return data.open("rb") if isinstance(data, Path) else io.BytesIO(data)
    except OSError as error:
        raise StoreError(where, f"{data!s} cannot be read: {error.strerror or error}") from error


def hash_object(store: Store, key: str, names: Iterable[str]) -> dict[str, str]:
    """Return {name: hex digest} of an object, streamed once; ValueError for an unknown name."""
    hashers = {name: new_hash(name) for name in names}
    buffer = memoryview(bytearray(_READ_BYTES))
    with store.open(key) as body:
        while count := body.readinto(buffer):
            for hasher in hashers.values():
                hasher.update(buffer[:count])
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}


def read_object(store: Store, key: str, expected_bytes: int = -1) -> npt.NDArray[np.uint8]:
    """Return an object as uint8[size]; ShardError if its size is not the expected one (-1: any)."""
    with store.open(key) as body:
        size = body.info.bytes
        if expected_bytes not in (-1, size):
            raise ShardError(f"{store.url}/{key}", f"{size:,} bytes, expected {expected_bytes:,}")
        return read_body(body, f"{store.url}/{key}")


def read_body(body: Body, where: str) -> npt.NDArray[np.uint8]:
    """Return the object that was opened at `where`, of which nothing was read yet, as uint8[size]."""
    data = np.empty(body.info.bytes, dtype=np.uint8)
    view, filled = data.data, 0
    while filled < len(data) and (count := body.readinto(view[filled : filled + _READ_BYTES])):
        filled += count
    if filled < len(data):
        raise ShardError(where, f"ended after {filled:,} of {len(data):,} bytes")
    return data
