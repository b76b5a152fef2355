"""Tar shards of packed rows: plain ustar, constant stride, the same bytes for the same rows everywhere.

A sample is one member, `{key}.tokens.npy`: a 512-byte header, a constant 128-byte .npy header, the row,
zeros to the next block. Time, owner and mode are fixed. Headers, keys and checksums of thousands of samples
are made at once as one array; memory is a few chunks of `CHUNK_BYTES`, whatever the shard's size.
Stock `webdataset`, `wids`, Python's tarfile and GNU tar read the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.formats.tar.members import BLOCK, padded
from shardkit.formats.tar.values import make_npy_header
from shardkit.hashing import new_hash
from shardkit.manifest import Column, FileInfo, ShardInfo

__all__ = ["COLUMN_NAME", "KEY_DIGITS", "write_rows_shard"]

CHUNK_BYTES = 1 << 23

KEY_DIGITS = 12  # unless more are needed

MOST_KEY_DIGITS = 18

RECORD_BYTES = 10_240  # tars end at a multiple of 20 blocks

_CHECKSUM_DIGITS = 6

COLUMN_NAME = re.compile(r"[a-z0-9_-]{1,64}")

_DTYPES = (np.dtype("<u2"), np.dtype("<u4"))

_MODE, _SIZE, _TIME, _CHECKSUM = slice(100, 124), slice(124, 136), slice(136, 148), slice(148, 156)


def write_rows_shard(
    folder: Path,
    basename: str,
    rows: npt.NDArray[np.uint16] | npt.NDArray[np.uint32],
    *,
    column: str = "tokens",
    key_start: int,
    key_digits: int = KEY_DIGITS,
    hashes: Sequence[str] = (),
) -> ShardInfo:
    """Write `rows` (n, L) as one tar; keys are `key_start`, `key_start + 1`, … with so many digits.

    ValueError for rows, columns or keys that the format has no room for. An existing file is replaced; a
    crash leaves a file whose name ends in `.tmp`.
    """
    dtype = rows.dtype.newbyteorder("<")
    if rows.ndim != 2 or rows.shape[1] == 0 or dtype not in _DTYPES:
        raise ValueError(f"rows must be a matrix of uint16 or uint32, not {rows.ndim}-D {rows.dtype}")
    if COLUMN_NAME.fullmatch(column) is None:
        raise ValueError(f"column {column!r}: use up to 64 lower-case letters, digits, _ and -")
    if not 1 <= key_digits <= MOST_KEY_DIGITS or key_start < 0 or key_start + len(rows) > 10**key_digits:
        raise ValueError(f"keys from {key_start} on for {len(rows)} rows do not fit {key_digits} digits")
    extension = f"{column}.npy"
    pattern, payload = _pattern(b"0" * key_digits + b"." + extension.encode("ascii"), dtype, rows.shape[1])
    hashers = {name: new_hash(name) for name in hashes}
    path = folder / basename
    temporary = path.with_name(path.name + ".tmp")
    size = 0
    with temporary.open("wb") as file:
        for chunk in _chunks(rows, key_start, pattern, payload):
            for hasher in hashers.values():
                hasher.update(chunk)
            size += file.write(chunk)
    temporary.replace(path)
    encoding = f"ndarray:{dtype.name}:{rows.shape[1]}"
    return ShardInfo(
        raw=FileInfo(basename, size, {name: hasher.hexdigest() for name, hasher in hashers.items()}),
        samples=len(rows),
        columns=(Column(extension, encoding, rows.shape[1] * dtype.itemsize),),
    )


def _pattern(name: bytes, dtype: np.dtype[np.generic], length: int) -> tuple[npt.NDArray[np.uint8], slice]:
    """One sample with a key of zeros and no row, and where the row goes."""
    npy = make_npy_header(dtype, length)
    payload = BLOCK + len(npy)
    size = len(npy) + length * dtype.itemsize
    if size >= 1 << 33:
        raise ValueError(f"rows of {size:,} bytes; ustar holds members up to 8 GiB")
    pattern = np.zeros(BLOCK + padded(size), dtype=np.uint8)

    def put(at: slice, text: bytes) -> None:
        pattern[at.start : at.start + len(text)] = np.frombuffer(text, dtype=np.uint8)

    put(slice(0, 100), name)
    put(_MODE, b"0000644\x000000000\x000000000\x00")  # mode, owner, group
    put(_SIZE, b"%011o\x00" % size)
    put(_TIME, b"%011o\x00" % 0)
    put(slice(156, 265), b"0".ljust(101, b"\x00") + b"ustar\x0000")  # regular file, magic
    put(_CHECKSUM, b" " * 8)
    put(_CHECKSUM, b"%06o\x00 " % int(pattern[:BLOCK].sum(dtype=np.int64)))
    put(slice(BLOCK, payload), npy)
    return pattern, slice(payload, payload + length * dtype.itemsize)


def _chunks(
    rows: npt.NDArray[np.generic], key_start: int, pattern: npt.NDArray[np.uint8], payload: slice
) -> Iterator[memoryview]:
    """The tar in pieces of about CHUNK_BYTES; each piece is valid until the next one is asked for."""
    count = max(1, min(len(rows), CHUNK_BYTES // len(pattern)))
    buffer = np.tile(pattern, (count, 1))
    for start in range(0, len(rows), count):
        part = rows[start : start + count]
        block = buffer[: len(part)]
        keys = np.arange(key_start + start, key_start + start + len(part), dtype=np.int64)
        _number(block, keys, pattern)
        little = np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<"))
        block[:, payload] = little.view(np.uint8)
        yield block.reshape(-1).data
    written = len(rows) * len(pattern)
    end = -(-(written + 2 * BLOCK) // RECORD_BYTES) * RECORD_BYTES
    yield memoryview(bytes(end - written))


def _number(
    block: npt.NDArray[np.uint8], keys: npt.NDArray[np.int64], pattern: npt.NDArray[np.uint8]
) -> None:
    """Write the keys' digits and the checksums that follow from them into every header."""
    count = bytes(pattern[:BLOCK]).index(b".")
    digits = keys[:, None] // 10 ** np.arange(count - 1, -1, -1, dtype=np.int64) % 10
    block[:, :count] = digits + ord("0")
    base = int(bytes(pattern[_CHECKSUM])[:_CHECKSUM_DIGITS], 8)  # of the key of zeros
    sums = base + digits.sum(axis=1)
    octal = sums[:, None] // 8 ** np.arange(_CHECKSUM_DIGITS - 1, -1, -1, dtype=np.int64) % 8
    block[:, _CHECKSUM.start : _CHECKSUM.start + _CHECKSUM_DIGITS] = octal + ord("0")
