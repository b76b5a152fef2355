"""Read one MDS shard: a memory map (or decompressed bytes) whose header is checked completely.

    u32 n | u32 offsets[n + 1] | config JSON | samples          little-endian, offsets from the file's start
    sample: u32 size of each variable column, in column order | values

Opening compares the file with the index entry (size, hashes if requested, sample count, columns) and checks
all offsets in one vectorized pass, so that no later read can leave its sample. If all columns have a fixed
size, the stride between samples is constant and `fixed_rows` is a view on the map: one `view[rows]` builds a
batch with no Python per sample. Views keep the map alive after `close`.

`read_header` and `SampleLayout` serve sequential readers, which do not hold a whole shard in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.files import load_json
from shardkit.formats.budget import SampleBudget
from shardkit.formats.mds.encodings import Encoding, encoding_of
from shardkit.formats.mds.images import FILE_ENCODINGS, decode_as
from shardkit.formats.mds.index import parse_columns
from shardkit.formats.stored import load_raw
from shardkit.manifest import Column, ShardInfo

_U32 = np.dtype("<u4")
_SMALL_BYTES = 1 << 20  # values smaller than this are decoded without charging the sample's budget

_MAX_CONFIG_BYTES = 1 << 22  # room for thousands of columns
_MAX_STREAMED_SAMPLES = 1 << 24  # limit for a shard that is read sequentially: 64 MiB of offsets


class SampleLayout:
    """Locates the values in a sample, by the sizes at the sample's start; safe to share among threads."""

    def __init__(self, file: str | PathLike[str], columns: Sequence[Column]) -> None:
        """Prepare the layout of samples with these columns; errors name `file`."""
        self._file, self.columns = file, columns
        self.encodings = [encoding_of(column.encoding) for column in columns]
        sizes = [encoding.size for encoding in self.encodings]
        self.variable_columns = sizes.count(None)
        self.fixed_bytes = sum(size for size in sizes if size is not None)
        self.head_bytes = 4 * self.variable_columns

    def spans(
        self, row: int, begin: int, size: int, head: bytes | memoryview
    ) -> list[tuple[Column, Encoding, int, int]]:
        """Return (column, encoding, offset in the sample, size in bytes) for each value of a sample.

        The sample has `size` bytes, from byte `begin` of the file on. `head` is its first `head_bytes` bytes
        (fewer if it is shorter). Raises ShardError unless the values fill the sample exactly.
        """
        position = self.head_bytes
        if position + self.fixed_bytes > size:
            raise self.damaged(row, begin, f"{size:,} bytes are too few for its columns")
        words = iter(np.frombuffer(head, _U32).tolist())
        spans = []
        for column, encoding in zip(self.columns, self.encodings, strict=True):
            length = next(words) if encoding.size is None else encoding.size
            if position + length > size:
                problem = f"column {column.name!r} states {length:,} bytes, which exceed the sample"
                raise self.damaged(row, begin, problem)
            spans.append((column, encoding, position, length))
            position += length
        if position != size:
            raise self.damaged(row, begin + position, f"{size - position:,} bytes are left over")
        return spans

    def damaged(self, row: int, offset: int, problem: str) -> ShardError:
        """Return the error for a damaged sample, which starts at byte `offset` of the file."""
        return ShardError(self._file, f"sample {row:,}: {problem}; fetch the file again", offset=offset)


def read_header(
    file: str | PathLike[str], read: Callable[[int], bytes]
) -> tuple[tuple[Column, ...], npt.NDArray[np.uint32]]:
    """Read the columns and sample offsets from a shard's header; `read(n)` returns its next n bytes.

    Raises ShardError if the header is damaged or lists no columns; MosaicML's writer always lists them.
    """
    start = read(4)
    samples = int.from_bytes(start, "little")
    if len(start) < 4 or samples > _MAX_STREAMED_SAMPLES:
        problem = f"is not an MDS shard of 0 to {_MAX_STREAMED_SAMPLES:,} samples"
        raise ShardError(file, problem, offset=0)
    data = read(4 * (samples + 1))
    if len(data) < 4 * (samples + 1):
        raise ShardError(file, f"ends inside the offsets of its {samples:,} samples", offset=4)
    offsets = np.frombuffer(data, _U32)
    _check_order(file, offsets)
    size = int(offsets[0]) - 4 * (samples + 2)
    if size > _MAX_CONFIG_BYTES:
        raise ShardError(file, f"the config is too large: {size:,} bytes", offset=4 * (samples + 2))
    if not size:
        raise ShardError(file, "does not list its columns; convert the dataset")
    return _parse_config(file, read(size), 4 * (samples + 2)), offsets


class MdsShard:
    """An open shard with random access to its samples; safe to share among threads. See `open_shard`."""

    def __init__(
        self,
        file: str | PathLike[str],
        info: ShardInfo,
        data: npt.NDArray[np.uint8],
        *,
        decode: bool | str = True,
    ) -> None:
        """Check the raw shard `data` against `info`; errors name `file`. `decode`: for columns of images."""
        self.info = info
        self._file, self._decode = file, decode
        self._data = data
        self._layout = SampleLayout(file, info.columns)
        self._offsets = _checked_offsets(file, info, data)
        _check_config(file, info, data, int(self._offsets[0]))
        if not self._layout.variable_columns:
            self._check_stride()

    def __len__(self) -> int:
        return self.info.samples

    @property
    def columns(self) -> tuple[Column, ...]:
        """Name, encoding and fixed size of each column, in the order in which a sample stores them."""
        return self.info.columns

    def sample(self, row: int, columns: Container[str] | None = None) -> dict[str, object]:
        """Return {column: value} of one sample, decoding only `columns` if they are given.

        Raises IndexError unless 0 <= row < len, and ShardError if the sample is damaged.
        """
        values: dict[str, object] = {}
        budget: SampleBudget | None = None
        for column, encoding, position, data in self._values(row):
            if columns is not None and column.name not in columns:
                continue
            try:
                if encoding.decode_within is None and len(data) < _SMALL_BYTES:
                    values[column.name] = encoding.decode(data)
                    continue
                budget = budget or SampleBudget(self.info.stored.bytes)
                if self._decode is not True and encoding.name in FILE_ENCODINGS:
                    values[column.name] = decode_as(data, self._decode, budget)
                elif encoding.decode_within is None:
                    budget.take(len(data))
                    values[column.name] = encoding.decode(data)
                else:
                    values[column.name] = encoding.decode_within(data, budget)
            except ValueError as error:
                problem = f"column {column.name!r} ({column.encoding}): {error}"
                raise self._layout.damaged(row, position, problem) from error
        return values

    def payloads(self, row: int) -> dict[str, memoryview]:
        """Return {column: stored bytes} of one sample, not decoded. Raises the same errors as `sample`."""
        return {column.name: data for column, _, _, data in self._values(row)}

    def fixed_rows(self, column: str) -> npt.NDArray[Any] | None:
        """Return a read-only view (samples, *shape) of a column; None unless all columns have a fixed size.

        No byte is copied. The shape is () for a column of numbers, and `shape` for `ndarray:dtype:shape`. The
        view is C-contiguous if the shard has no other column. Its values may be unaligned.
        """
        names = [c.name for c in self.info.columns]
        if column not in names:
            raise KeyError(f"{self._file}: no column {column!r}; columns: {', '.join(names)}")
        number = names.index(column)
        encodings = self._layout.encodings
        dtype, shape = encodings[number].dtype, encodings[number].shape
        if self._layout.variable_columns or dtype is None:
            return None
        before = sum(encoding.size or 0 for encoding in encodings[:number])
        samples = self._data[int(self._offsets[0]) :].reshape(self.info.samples, self._layout.fixed_bytes)
        values = samples[:, before : before + math.prod(shape) * dtype.itemsize].view(dtype)
        return values.reshape(self.info.samples, *shape)

    def close(self) -> None:
        """Drop the memory map; views returned earlier stay readable."""
        self._data = np.empty(0, dtype=np.uint8)
        self._offsets = np.zeros(1, dtype=_U32)

    def _values(self, row: int) -> list[tuple[Column, Encoding, int, memoryview]]:
        """Return (column, encoding, offset in the file, bytes) for each value of one sample."""
        if not 0 <= row < self.info.samples:
            raise IndexError(f"{self._file}: no row {row}; the shard has {self.info.samples} samples")
        begin, end = int(self._offsets[row]), int(self._offsets[row + 1])
        data = self._data.data[begin:end]
        spans = self._layout.spans(row, begin, len(data), data[: self._layout.head_bytes])
        return [
            (column, encoding, begin + position, data[position : position + size])
            for column, encoding, position, size in spans
        ]

    def _check_stride(self) -> None:
        steps = np.diff(self._offsets)
        if not np.all(steps == self._layout.fixed_bytes):
            row = int(np.flatnonzero(steps != self._layout.fixed_bytes)[0])
            problem = f"has {int(steps[row]):,} bytes, but its columns take {self._layout.fixed_bytes:,}"
            raise self._layout.damaged(row, int(self._offsets[row]), problem)


def open_shard(
    folder: Path,
    info: ShardInfo,
    *,
    allow_pickle: bool = False,
    verify: bool = False,
    decode: bool | str = True,
) -> MdsShard:
    """Open the shard that `info` describes; its file is in `folder` or below.

    The raw file is preferred if `folder` holds it in addition to a compressed one, as MosaicML's caches do.
    `verify` checks every recorded hash. Columns of pickles can run any code when they are read: they are
    refused unless `allow_pickle`. `decode` says what image files are decoded to (`decode_as`).
    """
    folder = Path(folder)
    is_raw_there = (folder / info.raw.basename).is_file()
    found = replace(info, zip=None, compression=None) if is_raw_there else info
    raw = load_raw("mds", folder, found, verify=verify)
    where = folder / found.stored.basename
    return shard_from_raw(where, info, raw, allow_pickle=allow_pickle, decode=decode)


def shard_from_raw(
    where: str | PathLike[str],
    info: ShardInfo,
    raw: npt.NDArray[np.uint8],
    *,
    allow_pickle: bool = False,
    decode: bool | str = True,
) -> MdsShard:
    """Open the shard whose raw bytes are `raw`; `where` is its name in errors."""
    _refuse_pickles(where, info, allow_pickle)
    if len(raw) != info.raw.bytes:
        problem = f"has {len(raw):,} bytes, the index states {info.raw.bytes:,}; fetch it again"
        raise ShardError(where, problem)
    return MdsShard(where, info, raw, decode=decode)


def _refuse_pickles(where: str | PathLike[str], info: ShardInfo, allow_pickle: bool) -> None:
    pickled = [column.name for column in info.columns if not encoding_of(column.encoding).safe]
    if pickled and not allow_pickle:
        raise ShardError(
            where,
            f"column {pickled[0]!r} holds pickles, which can run any code; "
            "if you trust the writer of this dataset, open it with allow_pickle=True",
        )


def _checked_offsets(
    file: str | PathLike[str], info: ShardInfo, data: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint32]:
    """Check that the sample offsets never decrease and end at the file's end; return u32[samples + 1]."""
    header_bytes = 4 * (info.samples + 2)
    if len(data) < header_bytes:
        raise ShardError(file, f"{len(data):,} bytes cannot hold the offsets of {info.samples:,} samples")
    samples = int(np.frombuffer(data[:4], _U32)[0])
    if samples != info.samples:
        raise ShardError(file, f"has {samples:,} samples, the index states {info.samples:,}", offset=0)
    offsets: npt.NDArray[np.uint32] = np.frombuffer(data[4:header_bytes], _U32)
    _check_order(file, offsets)
    if offsets[-1] != len(data):
        problem = f"the last sample ends at byte {offsets[-1]:,}, but the file at {len(data):,}"
        raise ShardError(file, problem, offset=header_bytes - 4)
    return offsets


def _check_order(file: str | PathLike[str], offsets: npt.NDArray[np.uint32]) -> None:
    header_bytes = 4 * (len(offsets) + 1)
    if offsets[0] < header_bytes:
        raise ShardError(file, f"samples begin at byte {offsets[0]:,}, inside the header", offset=4)
    decreasing = offsets[1:] < offsets[:-1]
    if decreasing.any():
        row = int(np.argmax(decreasing))
        raise ShardError(file, f"sample {row:,} ends before it begins", offset=8 + 4 * row)


def _check_config(file: str | PathLike[str], info: ShardInfo, data: npt.NDArray[np.uint8], end: int) -> None:
    """Raise ShardError if the config in a shard's header lists other columns than `info`.

    If a shard were decoded with the wrong columns, its values would be nonsense.
    """
    start = 4 * (info.samples + 2)
    if start == end:
        return  # MosaicML's reader ignores the config, so other writers may omit it
    if end - start > _MAX_CONFIG_BYTES:
        raise ShardError(file, f"the config is too large: {end - start:,} bytes", offset=start)
    if _parse_config(file, data[start:end].tobytes(), start) != info.columns:
        raise ShardError(file, "the config lists other columns than the index", offset=start)


def _parse_config(file: str | PathLike[str], text: bytes, start: int) -> tuple[Column, ...]:
    """Parse the columns from the config at byte `start`."""
    try:
        config = load_json(text)
    except (ValueError, RecursionError) as error:
        raise ShardError(file, f"the config is not JSON: {error}", offset=start) from error
    if not isinstance(config, Mapping):
        raise ShardError(file, "the config is not an object", offset=start)
    return parse_columns(file, config)
