"""Upload an object to S3: in one request, or in parts that the server assembles at the end.

Every request has the MD5 of its content in a signed header, and the server compares it. (Over HTTP, too, the
body itself is not signed: a second hash would take a quarter of an upload's CPU time.) The ETag of the whole
object is compared here. A file is read in parts of 16 MiB (larger only above 160 GB, so that 10,000 parts
suffice), with four in memory at a time. A failed upload is aborted, so nothing remains that would cost money.

A conditional upload (`if_absent`) is a single request up to 5 GiB, streamed from a file that is read twice:
some servers (Ceph) decide atomically about single requests, but ignore the condition when parts are
completed. In buckets with versioning, Ceph ignores it for single requests, too; so a writer that finds an
earlier version removes its own.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from shardkit.storage.s3_client import S3Client, version_of
from shardkit.storage.store import ObjectExistsError, StoreError, TransientError

PART_BYTES = 16 << 20  # size of a part; unconditional uploads up to this size are one request
MAX_OBJECT_BYTES = 5 << 40  # S3's limit on the size of an object
_MAX_REQUEST_BYTES = 5 << 30  # S3's limit on the size of an object that is sent in one request
_MAX_PARTS = 10_000  # S3's limit on the number of parts
_PART_ALIGNMENT = 1 << 20  # parts larger than PART_BYTES are a multiple of this size
_PIECE_BYTES = 1 << 20  # size of reads when a file is only hashed
_THREADS = 4  # number of parts of an object that are sent in parallel
_FORBIDDEN = 403
_KEPT_BUFFERS = 8  # maximum number of unused buffers to keep, 128 MiB in all
_MD5_ETAG = re.compile(r"[0-9a-f]{32}(-[0-9]+)?")


class Buffers:
    """Reusable memory for parts, because allocating a buffer takes as long as sending it.

    Buffers are bytearrays, which botocore sends without a copy; it copies bytes objects first.
    """

    def __init__(self) -> None:
        self._free: deque[bytearray] = deque(maxlen=_KEPT_BUFFERS)  # no lock: its operations are atomic

    @contextlib.contextmanager
    def lend(self, size: int) -> Iterator[bytearray]:
        """Lend a buffer of `size` bytes with arbitrary content; if none is free, allocate one."""
        if size != PART_BYTES:
            yield bytearray(size)
            return
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = bytearray(size)
        try:
            yield buffer
        finally:
            self._free.append(buffer)

    def close(self) -> None:
        self._free.clear()


class Content:
    """The data to upload: bytes, or a file, which is read part by part."""

    def __init__(self, where: str, data: bytes | Path, buffers: Buffers) -> None:
        self._where = where
        self._data = data
        self._buffers = buffers
        self._file: FileIO | None = None
        self.bytes = len(data) if isinstance(data, bytes) else self._open(data)

    @contextlib.contextmanager
    def part(self, start: int, stop: int) -> Iterator[bytes | bytearray]:
        """Lend the bytes from `start` to `stop` (exclusive); a file's bytes are in a reused buffer."""
        if self._file is None:
            assert isinstance(self._data, bytes)
            yield self._data[start:stop]
            return
        with self._buffers.lend(stop - start) as part:
            with memoryview(part) as view:
                self._read_into(view, start)
            yield part

    @contextlib.contextmanager
    def whole(self) -> Iterator[bytes | bytearray | FileIO]:
        """Lend the whole content in a form that botocore can send."""
        if self._file is None or self.bytes <= PART_BYTES:
            with self.part(0, self.bytes) as part:
                yield part
        else:
            self._file.seek(0)
            yield self._file

    def md5(self) -> bytes:
        if self._file is None:
            assert isinstance(self._data, bytes)
            return _md5(self._data)
        digest, piece = hashlib.md5(usedforsecurity=False), memoryview(bytearray(_PIECE_BYTES))
        for start in range(0, self.bytes, _PIECE_BYTES):
            read = piece[: self.bytes - start]
            self._read_into(read, start)
            digest.update(read)
        return digest.digest()

    def identity(self) -> str:
        """Return a text that identifies the content in this process: its MD5, or a file's inode and mtime."""
        if self._file is None:
            return self.md5().hex()
        status = os.fstat(self._file.fileno())
        return f"{self._data!s} {status.st_dev} {status.st_ino} {status.st_mtime_ns}"

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read_into(self, buffer: memoryview, position: int) -> None:
        """Fill `buffer` with the file's bytes from `position` on."""
        assert self._file is not None
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self._file.fileno(), [buffer[filled:]], position + filled)
            except OSError as error:
                raise StoreError(self._where, f"{self._data!s} cannot be read: {error.strerror}") from error
            if not count:
                raise StoreError(self._where, f"{self._data!s} was truncated during the upload")
            filled += count

    def _open(self, file: Path) -> int:
        try:
            self._file = FileIO(file)
            return os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise StoreError(self._where, f"{file} cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of an upload, with its metadata and condition."""

    where: str
    names: Mapping[str, str]
    """Bucket and Key, as botocore's arguments."""
    metadata: Mapping[str, str]
    condition: Mapping[str, str]
    """IfNoneMatch="*" for a conditional upload, otherwise empty."""


def upload(client: S3Client, target: Target, content: Content) -> str:
    """Upload `content` and return its version.

    Raises TransientError if the server reports other content than was sent; the object is then removed if it
    is certainly new. Raises ObjectExistsError if the condition is not met.
    """
    if content.bytes > MAX_OBJECT_BYTES:
        raise StoreError(target.where, f"{content.bytes:,} bytes exceed S3's limit of {MAX_OBJECT_BYTES:,}")
    in_one_request = _MAX_REQUEST_BYTES if target.condition else PART_BYTES
    send = _upload_whole if content.bytes <= in_one_request else _upload_parts
    answer, expected = send(client, target, content)
    if target.condition and "VersionId" in answer and not client.is_aws:
        _withdraw_second(client, target, str(answer["VersionId"]))
    if not version_of(answer):  # Ceph sends no ETag when it completes parts
        answer = client.request("head_object", target.where, "read", **target.names)
    version = version_of(answer)
    if _is_md5(answer, version) and version != expected:
        if target.condition:
            with contextlib.suppress(StoreError):
                client.request("delete_object", target.where, "write", **target.names)
        raise TransientError(
            target.where, f"the server stored {version}, but {expected} was sent: upload it again"
        )
    return version


def _withdraw_second(client: S3Client, target: Target, version_id: str) -> None:
    """Remove the version just stored and raise ObjectExistsError if the object existed before.

    Of several concurrent writers, only the first one finds no earlier version, or only a deleted one, and
    keeps its own. Readers may see the bytes of a later writer until it has removed them. If the credentials
    may not list versions, do nothing and trust the server.
    """
    bucket, key = target.names["Bucket"], target.names["Key"]
    try:
        listed = client.request("list_object_versions", target.where, Bucket=bucket, Prefix=key)
    except StoreError as error:
        if error.status == _FORBIDDEN:
            return
        raise
    versions = [each for each in listed.get("Versions", ()) if each["Key"] == key]  # newest first
    ids = [each["VersionId"] for each in versions]
    if version_id not in ids[:-1]:
        return
    own, earlier = versions[(at := ids.index(version_id)) : at + 2]
    deleted = (each["LastModified"] for each in listed.get("DeleteMarkers", ()) if each["Key"] == key)
    if any(earlier["LastModified"] <= when <= own["LastModified"] for when in deleted):
        return
    client.request("delete_object", target.where, "write", VersionId=version_id, **target.names)
    raise ObjectExistsError(target.where, "already exists")


def _is_md5(answer: Mapping[str, Any], version: str) -> bool:
    """Return whether the ETag `version` is an MD5. It is not if a KMS or customer key encrypts the object."""
    is_encrypted = str(answer.get("ServerSideEncryption", "")).startswith("aws:kms")
    return not is_encrypted and "SSECustomerAlgorithm" not in answer and bool(_MD5_ETAG.fullmatch(version))


def _upload_whole(client: S3Client, target: Target, content: Content) -> tuple[dict[str, Any], str]:
    digest = content.md5()
    with content.whole() as body:
        answer = client.request(
            "put_object",
            target.where,
            "write",
            Body=body,
            ContentMD5=_base64(digest),
            Metadata=dict(target.metadata),
            **target.names,
            **target.condition,
        )
    return answer, digest.hex()


def _upload_parts(client: S3Client, target: Target, content: Content) -> tuple[dict[str, Any], str]:
    size = part_bytes(content.bytes)
    starts = range(0, content.bytes, size)
    begun = client.request(
        "create_multipart_upload", target.where, "write", Metadata=dict(target.metadata), **target.names
    )
    names = {**target.names, "UploadId": begun["UploadId"]}

    def send(number: int) -> tuple[str, bytes]:
        start = starts[number - 1]
        with content.part(start, min(start + size, content.bytes)) as data:
            digest = _md5(data)
            answer = client.request(
                "upload_part",
                f"{target.where} (part {number} of {len(starts)})",
                "write",
                Body=data,
                ContentMD5=_base64(digest),
                PartNumber=number,
                **names,
            )
        return str(answer["ETag"]), digest

    try:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardkit-upload") as pool:
            sent = [pool.submit(send, number) for number in range(1, len(starts) + 1)]
            try:
                done = [future.result() for future in sent]
            except BaseException:
                # Let running requests end before the abort: a part that is stored after it would remain.
                pool.shutdown(cancel_futures=True)
                raise
        parts = [{"ETag": etag, "PartNumber": number} for number, (etag, _) in enumerate(done, 1)]
        answer = client.request(
            "complete_multipart_upload",
            target.where,
            "write",
            MultipartUpload={"Parts": parts},
            **names,
            **target.condition,
        )
    except BaseException:
        with contextlib.suppress(StoreError):  # fails if the upload was completed but its answer was lost
            client.request("abort_multipart_upload", target.where, "write", **names)
        raise
    return answer, f"{_md5(b''.join(digest for _, digest in done)).hex()}-{len(done)}"


def part_bytes(total_bytes: int) -> int:
    """Return the size in bytes of the parts of an object of `total_bytes`; the last part may be smaller."""
    least = -(-total_bytes // _MAX_PARTS)
    return max(PART_BYTES, -(-least // _PART_ALIGNMENT) * _PART_ALIGNMENT)


def _md5(data: bytes | bytearray) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
