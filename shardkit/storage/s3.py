"""An S3 bucket, or a prefix in one, as a store; works with any server that speaks S3's protocol.

An object's version is its ETag. A ranged read sends the version it wants (If-Match), and an answer that is
not exactly the requested range is refused. With `if_absent`, the server decides (If-None-Match); each such
write has a nonce in its metadata ("shardkit-nonce"). If the server says that the object exists, its nonce
shows whether this writer wrote it. So a write whose acknowledgement was lost can be repeated, by the same
store or with the same nonce in `metadata`, and succeeds. Requests are made once: `ResilientStore` retries.

A request takes about 2 milliseconds of CPU time (botocore), and the bytes are copied once.
"""

from __future__ import annotations

import contextlib
import re
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from shardkit.storage.memory import MemoryBody
from shardkit.storage.s3_client import S3Client, version_of
from shardkit.storage.s3_errors import error_in_body, request_errors, translated
from shardkit.storage.s3_upload import Buffers, Content, Target, upload
from shardkit.storage.store import (
    BaseBody,
    BaseStore,
    ObjectChangedError,
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    StorageOptions,
    Store,
    StoreError,
    TransientError,
    checked_key,
    checked_range,
)

NONCE = "shardkit-nonce"
_URL = re.compile(r"s3://([A-Za-z0-9][A-Za-z0-9._-]{1,254})(?:/(.*))?", re.IGNORECASE | re.DOTALL)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_MAX_COPY_BYTES = 5 << 30  # S3's limit on an object that one request copies
_NOT_IMPLEMENTED = 501  # the only status 5xx that stays
_MAX_UNANSWERED = 1024  # maximum number of nonces of unacknowledged writes; at the limit, all are dropped
_MAX_METADATA_BYTES = 2048  # S3's limit on the names and values of an object's metadata
_FILLED_BYTES = 1 << 16  # size of the full pieces in which bodies with a checksum are read
_LOW_WATER_BYTES = 1 << 17  # a direct read waits until the kernel has received this many bytes
_MAX_EMPTY_PAGES = 1000  # limit of consecutive empty pages; S3 sends some where objects were deleted
_PAGE_BYTES = 1 << 16  # an error or web page in place of an object is at most this large
_ERROR_BYTES = 1 << 12  # an error with the content type of the object is at most this large
_ERROR_START = re.compile(rb"\s*(?:<(?:[?E]|\Z)|\Z)")
_HTML = re.compile(rb"\s*(?:<!doctype html|<html)", re.IGNORECASE)
_TAIL_BYTES = 1 << 20  # size of a long body's end, which urllib3 reads; buffers above the socket are smaller


class S3Store(BaseStore):
    """A store of the objects below a prefix of a bucket: s3://bucket/prefix."""

    def __init__(self, url: str, options: StorageOptions | None = None) -> None:
        found = _URL.fullmatch(url)
        if url[5:].lower().startswith("arn:"):
            raise StoreError(url, "names a bucket by its ARN: use its name, or the access point's alias")
        if not found:
            raise StoreError(
                url, "is not an S3 URL: expected s3://bucket/prefix (bucket names have 3 to 63 characters)"
            )
        self._bucket = found[1]
        prefix = (found[2] or "").rstrip("/")
        self._prefix = f"{checked_key(url, prefix)}/" if prefix else ""
        self._options = options or StorageOptions()
        self._client = S3Client(self.url, self._options)
        self._buffers = Buffers()
        self._unanswered = _Unanswered()

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def head(self, key: str) -> ObjectInfo:
        answer = self._client.request("head_object", self.where(key), **self._names(key))
        return self._described(key, answer, self._length(key, answer))

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> S3Body | MemoryBody:
        if start < 0 or (stop is not None and stop <= start):
            return self._open_nothing(key, start, stop, version)
        where, is_ranged = self.where(key), start > 0 or stop is not None
        parameters = self._names(key)
        if is_ranged:
            parameters["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        if version is not None:
            parameters["IfMatch"] = f'"{version}"'
        try:
            answer = self._client.request("get_object", where, **parameters)
        except StoreError as error:
            if error.status == 416 and start == 0:  # the object is empty, so any range is refused
                return self._open_nothing(key, 0, 0, version)
            raise
        try:
            if (page := _page(answer, is_ranged=is_ranged)) is not None:
                if found := error_in_body(where, page, answer["ResponseMetadata"]["HTTPStatusCode"]):
                    raise found
                if _HTML.match(page) and (is_ranged or not version_of(answer)):
                    raise StoreError(
                        where,
                        "the server sends a web page in place of the object: check the endpoint, and whether "
                        "a proxy or a login page answers in its place",
                    )
                info, _ = self._checked_answer(key, answer, start, stop, version)
                return MemoryBody(info, memoryview(page))
            info, length = self._checked_answer(key, answer, start, stop, version)
        except request_errors() as error:
            answer["Body"].close()
            raise translated(where, error) from error
        except BaseException:
            answer["Body"].close()
            raise
        body = S3Body(where, info, answer["Body"], length)
        if not is_ranged and length <= _ERROR_BYTES:
            try:
                body.check_no_error()
            except BaseException:
                body.close()
                raise
        return body

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        where, names = self.where(key), self._names(key)
        metadata = _checked_metadata(where, metadata or {})
        content = Content(where, data, self._buffers)
        try:
            if not if_absent:
                target = Target(where, names, metadata, {})
                return ObjectInfo(key, content.bytes, upload(self._client, target, content), metadata)
            nonce = metadata.get(NONCE) or self._unanswered.take(key, content) or uuid.uuid4().hex
            target = Target(where, names, {**metadata, NONCE: nonce}, {"IfNoneMatch": "*"})
            try:
                try:
                    version = upload(self._client, target, content)
                except ObjectExistsError:
                    info = self._find_own(key, nonce, content.bytes)
                    if info is None:
                        raise
                    return info
            except TransientError:
                self._unanswered.add(key, content, nonce)
                raise
            return ObjectInfo(key, content.bytes, version, target.metadata)
        finally:
            content.close()

    def copies(self, source: Store, size: int) -> bool:
        """Return whether one request copies the object: it is on the same server, reached in the same way."""
        is_same = isinstance(source, S3Store) and source._options == self._options
        return is_same and size <= _MAX_COPY_BYTES

    def copy(self, key: str, source: Store, info: ObjectInfo) -> ObjectInfo:
        assert isinstance(source, S3Store)
        try:
            answer = self._client.request(
                "copy_object",
                self.where(key),
                "write",
                CopySource=source._names(info.key),
                CopySourceIfMatch=f'"{info.version}"',
                **self._names(key),
            )
        except TransientError as error:
            if error.status != _NOT_IMPLEMENTED:
                raise
            raise StoreError(error.where, "the server does not copy objects", status=error.status) from error
        version = version_of(answer.get("CopyObjectResult", {})) or self.head(key).version
        return ObjectInfo(key, info.bytes, version, info.metadata)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        where = f"{self.url}/{prefix}"
        parameters: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        before, tokens = "", set[str]()
        while True:
            answer = self._client.request("list_objects_v2", where, **parameters)
            for entry in answer.get("Contents", ()):
                name = entry["Key"]
                if (before and name <= before) or not name.startswith(self._prefix + prefix):
                    raise StoreError(where, f"the server lists {name!r} after {before!r}, not sorted by key")
                before = name
                if name != self._prefix:  # skip the empty object that some tools create for a folder
                    yield ObjectInfo(name[len(self._prefix) :], int(entry["Size"]), version_of(entry))
            if not answer.get("IsTruncated"):
                return
            token = answer.get("NextContinuationToken")
            if token is None:
                raise StoreError(where, "the server truncates the listing without a continuation token")
            if token in tokens or len(tokens) == _MAX_EMPTY_PAGES:
                raise StoreError(where, "the server's listing does not end: pages without a new key repeat")
            tokens = {token} if answer.get("Contents") else {*tokens, token}
            parameters["ContinuationToken"] = token

    def delete(self, key: str) -> None:
        try:
            self._client.request("delete_object", self.where(key), "write", **self._names(key))
        except ObjectNotFoundError as error:
            if "bucket" in error.problem:
                raise

    def close(self) -> None:
        self._client.close()
        self._buffers.close()

    def __getstate__(self) -> tuple[str, StorageOptions]:
        return self.url, self._options

    def __setstate__(self, state: tuple[str, StorageOptions]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def _open_nothing(self, key: str, start: int, stop: int | None, version: str | None) -> MemoryBody:
        info = self.head(key)
        checked_range(self.where(key), info, start, stop, version)
        return MemoryBody(info, memoryview(b""))

    def _checked_answer(
        self, key: str, answer: Mapping[str, Any], start: int, stop: int | None, version: str | None
    ) -> tuple[ObjectInfo, int]:
        """Check an answer's range and version; return (ObjectInfo, length of the answer's body in bytes)."""
        where, got = self.where(key), version_of(answer)
        if version not in (None, got):  # servers that do not support If-Match send any version
            raise ObjectChangedError(where, f"has version {got}, not {version}")
        length = size = self._length(key, answer)
        first = 0
        if "ContentRange" in answer:
            found = _CONTENT_RANGE.fullmatch(answer["ContentRange"])
            if not found:
                raise StoreError(
                    where, f"the server sends an invalid Content-Range: {answer['ContentRange']}"
                )
            first, last, size = int(found[1]), int(found[2]), int(found[3])
            length = last + 1 - first
        end = size if stop is None else min(stop, size)
        if (first, first + length) != (start, end) or length != int(answer["ContentLength"]):
            encoding = answer.get("ContentEncoding")
            encoded = f" that are encoded ({encoding:.40})" if encoding else ""
            raise StoreError(
                where,
                f"requested bytes {start:,} to {end:,}, but the server sends {first:,} to {first + length:,} "
                f"in {answer['ContentLength']:,} bytes{encoded}: the server or a proxy does not support "
                "ranges",
            )
        return self._described(key, answer, size), length

    def _described(self, key: str, answer: Mapping[str, Any], size: int) -> ObjectInfo:
        version = version_of(answer)
        if not version:
            raise StoreError(self.where(key), "the server sends no ETag, so versions cannot be compared")
        metadata = {name.lower(): value for name, value in answer.get("Metadata", {}).items()}
        return ObjectInfo(key, size, version, metadata)

    def _length(self, key: str, answer: Mapping[str, Any]) -> int:
        if "ContentLength" not in answer:
            raise StoreError(self.where(key), "the server sends no Content-Length")
        return int(answer["ContentLength"])

    def _find_own(self, key: str, nonce: str, size: int) -> ObjectInfo | None:
        """Return the object if its nonce and size are those of our own write, else None."""
        try:
            info = self.head(key)
        except ObjectNotFoundError:
            return None
        return info if info.metadata.get(NONCE) == nonce and info.bytes == size else None

    def _names(self, key: str) -> dict[str, Any]:
        name = self._prefix + checked_key(self.url, key)
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise StoreError(self.url, f"key {key!r:.200} is not Unicode, as S3 requires") from error
        return {"Bucket": self._bucket, "Key": name}


def _page(answer: Mapping[str, Any], *, is_ranged: bool) -> bytes | None:
    """Return the body of an answer that may be an error in place of an object; None if it cannot be one.

    Proxies may send errors with the object's content type, so a short answer without a Content-Range to a
    ranged request may be one, too. Whole objects are checked by `S3Body.check_no_error`.
    """
    size, kind = answer.get("ContentLength", _PAGE_BYTES + 1), answer.get("ContentType", "").lower()
    is_page = "xml" in kind or "html" in kind or not version_of(answer)
    is_no_range = is_ranged and "ContentRange" not in answer
    if not (is_page or is_no_range) or size > _PAGE_BYTES:
        return None
    page: bytes = answer["Body"].read()
    return page


class S3Body(BaseBody):
    """A body of exactly `bytes_left` bytes from botocore's `stream`.

    Reads return the bytes that have arrived (one `recv`), so a very slow server cannot block a read for
    longer than the read timeout. A body that ends early is a TransientError.

    Long bodies, except their last MiB, are received directly into the reader's buffer: http.client and
    urllib3 would create an object for each piece and copy it (0.08 CPU-seconds per gigabyte). The kernel is
    asked to wait for 128 KiB at a time (SO_RCVLOWAT), because otherwise it would wake the reader for every
    few packets, which takes three times the CPU time; if less arrives within the read timeout, the read times
    out. The last MiB is read through urllib3, which can then reuse the connection.

    If botocore checks a body against a stored checksum (whole objects, with checksums "when_supported"), it
    must be read in full pieces of 64 KiB. Another thread may call `close`, which ends a blocked read.
    """

    def __init__(self, where: str, info: ObjectInfo, stream: Any, bytes_left: int) -> None:
        self.info = info
        self._held = memoryview(b"")  # bytes that `check_no_error` has read ahead
        self._where = where
        self._stream = stream
        self._bytes = self._left = bytes_left
        self._closed = False
        self._is_checked = hasattr(stream, "checksum")
        self._next = self._reader()
        self._direct = None if self._is_checked or bytes_left < _TAIL_BYTES else _DirectReads.of(stream)
        if self._direct is not None:
            self._direct.wait_for(_LOW_WATER_BYTES)

    @property
    def left(self) -> int:
        return self._left + len(self._held)

    def readinto(self, buffer: memoryview, /) -> int:
        if not self._held:
            return self._receive(buffer)
        count = min(len(buffer), len(self._held))
        buffer[:count] = self._held[:count]
        self._held = self._held[count:]
        return count

    def check_no_error(self) -> None:
        """Read the first bytes, or the whole body if it begins like an S3 error, and raise that error."""
        page, done = memoryview(bytearray(self._left)), 0
        while done < len(page) and _ERROR_START.match(page[:done]):
            done += self._receive(page[done:])
        self._held = page[:done]
        if done == len(page) and (found := error_in_body(self._where, bytes(page), 200)) is not None:
            raise found

    def _receive(self, buffer: memoryview) -> int:
        if not self._left:
            return 0
        try:
            if self._direct is not None:
                count = self._direct.readinto(buffer)
            else:
                piece = self._next(min(len(buffer), self._left))
                count = len(piece)
                buffer[:count] = piece
            self._left -= count
            if self._direct is not None and self._left < _TAIL_BYTES:
                self._direct.wait_for(1)  # fewer than 128 KiB may come, and the connection is reused
                self._direct = None
            if not self._left and self._is_checked:
                self._stream.read(1)  # reading past the end makes botocore compare the checksum
        except request_errors() as error:
            raise self._broken(error) from error
        except (ValueError, AttributeError) as error:
            if not self._closed:
                raise
            raise self._broken(error) from error
        if self._closed or not count or self._left < 0:
            raise self._broken(None)
        return count

    def close(self) -> None:
        self._closed = True
        if self._left:
            shutdown = getattr(getattr(self._stream, "_raw_stream", None), "shutdown", None)
            if shutdown is not None:  # close alone would block while another thread is reading
                with contextlib.suppress(Exception):
                    shutdown()
        with contextlib.suppress(*request_errors()):
            self._stream.close()

    def _reader(self) -> Callable[[int], bytes]:
        read1 = getattr(getattr(self._stream, "_raw_stream", None), "read1", None)
        if self._is_checked or read1 is None:
            read: Callable[[int], bytes] = self._stream.read
            return lambda wanted: read(min(wanted, _FILLED_BYTES))
        direct: Callable[[int], bytes] = read1
        return direct

    def _broken(self, error: Exception | None) -> Exception:
        got = self._bytes - max(self._left, 0)
        place = f"after {got:,} of {self._bytes:,} bytes"
        if self._closed:
            return TransientError(self._where, f"the body was closed {place}")
        if error is None:
            return TransientError(self._where, f"the body ended {place}")
        found = translated(self._where, error)
        return type(found)(self._where, f"{found.problem}, {place}", status=found.status)


class _DirectReads:
    """Receives a body directly into the reader's buffer; updates the counts of http.client and urllib3."""

    def __init__(self, raw: Any, response: Any, connection: socket.socket) -> None:
        self._raw, self._response, self._socket = raw, response, connection

    @classmethod
    def of(cls, stream: Any) -> _DirectReads | None:
        """Return direct reads of botocore's `stream`, or None if the libraries' internals are unknown."""
        raw = getattr(stream, "_raw_stream", None)
        response = getattr(raw, "_fp", None)
        if not isinstance(response, HTTPResponse) or response.chunked:
            return None
        connection = getattr(getattr(response.fp, "raw", None), "_sock", None)
        counts = response.length, getattr(raw, "length_remaining", None)
        if not isinstance(connection, socket.socket) or not all(isinstance(count, int) for count in counts):
            return None
        return cls(raw, response, connection)

    def readinto(self, buffer: memoryview) -> int:
        """Receive bytes that have arrived, but never the last byte: urllib3 must read it to end the body."""
        count: int = self._response.fp.readinto1(buffer[: self._response.length - 1])
        self._response.length -= count
        self._raw.length_remaining -= count
        return count

    def wait_for(self, count: int) -> None:
        """Make the kernel wake reads of this connection only after `count` bytes (SO_RCVLOWAT)."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)


class _Unanswered:
    """Nonces of conditional writes that ended without an answer, for the next attempt at the same write."""

    def __init__(self) -> None:
        # Needs no lock: each use is one atomic operation on a dict, and stays valid after a fork.
        self._nonces: dict[str, tuple[str, str]] = {}

    def add(self, key: str, content: Content, nonce: str) -> None:
        if len(self._nonces) >= _MAX_UNANSWERED:
            self._nonces.clear()
        self._nonces[key] = (content.identity(), nonce)

    def take(self, key: str, content: Content) -> str | None:
        """Return and remove the nonce of an unanswered write of this content, or None."""
        identity, nonce = self._nonces.pop(key, (None, None))
        return nonce if identity is not None and identity == content.identity() else None


def _checked_metadata(where: str, metadata: Mapping[str, str]) -> dict[str, str]:
    for name, value in metadata.items():
        if (
            not re.fullmatch(r"[a-z0-9_.-]+", name)
            or not re.fullmatch(r"[ -~]*", value)
            or value != value.strip()
        ):
            raise StoreError(
                where,
                f"metadata {name!r}: {value!r:.80} cannot be an HTTP header: use ASCII without outer spaces, "
                "and a lower-case name",
            )
    if sum(len(name) + len(value) for name, value in metadata.items()) > _MAX_METADATA_BYTES:
        raise StoreError(where, f"metadata exceeds {_MAX_METADATA_BYTES:,} bytes, the limit of S3")
    return dict(metadata)
