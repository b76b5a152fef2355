"""An S3 bucket, or what lies under a prefix of one, as a store; any server that speaks S3's protocol.

An object's version is its ETag. A ranged read states the version it wants (If-Match), and an answer that is
not exactly the range that was asked for is refused. With `if_absent`, If-None-Match lets the server decide;
each such write carries a nonce in its metadata ("shardkit-nonce"), and when the server says that the object
is there already, the nonce tells whether it is ours: a write whose acknowledgement was lost, and that is
tried again by the same store, or with the same nonce in `metadata`, is a success. Requests are made once:
retrying is `ResilientStore`'s work.

Costs about 2 milliseconds of CPU per request (botocore), and one copy of the bytes.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardkit.storage.errors import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    TransientError,
)
from shardkit.storage.options import StorageOptions
from shardkit.storage.s3_body import EmptyBody, S3Body
from shardkit.storage.s3_client import S3Client
from shardkit.storage.s3_upload import Buffers, Content, Target, upload, version_of
from shardkit.storage.store import ObjectInfo, checked_key, checked_range

__all__ = ["NONCE", "S3Store"]

NONCE = "shardkit-nonce"
_URL = re.compile(r"s3://([A-Za-z0-9][A-Za-z0-9._-]{1,254})(?:/(.*))?", re.IGNORECASE | re.DOTALL)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_MAX_UNANSWERED = 1024  # writes that may have happened and may be tried again; above, all are forgotten
_MAX_METADATA_BYTES = 2048  # S3's limit


class S3Store:
    """Objects of the bucket, and below the prefix, that `url` names: s3://bucket/prefix."""

    def __init__(self, url: str, options: StorageOptions | None = None) -> None:
        found = _URL.fullmatch(url)
        if not found:
            raise StoreError(url, "is no S3 URL: s3://bucket/prefix")
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
        answer = self._client.request("head_object", self._where(key), **self._names(key))
        return self._described(key, answer, self._length(key, answer))

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        with self.open(key, start, stop, version=version) as body:
            return body.read()

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> S3Body | EmptyBody:
        if start < 0 or (stop is not None and stop <= start):
            return self._open_nothing(key, start, stop, version)
        where, is_ranged = self._where(key), start > 0 or stop is not None
        parameters = self._names(key)
        if is_ranged:
            parameters["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        if version is not None:
            parameters["IfMatch"] = f'"{version}"'
        try:
            answer = self._client.request("get_object", where, **parameters)
        except StoreError as error:
            if error.status == 416 and start == 0:  # of an empty object, no range can be had
                return self._open_nothing(key, 0, 0, version)
            raise
        try:
            info, length = self._checked_answer(key, answer, start, stop, version)
        except BaseException:
            answer["Body"].close()
            raise
        return S3Body(where, info, answer["Body"], length)

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        where, names = self._where(key), self._names(key)
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

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        where = f"{self.url}/{prefix}"
        parameters: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        before = ""
        while True:
            answer = self._client.request("list_objects_v2", where, **parameters)
            for entry in answer.get("Contents", ()):
                name = entry["Key"]
                if name < before or not name.startswith(self._prefix + prefix):
                    raise StoreError(where, f"the server lists {name!r} after {before!r}: it does not sort")
                before = name
                if name != self._prefix:  # what some tools put there to show a folder
                    yield ObjectInfo(name[len(self._prefix) :], int(entry["Size"]), version_of(entry))
            if not answer.get("IsTruncated"):
                return
            if "NextContinuationToken" not in answer:
                raise StoreError(where, "the server lists only a part and does not say how to go on")
            parameters["ContinuationToken"] = answer["NextContinuationToken"]

    def delete(self, key: str) -> None:
        try:
            self._client.request("delete_object", self._where(key), "write", **self._names(key))
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

    def _open_nothing(self, key: str, start: int, stop: int | None, version: str | None) -> EmptyBody:
        info = self.head(key)
        if version not in (None, info.version):
            raise ObjectChangedError(self._where(key), f"is of version {info.version}, not {version}")
        start, stop = checked_range(self._where(key), start, stop, info.bytes)
        return EmptyBody(info)

    def _checked_answer(
        self, key: str, answer: Mapping[str, Any], start: int, stop: int | None, version: str | None
    ) -> tuple[ObjectInfo, int]:
        """(the object, how many bytes follow) of an answer that holds what was asked for."""
        where, got = self._where(key), version_of(answer)
        if version not in (None, got):  # a server that knows no If-Match
            raise ObjectChangedError(where, f"is of version {got}, not {version}")
        length = size = self._length(key, answer)
        first = 0
        if "ContentRange" in answer:
            found = _CONTENT_RANGE.fullmatch(answer["ContentRange"])
            if not found:
                raise StoreError(
                    where, f"the server sends a range that cannot be read: {answer['ContentRange']}"
                )
            first, last, size = int(found[1]), int(found[2]), int(found[3])
            length = last + 1 - first
        end = size if stop is None else min(stop, size)
        if (first, first + length) != (start, end) or length != int(answer["ContentLength"]):
            raise StoreError(
                where,
                f"bytes {start:,} to {end:,} were asked for, but the server sends {first:,} to "
                f"{first + length:,} in {answer['ContentLength']:,} bytes: it, or a proxy, has no ranges",
            )
        return self._described(key, answer, size), length

    def _described(self, key: str, answer: Mapping[str, Any], size: int) -> ObjectInfo:
        version = version_of(answer)
        if not version:
            raise StoreError(self._where(key), "the server gives no ETag, so versions cannot be told apart")
        metadata = {name.lower(): value for name, value in answer.get("Metadata", {}).items()}
        return ObjectInfo(key, size, version, metadata)

    def _length(self, key: str, answer: Mapping[str, Any]) -> int:
        if "ContentLength" not in answer:
            raise StoreError(self._where(key), "the server does not say how many bytes there are")
        return int(answer["ContentLength"])

    def _find_own(self, key: str, nonce: str, size: int) -> ObjectInfo | None:
        """The object, if it is what we wrote."""
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
            raise StoreError(self.url, f"key {key!r:.200} is not Unicode, which S3's keys are") from error
        return {"Bucket": self._bucket, "Key": name}

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"


class _Unanswered:
    """Nonces of writes that ended without an answer, for the next try of the same write."""

    def __init__(self) -> None:
        self._nonces: dict[
            str, tuple[str, str]
        ] = {}  # no lock: one step of a dict each, and good after a fork

    def add(self, key: str, content: Content, nonce: str) -> None:
        if len(self._nonces) >= _MAX_UNANSWERED:
            self._nonces.clear()
        self._nonces[key] = (content.identity(), nonce)

    def take(self, key: str, content: Content) -> str | None:
        """The nonce of such a write; only one caller gets it."""
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
                where, f"metadata {name!r}: {value!r:.80} is not lower-case ASCII that HTTP can carry"
            )
    if sum(len(name) + len(value) for name, value in metadata.items()) > _MAX_METADATA_BYTES:
        raise StoreError(where, f"metadata is over {_MAX_METADATA_BYTES:,} bytes")
    return dict(metadata)
