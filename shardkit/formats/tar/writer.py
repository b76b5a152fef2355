"""Write tar shards of packed rows: plain ustar, a constant stride, and the same bytes for the same rows.

A sample has one member per column, such as `{key}.tokens.npy`: a 512-byte header, a constant 128-byte .npy
header, the row, zeros to the next block. Columns are sorted by name, as `webdataset`'s writer sorts them.
Time, owner and mode are fixed. Headers, keys and checksums of thousands of samples are made at once as one
array; memory is a few chunks of `CHUNK_BYTES` for a shard of any size.
Stock `webdataset`, `wids`, Python's tarfile and GNU tar read the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.formats.tar.members import BLOCK, padded
from shardkit.formats.tar.values import make_npy_header
from shardkit.hashing import new_hash
from shardkit.manifest import Column, FileInfo, ShardInfo

CHUNK_BYTES = 1 << 23

KEY_DIGITS = 12  # default width of a key

MOST_KEY_DIGITS = 18

RECORD_BYTES = 10_240  # a tar's size is a multiple of this, which is 20 blocks

_CHECKSUM_DIGITS = 6

COLUMN_NAME = re.compile(r"[a-z0-9_-]{1,64}")

_TOKENS = (np.dtype("<u2"), np.dtype("<u4"))
_DTYPES = (np.dtype("u1"), *_TOKENS)

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
    """Write `rows` (n, L) as one tar of n samples. Keys count from `key_start`, in `key_digits` digits.

    Raises ValueError for rows, columns or keys that the format cannot hold. An existing file is replaced; a
    crash leaves a file whose name ends in `.tmp`.
    """
    if rows.ndim != 2 or rows.shape[1] == 0 or rows.dtype.newbyteorder("<") not in _TOKENS:
        raise ValueError(f"rows must be a matrix of uint16 or uint32, not {rows.ndim}-D {rows.dtype}")
    columns = {column: rows}
    return write_columns_shard(
        folder, basename, columns, key_start=key_start, key_digits=key_digits, hashes=hashes
    )


def write_columns_shard(
    folder: Path,
    basename: str,
    columns: Mapping[str, npt.NDArray[np.generic]],
    *,
    key_start: int,
    key_digits: int = KEY_DIGITS,
    hashes: Sequence[str] = (),
) -> ShardInfo:
    """Write matrices (n, length), one per column, as one tar whose sample i has row i of each matrix.

    Otherwise this is like `write_rows_shard`, but the dtype may also be uint8.
    """
    count = len(next(iter(columns.values())))
    for name, rows in columns.items():
        if rows.ndim != 2 or rows.shape[1] == 0 or rows.dtype.newbyteorder("<") not in _DTYPES:
            raise ValueError(
                f"column {name!r} must be a matrix of uint8, uint16 or uint32, not {rows.ndim}-D {rows.dtype}"
            )
        if COLUMN_NAME.fullmatch(name) is None:
            raise ValueError(f"column {name!r}: use up to 64 lower-case letters, digits, _ and -")
        if len(rows) != count:
            raise ValueError(f"column {name!r} has {len(rows):,} rows, but others have {count:,}")
    if not 1 <= key_digits <= MOST_KEY_DIGITS or key_start < 0 or key_start + count > 10**key_digits:
        raise ValueError(f"{count} keys from {key_start} on do not fit in {key_digits} digits")
    members, described, start = [], [], 0
    for name in sorted(columns):
        rows = columns[name]
        members.append(_Member.of(f"{name}.npy", rows, key_digits, start))
        start = members[-1].stop
        encoding = f"ndarray:{rows.dtype.name}:{rows.shape[1]}"
        described.append(Column(f"{name}.npy", encoding, rows.shape[1] * rows.dtype.itemsize))
    hashers = {name: new_hash(name) for name in hashes}
    path = folder / basename
    temporary = path.with_name(path.name + ".tmp")
    size = 0
    with temporary.open("wb") as file:
        for chunk in _chunks(members, count, key_start, key_digits):
            for hasher in hashers.values():
                hasher.update(chunk)
            size += file.write(chunk)
    temporary.replace(path)
    return ShardInfo(
        raw=FileInfo(basename, size, {name: hasher.hexdigest() for name, hasher in hashers.items()}),
        samples=count,
        columns=tuple(described),
    )


def member_bytes(length: int, dtype: np.dtype[np.generic]) -> int:
    """Return the size of one member in a tar, in bytes: headers, a row of `length` values and padding."""
    return BLOCK + padded(len(make_npy_header(dtype, length)) + length * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class _Member:
    """The layout of one column's members: `pattern` holds a member's bytes with zeros as its key and row.

    The member begins at byte `start` of a sample; `payload` is the byte range of the row in the sample.
    """

    rows: npt.NDArray[np.generic]
    pattern: npt.NDArray[np.uint8]
    payload: slice
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.pattern)

    @classmethod
    def of(cls, extension: str, rows: npt.NDArray[np.generic], key_digits: int, start: int) -> _Member:
        dtype, length = rows.dtype.newbyteorder("<"), rows.shape[1]
        npy = make_npy_header(dtype, length)
        payload = BLOCK + len(npy)
        size = len(npy) + length * dtype.itemsize
        if size >= 1 << 33:
            raise ValueError(f"a row takes {size:,} bytes; a ustar member holds less than 8 GiB")
        pattern = np.zeros(member_bytes(length, dtype), dtype=np.uint8)

        def put(at: slice, text: bytes) -> None:
            pattern[at.start : at.start + len(text)] = np.frombuffer(text, dtype=np.uint8)

        put(slice(0, 100), b"0" * key_digits + b"." + extension.encode("ascii"))
        put(_MODE, b"0000644\x000000000\x000000000\x00")  # mode, owner, group
        put(_SIZE, b"%011o\x00" % size)
        put(_TIME, b"%011o\x00" % 0)
        put(slice(156, 265), b"0".ljust(101, b"\x00") + b"ustar\x0000")  # regular file, magic
        put(_CHECKSUM, b" " * 8)
        put(_CHECKSUM, b"%06o\x00 " % int(pattern[:BLOCK].sum(dtype=np.int64)))
        put(slice(BLOCK, payload), npy)
        return cls(rows, pattern, slice(start + payload, start + payload + length * dtype.itemsize), start)


def _chunks(members: Sequence[_Member], rows: int, key_start: int, key_digits: int) -> Iterator[memoryview]:
    """Yield the tar's bytes in pieces of about CHUNK_BYTES; each is valid until the next one is requested."""
    pattern = np.concatenate([member.pattern for member in members])
    count = max(1, min(rows, CHUNK_BYTES // len(pattern)))
    buffer = np.tile(pattern, (count, 1))
    for start in range(0, rows, count):
        block = buffer[: min(count, rows - start)]
        keys = np.arange(key_start + start, key_start + start + len(block), dtype=np.int64)
        digits = keys[:, None] // 10 ** np.arange(key_digits - 1, -1, -1, dtype=np.int64) % 10
        for member in members:
            _number(block[:, member.start : member.start + BLOCK], digits, member.pattern)
            part = member.rows[start : start + len(block)]
            little = np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<"))
            block[:, member.payload] = little.view(np.uint8)
        yield block.reshape(-1).data
    written = rows * len(pattern)
    end = -(-(written + 2 * BLOCK) // RECORD_BYTES) * RECORD_BYTES
    yield memoryview(bytes(end - written))


def _number(
    headers: npt.NDArray[np.uint8], digits: npt.NDArray[np.int64], pattern: npt.NDArray[np.uint8]
) -> None:
    """Write keys, given as their decimal digits, and the resulting checksums into one column's headers."""
    headers[:, : digits.shape[1]] = digits + ord("0")
    base = int(bytes(pattern[_CHECKSUM])[:_CHECKSUM_DIGITS], 8)  # the checksum for a key of zeros
    sums = base + digits.sum(axis=1)
    octal = sums[:, None] // 8 ** np.arange(_CHECKSUM_DIGITS - 1, -1, -1, dtype=np.int64) % 8
    headers[:, _CHECKSUM.start : _CHECKSUM.start + _CHECKSUM_DIGITS] = octal + ord("0")
