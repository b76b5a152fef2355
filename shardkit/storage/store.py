"""The interface and guarantees of every store, its errors and its options. All stores must pass
tests/storage/test_storage_conformance.py.

A store maps keys (relative paths with "/", checked by `checked_key`) to objects. An object is replaced whole
and atomically: a reader sees the old bytes or the new ones, never a mixture, and each content has its own
`version`. A write is durable when `put` returns. Stores can be shared by threads, pickled, and used after a
fork. A store sends each request only once: `shardkit.storage.resilient` wraps any store and retries.

Error classes tell callers what to do: `TransientError` and its subclass `ThrottledError` can be retried, the
other errors persist until something is changed.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol, Self, cast, get_args

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError, ShardkitError, clean_message, without_password
from shardkit.files import Closing
from shardkit.hashing import new_hash
from shardkit.hints import refuse_unknown
from shardkit.manifest import MAX_BASENAME_CHARS
from shardkit.synonyms import STORAGE

__all__ = [
    "METADATA_NAME",
    "BaseBody",
    "BaseStore",
    "Body",
    "Checksums",
    "CommitStore",
    "CopyingStore",
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
    "copier_of",
    "hash_object",
    "open_source",
    "read_body",
    "read_object",
    "without_password",
]

Checksums = Literal["when_supported", "when_required"]
Encryption = Literal["AES256", "aws:kms", "aws:kms:dsse"]
METADATA_NAME = "shardkit-xxh3-128"  # key in an object's metadata; the value is the hash of its bytes
_READ_BYTES = 1 << 20
_THREADS = 8  # maximum number of files that `put_folder` writes in parallel
_MOST_CHARACTERS = 2000  # maximum length of `where` and of `problem` in a StoreError


class StoreError(ShardkitError):
    """A request to a store failed. `where` names the object, `problem` the reason, `status` the HTTP status.

    `where` and `problem` are cleaned by `clean_message` and cut to 2,000 characters, because servers supply
    parts of them.
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
    """A write that may only create the object (`if_absent`) found that it exists already."""


class ObjectChangedError(StoreError):
    """The object no longer has the requested version, because it was replaced."""


class TransientError(StoreError):
    """A timeout, a broken connection or an HTTP status 5xx: a retry may succeed."""


class ThrottledError(TransientError):
    """The store rejected a request because it gets too many (HTTP 503, 429): retry later, and send fewer."""

    retry_after_seconds: float | None = None
    """Seconds to wait before the retry; None if the store sent no number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageOptions:
    """How to reach a store. Values that are None come from the AWS environment and configuration files.

    Plain data: can be pickled and compared.
    """

    if not TYPE_CHECKING:

        def __new__(cls, **named: object) -> StorageOptions:
            """Raise TypeError for an unknown keyword, with the suggestion that a generated __init__ lacks."""
            refuse_unknown("StorageOptions()", named, cls.__slots__, STORAGE)
            return object.__new__(cls)

    endpoint_url: str | None = None
    """URL of an S3-compatible server; default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, S3_ENDPOINT_URL
    (MosaicML's name), then AWS itself."""
    region: str | None = None
    """Region of the bucket; default: the region of the AWS configuration."""
    profile: str | None = None
    """Profile of the AWS configuration files; default: AWS_PROFILE."""
    path_style: bool | None = None
    """Put the bucket name in the URL's path, not its host name; default: only if an endpoint is set."""
    checksums: Checksums | None = None
    """When to use S3's flexible checksums; default: as the AWS configuration says, or when_required if an
    endpoint is set."""
    connect_timeout_seconds: float = 5.0
    """Longest time to establish a connection, in seconds."""
    read_timeout_seconds: float = 10.0
    """Longest time without any data on a connection, in seconds."""
    retry_seconds: float = 600.0
    """Time for which a failing operation is retried, in seconds; shorter outages only cause a delay."""
    first_contact_seconds: float = 60.0
    """Time for which a failing operation is retried if the store has never answered, in seconds; it is
    short, because the address may be wrong. Loaders use their batch timeout instead, and commands that only
    read use 5 seconds."""
    connections: int = 32
    """Maximum number of connections per process to a store."""
    anonymous: bool = False
    """Make unsigned requests, without any credentials: for public buckets."""
    requester_pays: bool = False
    """Agree to pay for requests, as buckets with the setting "requester pays" demand."""
    encryption: Encryption | None = None
    """Server-side encryption to request for each write; default: the bucket's own setting."""
    kms_key_id: str | None = None
    """ID of the key for aws:kms encryption; default: the bucket's key."""
    follow_urls: bool = False
    """Allow a list of tars to name files outside its own folder or bucket. The requests for those files are
    signed with these credentials."""

    def __post_init__(self) -> None:
        if self.endpoint_url is not None:  # S3 does not use passwords in URLs; one here could only leak
            object.__setattr__(self, "endpoint_url", without_password(self.endpoint_url))
        if self.checksums not in (None, *get_args(Checksums)):
            raise ValueError(f"checksums must be {' or '.join(get_args(Checksums))}, not {self.checksums!r}")
        if self.encryption not in (None, *get_args(Encryption)):
            raise ValueError(
                f"encryption must be one of {', '.join(get_args(Encryption))}, not {self.encryption!r}"
            )
        if self.kms_key_id is not None and not (self.encryption or "").startswith("aws:kms"):
            raise ValueError('kms_key_id requires encryption="aws:kms": set encryption, too')
        if self.anonymous and self.profile is not None:
            raise ValueError("anonymous requests have no profile: give either anonymous or profile")
        waits = (self.retry_seconds, self.first_contact_seconds)
        timeouts = (self.connect_timeout_seconds, self.read_timeout_seconds, *waits)
        if not (min(timeouts) > 0 and self.connections > 0):
            raise ValueError("timeouts, retry times and connections must be greater than 0")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object: key, size in bytes, version (S3: the ETag), and its metadata, if known."""

    key: str
    bytes: int
    version: str
    metadata: Mapping[str, str] = field(default_factory=dict)


class Body(Protocol):
    """An open read of an object or of a byte range; a context manager."""

    @property
    def info(self) -> ObjectInfo:
        """Facts about the whole object, even if only a range is read."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the start of `buffer` (at least 1 byte long) with the next bytes and return their number.

        Returns as soon as some bytes are available; for bodies over 1 MiB, a store may wait until 128 KiB
        are available. Returns 0 only at the end of the range. Raises TransientError if, before the end, the
        connection breaks or no data arrives within the store's read timeout.
        """

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """The interface of a store: objects by key. Methods raise `StoreError` or a subclass."""

    @property
    def url(self) -> str:
        """The root of all keys, such as "s3://bucket/prefix" or "/folder", without a trailing "/"."""

    def head(self, key: str) -> ObjectInfo:
        """Return size, version and metadata. Raises ObjectNotFoundError if there is no such object."""

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        """Return the bytes from `start` to `stop` (exclusive; None: the end), or fewer if the object ends."""

    def open(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> Body:
        """Open the object's bytes from `start` to `stop` (exclusive, as for `get`) as a stream.

        Raises ObjectNotFoundError; ObjectChangedError if the object does not have `version`; StoreError if
        `start` is not inside the object (0 is allowed for an empty one).
        """

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        """Write an object from memory or from a file, atomically; large files are sent in parts.

        With `if_absent`, raise ObjectExistsError if the object exists: the store decides in one atomic step.
        The object may be our own, if the acknowledgement of an earlier attempt was lost; `S3Store` and
        `ResilientStore` detect that and succeed. `head` returns `metadata` (ASCII values, lower-case names)
        if the store can keep it.
        """

    def put_folder(
        self, prefix: str, folder: Path, last: str, data: bytes, hashes: Mapping[str, str] | None = None
    ) -> None:
        """Write all files of a local folder to `prefix/…`, and then `data` to `prefix/last` with `if_absent`.

        `hashes` are the xxh3-128 of files by their names in the folder, which become metadata (METADATA_NAME)
        of their objects if the store keeps metadata. So a reader that finds `prefix/last` finds all files.
        Raises ObjectExistsError if `prefix/last` exists. A store on the same disk may move the local folder
        instead of copying it.
        """

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose key starts with `prefix`, in code-point order of keys, without metadata."""

    def delete(self, key: str) -> None:
        """Delete an object if it exists."""

    def close(self) -> None:
        """Close connections; the store opens new ones if it is used again."""


class CommitStore(Store, Protocol):
    """A store that writes in commits. A `put` is a commit of one file and costs as much as one of many."""

    has_commits: bool

    def commit(
        self, files: Mapping[str, bytes | Path], deleted: Collection[str] = ()
    ) -> Mapping[str, ObjectInfo]:
        """Write `files` and delete the keys `deleted` in one atomic step; return {key: object} of `files`."""


class CopyingStore(Store, Protocol):
    """A store that copies objects of another store itself, so that their bytes do not pass this machine."""

    def copies(self, source: Store, size: int) -> bool:
        """Return whether `copy` can copy an object of `source` with `size` bytes."""

    def copy(self, key: str, source: Store, info: ObjectInfo) -> ObjectInfo:
        """Write the object `info` of `source`, with its metadata, to `key`, atomically.

        Raises ObjectChangedError if the object has another version, ObjectNotFoundError if it is gone.
        """


def copier_of(store: Store) -> CopyingStore | None:
    """Return `store` if it can copy objects of other stores, else None."""
    return cast(CopyingStore, store) if hasattr(store, "copy") else None


def commits_of(store: Store) -> CommitStore | None:
    """Return `store` if it writes in commits, else None."""
    return cast(CommitStore, store) if getattr(store, "has_commits", False) else None


class BaseBody(Closing):
    """Base class of bodies; implements `read`, which returns all remaining bytes, by calls of `readinto`."""

    info: ObjectInfo

    @property
    def left(self) -> int:
        """The number of bytes of the range that have not been read."""
        raise NotImplementedError

    def readinto(self, buffer: memoryview, /) -> int:
        raise NotImplementedError

    def read(self) -> bytes:
        """Return all remaining bytes of the range."""
        data = bytearray(self.left)
        view, filled = memoryview(data), 0
        while filled < len(data):
            filled += self.readinto(view[filled:])
        return bytes(data)

    def close(self) -> None:
        """Do nothing; bodies that hold a connection override this."""


class BaseStore:
    """Base class of stores: implements `get` by `open`, and `put_folder` by one `put` per file."""

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

    def put_folder(
        self, prefix: str, folder: Path, last: str, data: bytes, hashes: Mapping[str, str] | None = None
    ) -> None:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]

        def put(file: Path) -> None:
            name = file.relative_to(folder).as_posix()
            metadata = {METADATA_NAME: hashes[name]} if hashes and name in hashes else None
            self.put(f"{prefix}/{name}", file, metadata=metadata)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(put, files))
        self.put(f"{prefix}/{last}", data, if_absent=True)

    def close(self) -> None:
        """Do nothing; stores that hold connections override this."""

    def where(self, key: str) -> str:
        """Return the name of an object for error messages."""
        return f"{self.url}/{key}"


def checked_key(store_url: str, key: str) -> str:
    """Return `key` if it is a relative path that stays below the store's URL, else raise StoreError.

    Keys are not file names: colons and control characters are allowed. An untrusted name must also pass
    `shardkit.manifest.checked_basename` before it is used as a file name.
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
    """Return the range (start, stop), limited to the object's size. Raises errors as `Store.open` does."""
    if version not in (None, info.version):
        raise ObjectChangedError(where, f"has version {info.version}, not {version}")
    size = info.bytes
    end = size if stop is None else min(stop, size)
    if start < 0 or (start >= size and start > 0) or end < start:
        raise StoreError(where, f"bytes {start:,} to {stop} are not a range of {size:,} bytes", status=416)
    return start, end


def open_source(where: str, data: bytes | Path) -> BinaryIO:
    """Open data that is to be written to `where`. Raises StoreError if it cannot be read."""
    try:
        return data.open("rb") if isinstance(data, Path) else io.BytesIO(data)
    except OSError as error:
        raise StoreError(where, f"{data!s} cannot be read: {error.strerror or error}") from error


def hash_object(store: Store, key: str, names: Iterable[str]) -> dict[str, str]:
    """Read an object once and return {hash name: hex digest} for the hashes in `names`.

    Raises ValueError for an unknown hash name.
    """
    hashers = {name: new_hash(name) for name in names}
    buffer = memoryview(bytearray(_READ_BYTES))
    with store.open(key) as body:
        while count := body.readinto(buffer):
            for hasher in hashers.values():
                hasher.update(buffer[:count])
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}


def read_object(store: Store, key: str, expected_bytes: int = -1) -> npt.NDArray[np.uint8]:
    """Return an object's bytes as uint8[n]. Raises ShardError if n is not `expected_bytes` (-1: any n)."""
    with store.open(key) as body:
        size = body.info.bytes
        if expected_bytes not in (-1, size):
            raise ShardError(f"{store.url}/{key}", f"has {size:,} bytes, expected {expected_bytes:,}")
        return read_body(body, f"{store.url}/{key}")


def read_body(body: Body, where: str) -> npt.NDArray[np.uint8]:
    """Return all bytes of a newly opened object as uint8[size]; `where` names it in error messages."""
    data = np.empty(body.info.bytes, dtype=np.uint8)
    view, filled = data.data, 0
    while filled < len(data) and (count := body.readinto(view[filled : filled + _READ_BYTES])):
        filled += count
    if filled < len(data):
        raise ShardError(where, f"ended after {filled:,} of {len(data):,} bytes")
    return data
