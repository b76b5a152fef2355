"""Samples of any columns into shards, one by one: MDS as MdsWriter writes it, or a tar of several members.

Tars are plain ustar (PAX headers only for names that need them) with fixed time, owner and mode, so the same
samples give the same bytes. Memory is one shard for MDS, one sample for tars.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Protocol

from shardkit import mds, tar
from shardkit.convert.columns import KEY
from shardkit.convert.options import OutputOptions
from shardkit.convert.source import Sample
from shardkit.convert.write_rows import content_hasher
from shardkit.errors import ShardError
from shardkit.hashing import Hasher, new_hash
from shardkit.index import FileInfo, Manifest, ShardInfo
from shardkit.tar.headers import BLOCK, padded
from shardkit.tar.index import split_name
from shardkit.tar.shard_list import describe_tar
from shardkit.tar.writer import KEY_DIGITS, RECORD_BYTES

__all__ = ["MdsSampleWriter", "SampleDigest", "SampleWriter", "TarSampleWriter"]

_MAX_MEMBER_BYTES = 1 << 32  # of one sample's member; a larger one would not fit into a shard


class SampleDigest:
    """Of all values of all samples in order, whatever the format and the shards."""

    def __init__(self) -> None:
        self._hasher: Hasher = content_hasher()

    def add(self, payloads: Mapping[str, bytes | memoryview]) -> None:
        """One more sample: {column or extension: bytes}."""
        for name in sorted(payloads):
            data = payloads[name]
            self._hasher.update(f"{name}\0{len(data)}\0".encode())
            self._hasher.update(data)

    def hexdigest(self) -> str:
        """Of all that was added."""
        return self._hasher.hexdigest()


class SampleWriter(Protocol):
    """Takes samples in order."""

    def write(self, sample: Sample) -> None: ...
    def finish(self) -> tuple[Manifest, str]:
        """The manifest, and the digest of all values."""


class MdsSampleWriter:
    """MDS shards; `columns` is {name: encoding}."""

    def __init__(self, folder: Path, output: OutputOptions, columns: Mapping[str, str]) -> None:
        self._writer = mds.MdsWriter(
            folder,
            columns=columns,
            compression=output.compression,
            hashes=output.hashes,
            shard_bytes=output.limit,
        )
        self._digest = SampleDigest()

    def write(self, sample: Sample) -> None:
        """Append a sample; ShardError if it fits no shard."""
        payloads = dict(sample.payloads)
        try:
            if sample.key is not None:
                payloads[KEY] = sample.key.encode()
            self._digest.add(payloads)
            self._writer.write_encoded(payloads)
        except ValueError as error:
            raise ShardError(sample.where, str(error)) from error

    def finish(self) -> tuple[Manifest, str]:
        """Write the index."""
        return self._writer.finish(), self._digest.hexdigest()


class TarSampleWriter:
    """Tars of samples with any members."""

    def __init__(self, folder: Path, output: OutputOptions) -> None:
        self._folder, self._output = folder, output
        self._digest = SampleDigest()
        self._shards: list[ShardInfo] = []
        self._file: FileIO | None = None
        self._size = self._samples = self._written = 0
        self._last_key: str | None = None
        self._hashers: dict[str, Hasher] = {}

    def write(self, sample: Sample) -> None:
        """Append a sample; ShardError if its key cannot name members."""
        key = f"{self._written:0{KEY_DIGITS}d}" if sample.key is None else sample.key
        self._check_key(key, sample)
        members = [(f"{key}.{name}", sample.payloads[name]) for name in sorted(sample.payloads)]
        named = {} if sample.key is None else {KEY: key.encode("utf-8", "surrogateescape")}
        self._digest.add({**sample.payloads, **named})
        heads = [_header(name, len(data), sample.where) for name, data in members]
        size = sum(len(h) + padded(len(m[1])) for h, m in zip(heads, members, strict=True))
        if self._samples and self._size + size + RECORD_BYTES > self._output.limit:
            self._close()
        if self._file is None:
            self._open()
        for head, (_, data) in zip(heads, members, strict=True):
            self._put(head)
            self._put(data)
            self._put(bytes(-len(data) % BLOCK))
        self._samples += 1
        self._written += 1
        self._last_key = key

    def finish(self) -> tuple[Manifest, str]:
        """Write the list."""
        if self._file is not None:
            self._close()
        tar.write_shard_list(self._folder, self._shards)
        return Manifest("tar", self._shards), self._digest.hexdigest()

    def _check_key(self, key: str, sample: Sample) -> None:
        if sample.key is None:
            return
        if key == self._last_key:
            raise ShardError(sample.where, f"has the key of the sample before, {key[:200]!r}")
        for name in sample.payloads:
            if split_name(f"{key}.{name}") != (key, name) or "\0" in key:
                raise ShardError(
                    sample.where, f"its key {key[:200]!r} cannot name members: no dots in its last part"
                )

    def _open(self) -> None:
        name = f"shard-{len(self._shards):05d}.tar"
        self._file = (self._folder / name).open("wb", buffering=0)
        self._buffer = bytearray()
        self._hashers = {hash_name: new_hash(hash_name) for hash_name in self._output.hashes}
        self._size = self._samples = 0

    def _put(self, data: bytes | memoryview) -> None:
        self._buffer += data
        self._size += len(data)
        if len(self._buffer) >= 1 << 20:
            self._flush()

    def _flush(self) -> None:
        assert self._file is not None
        view = memoryview(bytes(self._buffer))
        for hasher in self._hashers.values():
            hasher.update(view)
        while view:
            view = view[os.write(self._file.fileno(), view) :]
        self._buffer = bytearray()

    def _close(self) -> None:
        assert self._file is not None
        end = -(-(self._size + 2 * BLOCK) // RECORD_BYTES) * RECORD_BYTES
        self._put(bytes(end - self._size))
        self._flush()
        self._file.close()
        self._file = None
        name = f"shard-{len(self._shards):05d}.tar"
        raw = FileInfo(name, self._size, {n: h.hexdigest() for n, h in sorted(self._hashers.items())})
        # What readers will find is what the list states of columns; it proves the tar's structure, too.
        shard = tar.open_shard(
            self._folder, describe_tar(name, stored_bytes=self._size, samples=self._samples)
        )
        self._shards.append(replace(shard.info, raw=raw, columns=shard.columns))
        shard.close()


def _header(name: str, size: int, where: str) -> bytes:
    if size >= _MAX_MEMBER_BYTES:
        raise ShardError(where, f"a member of {size:,} bytes; the limit is {_MAX_MEMBER_BYTES:,}")
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
