"""What a scan of a tar found, as one small file, so that it is scanned once.

    magic (8) | u32 bytes of the head | head JSON | xxh3_128 of all before | body | xxh3_128 of the body
    body: i64 starts[samples + 1] | i64 offsets[members] | i64 sizes[members] | i64 key ends[samples]
          | i32 kinds[members] | keys, UTF-8

The head says of which object, of which version, the file speaks, and all that a manifest states of a tar:
opening a dataset reads heads only, opening a shard one body. About 30 bytes a member, and the keys. Whatever
is cut, damaged or about something else is no index (ValueError): the tar is scanned again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, overload

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.files import load_json
from shardkit.index import Column
from shardkit.tar.index import MAX_MEMBERS, TarIndex

__all__ = ["Scanned", "index_file_bytes", "read_head", "read_index"]

_MAGIC = b"shardtx1"
_PREFIX = struct.Struct("<8sI")
_DIGEST_BYTES = 16
_MAX_HEAD_BYTES = 1 << 22
_I64, _I32 = np.dtype("<i8"), np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a manifest states of a tar, found by looking: `raw_bytes` once decompressed."""

    samples: int
    raw_bytes: int
    columns: tuple[Column, ...]


def index_file_bytes(origin: str, scanned: Scanned, index: TarIndex) -> bytes:
    """The file that keeps `scanned` and `index` for the object that `origin` names."""
    keys = [key.encode("utf-8", "surrogateescape") for key in index.keys]
    ends = np.cumsum([len(key) for key in keys], dtype=np.int64)
    body = b"".join(
        [
            *(array.astype(_I64).tobytes() for array in (index.starts, index.offsets, index.sizes, ends)),
            index.kinds.astype(_I32).tobytes(),
            *keys,
        ]
    )
    head = {
        "origin": origin,
        "samples": scanned.samples,
        "members": len(index.offsets),
        "key_bytes": int(ends[-1]) if len(ends) else 0,
        "raw_bytes": scanned.raw_bytes,
        "columns": [[column.name, column.encoding, column.size] for column in scanned.columns],
        "extensions": list(index.extensions),
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    front = _PREFIX.pack(_MAGIC, len(text)) + text
    return front + xxhash.xxh3_128_digest(front) + body + xxhash.xxh3_128_digest(body)


def read_head(file: BinaryIO, origin: str) -> Scanned:
    """What the file at hand says of `origin`; ValueError if it is not a whole one that speaks of it."""
    return _scanned(_read_head(file, origin))


def read_index(file: BinaryIO, origin: str) -> tuple[Scanned, TarIndex]:
    """The same, with the index of the members."""
    head = _read_head(file, origin)
    samples, members, key_bytes = head["samples"], head["members"], head["key_bytes"]
    counts = [samples + 1, members, members, samples]
    size = 8 * sum(counts) + 4 * members + key_bytes
    data = file.read(size + _DIGEST_BYTES + 1)
    if len(data) != size + _DIGEST_BYTES or xxhash.xxh3_128_digest(data[:size]) != data[size:]:
        raise ValueError("the members are cut or damaged")
    arrays, at = [], 0
    for count in counts:
        arrays.append(np.frombuffer(data, _I64, count, at).astype(np.int64, copy=False))
        at += 8 * count
    starts, offsets, sizes, ends = arrays
    kinds = np.frombuffer(data, _I32, members, at).astype(np.int32, copy=False)
    keys = _PackedKeys(data[at + 4 * members : size], ends)
    return _scanned(head), TarIndex(keys, starts, offsets, sizes, kinds, tuple(head["extensions"]))


def _read_head(file: BinaryIO, origin: str) -> dict[str, Any]:
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise ValueError("the file is cut")
    magic, size = _PREFIX.unpack(prefix)
    if magic != _MAGIC or size > _MAX_HEAD_BYTES:
        raise ValueError("no index of a tar")
    text = file.read(size)
    if xxhash.xxh3_128_digest(prefix + text) != file.read(_DIGEST_BYTES):
        raise ValueError("the head is cut or damaged")
    head: dict[str, Any] = load_json(text)
    if head["origin"] != origin or not 0 <= head["members"] <= MAX_MEMBERS:
        raise ValueError("the index of another tar")
    return head


def _scanned(head: dict[str, Any]) -> Scanned:
    columns = tuple(Column(name, encoding, size) for name, encoding, size in head["columns"])
    return Scanned(head["samples"], head["raw_bytes"], columns)


class _PackedKeys(Sequence[str]):
    """Keys in one piece of memory, decoded when asked for."""

    def __init__(self, data: bytes, ends: npt.NDArray[np.int64]) -> None:
        self._data, self._ends = data, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        start = int(self._ends[number - 1]) if number else 0
        return self._data[start : int(self._ends[number])].decode("utf-8", "surrogateescape")
