"""Reads datasets that `open_dataset` opens: MDS and WebDataset tars, written by shardkit or other tools.

A single column whose values all have one size is read as arrays of many rows. A column of token arrays can be
cut into new rows. Everything else is read sample by sample, as bytes: a value is decoded only if source and
target format store it differently (see `columns`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from shardkit.datasets.dataset import Dataset
from shardkit.datasets.image_files import ImageFilesShard
from shardkit.errors import ShardError
from shardkit.formats.mds.encodings import encoding_of
from shardkit.formats.mds.shard import MdsShard
from shardkit.formats.tar.shard import TarShard
from shardkit.formats.tar.values import decode_npy
from shardkit.formats.tar.writer import COLUMN_NAME, KEY_DIGITS
from shardkit.manifest import Column, FileInfo
from shardkit.tools.convert.columns import KEY, Mapped, keep_columns, to_members, to_values, unchanged
from shardkit.tools.convert.source import BLOCK_BYTES, TOKEN_COLUMNS, CutOptions, Sample, TokenBlock


class DatasetSource:
    """Base class of `DatasetRows`, `DatasetTokens` and `DatasetSamples`, which read a dataset's shards."""

    kind: ClassVar[str] = "dataset"

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        shards = dataset.manifest.shards
        self.files = len(shards)
        self.bytes = sum(max(0, info.stored.bytes) for info in shards)
        self.files_done = 0
        self.digests: list[FileInfo] = []

    @property
    def facts(self) -> Mapping[str, object]:
        return {
            "format": self._dataset.manifest.format,
            "fingerprint": self._dataset.fingerprint,
            "samples": len(self._dataset),
        }

    @property
    def is_shuffled(self) -> bool:
        """Whether the dataset's card says that its rows were shuffled as a whole."""
        return self._dataset.card is not None and self._dataset.card.is_shuffled

    def _shards(self) -> Iterator[tuple[int, Any, str, int]]:
        """Yield (number, open shard, location, stored bytes) of each shard; only one is open at a time."""
        for number, info in enumerate(self._dataset.manifest.shards):
            yield number, self._dataset.shard(number), self._dataset.where(number), max(0, info.stored.bytes)
            self._dataset.keep_only(frozenset())
            self.files_done += 1


class DatasetRows(DatasetSource):
    """Reads one column of fixed dtype and shape (the only one or the selected one) as arrays of rows."""

    def __init__(self, dataset: Dataset, column: Column, target: str) -> None:
        super().__init__(dataset)
        self._column, self.column = column, target
        dtype, shape = _layout(column)
        assert dtype is not None
        self.dtype, self.shape = dtype, shape

    def rows(self) -> Iterator[tuple[npt.NDArray[Any], int]]:
        """Yield (rows, their size in the source) in order; a few megabytes of rows of shape (n, *shape)."""
        for _, shard, where, size in self._shards():
            if not len(shard):
                continue
            matrix = shard.fixed_rows(self._column.name)
            if matrix is None or matrix.shape[1:] != self.shape or matrix.dtype != self.dtype:
                raise ShardError(
                    where, f"column {self._column.name!r} is not {self._column.encoding} in all samples"
                )
            step = max(1, BLOCK_BYTES // max(1, matrix[0].nbytes))
            for start in range(0, len(matrix), step):
                rows = matrix[start : start + step]
                yield np.ascontiguousarray(rows), size * len(rows) // len(matrix)


class DatasetTokens(DatasetSource):
    """Reads a column of one-axis integer arrays, each of which is a document."""

    has_documents = True
    max_token: int | None = None

    def __init__(self, dataset: Dataset, column: Column, source_dtype: str | None = None) -> None:
        """Set `source_dtype` to the tokens' dtype if the encoding is `bytes`, which does not record it."""
        super().__init__(dataset)
        self._column, self._bytes_dtype = column, None if source_dtype is None else np.dtype(source_dtype)
        dtype = _layout(column)[0] if source_dtype is None else self._bytes_dtype
        self.dtype = np.dtype(np.int64) if dtype is None else dtype
        self._is_typed = dtype is not None
        self.left_out = [c.name for c in dataset.columns if c.name not in (column.name, KEY)]

    def blocks(self) -> Iterator[TokenBlock]:
        """Yield blocks in order: a few megabytes of samples of one length, or 1024 of varying length."""
        document = 0
        for _, shard, where, size in self._shards():
            fixed = None if self._bytes_dtype is not None else shard.fixed_rows(self._column.name)
            step = 1024 if fixed is None else max(1, BLOCK_BYTES // max(1, fixed[:1].nbytes))
            for start in range(0, len(shard), step):
                stop = min(start + step, len(shard))
                if fixed is not None and fixed.ndim == 2:
                    tokens = np.ascontiguousarray(fixed[start:stop]).reshape(-1)
                    ends = np.arange(1, stop - start + 1, dtype=np.int64) * fixed.shape[1]
                else:
                    tokens, ends = self._gather(shard, start, stop, where)
                read = size * (stop - start) // len(shard)
                yield TokenBlock(tokens, ends, where, document, 0, read, stop == len(shard))
                document += stop - start

    def _gather(
        self, shard: Any, start: int, stop: int, where: str
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        arrays = []
        for row in range(start, stop):
            value = self._value(shard, row, where)
            if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "ui":
                raise ShardError(
                    where, f"sample {row:,}: {self._column.name!r} is not a one-axis array of integers"
                )
            if not self._is_typed and value.dtype == np.uint64 and len(value) and value.max() >= 1 << 63:
                raise ShardError(where, f"sample {row:,}: {value.max():,} is too large for a token id")
            arrays.append(value.astype(self.dtype, copy=False))
        ends = np.cumsum([len(array) for array in arrays], dtype=np.int64)
        return np.concatenate(arrays) if arrays else np.zeros(0, self.dtype), ends

    def _value(self, shard: Any, row: int, where: str) -> object:
        value = shard.sample(row, (self._column.name,)).get(self._column.name)
        if not isinstance(value, bytes):
            return value
        if self._bytes_dtype is not None:
            if len(value) % self._bytes_dtype.itemsize:
                problem = f"has {len(value):,} bytes, not a whole number of {self._bytes_dtype.name} tokens"
                raise ShardError(where, f"sample {row:,}: {problem}")
            return np.frombuffer(value, self._bytes_dtype.newbyteorder("<"))
        try:  # a tar opened with decode=False returns the bytes of the .npy member
            return decode_npy(memoryview(value))
        except ValueError as error:
            raise ShardError(where, f"sample {row:,}: {self._column.name!r}: {error}") from error


class DatasetSamples(DatasetSource):
    """Reads samples with any columns, and converts their values as `mapped` defines."""

    def __init__(self, dataset: Dataset, mapped: Sequence[Mapped], *, has_keys: bool) -> None:
        """Set `has_keys` to convert the keys of tar samples too, if they are not just running numbers."""
        super().__init__(dataset)
        self._mapped = [column for column in mapped if column.source != KEY]
        self._key = next((column for column in mapped if column.source == KEY), None)
        self._has_keys = has_keys
        self.columns = {column.target: column.encoding for column in self._mapped}
        self.has_keys = has_keys or self._key is not None
        self.names = {column.target: column.source for column in self._mapped}

    def samples(self) -> Iterator[Sample]:
        """Yield samples in order; raises ShardError if a sample is damaged or lacks a column."""
        for _, shard, where, size in self._shards():
            for row in range(len(shard)):
                payloads, key = self._raw(shard, row)
                place = f"{where}: sample {row:,}" + (f" ({key[:200]!r})" if key else "")
                values: dict[str, bytes | memoryview] = {}
                for column in self._mapped:
                    data = payloads.get(column.source)
                    if data is None:
                        raise ShardError(
                            place,
                            f"has no {column.source!r}; choose columns that all samples have with --columns",
                        )
                    try:
                        values[column.target] = column.convert(memoryview(data))
                    except (ValueError, TypeError) as error:
                        raise ShardError(place, f"{column.source!r}: {error}") from error
                yield Sample(values, key, place, size // len(shard))

    def _raw(self, shard: Any, row: int) -> tuple[Mapping[str, bytes | memoryview], str | None]:
        if isinstance(shard, (MdsShard, ImageFilesShard)):
            found: Mapping[str, bytes | memoryview] = shard.payloads(row)
            return found, None if self._key is None else str(found[KEY], "utf-8")
        assert isinstance(shard, TarShard)
        sample = shard.sample(row)
        key = str(sample.pop(KEY))
        if not self._has_keys and not (key.isdecimal() and len(key) == KEY_DIGITS):
            problem = f"its key is {key[:200]!r}, but earlier keys are running numbers: reorder the tars"
            raise ShardError(self._dataset.location, f"sample {row:,} of a shard: {problem}")
        return sample, key if self._has_keys else None  # type: ignore[return-value]


def dataset_source(
    dataset: Dataset, target: Literal["mds", "wds"], columns: Sequence[str] | None, cut: CutOptions
) -> DatasetRows | DatasetTokens | DatasetSamples:
    """Return the source that reads a dataset: as tokens to be cut, as arrays of rows, or sample by sample.

    `columns` names the columns of the source to convert (None: all). Raises ShardError for columns that do
    not exist, or that the target format cannot hold.
    """
    chosen = _chosen(dataset, columns)
    if not len(dataset):
        raise ShardError(dataset.location, "has no samples: there is nothing to convert")
    is_mds = dataset.manifest.format in ("mds", "image_files")
    if cut.changes_rows or cut.dtype is not None or cut.source_dtype is not None:
        return _tokens(dataset, chosen, cut)
    if len(chosen) == 1 and _is_block(dataset, chosen[0], target):
        return DatasetRows(
            dataset, chosen[0], chosen[0].name.removesuffix(".npy") if not is_mds else chosen[0].name
        )
    try:
        if not is_mds:
            return _tar_samples(dataset, chosen, target)
        mapped = keep_columns(chosen) if target == "mds" else to_members(chosen, _noted_members(dataset))
    except ValueError as error:
        raise ShardError(dataset.location, str(error)) from error
    return DatasetSamples(dataset, mapped, has_keys=False)


def _tokens(dataset: Dataset, chosen: Sequence[Column], cut: CutOptions) -> DatasetTokens:
    """Return a source for the only token column, of kind ndarray, or of kind bytes with `source_dtype`."""
    kind = "ndarray" if cut.source_dtype is None else "bytes"
    tokens = [c for c in chosen if c.encoding.partition(":")[0] == kind]
    preferred = [c for c in tokens if c.name.removesuffix(".npy").removesuffix(".bin") in TOKEN_COLUMNS]
    if len(preferred or tokens) != 1:
        names = ", ".join(f"{c.name} ({c.encoding})" for c in chosen)
        advice = "name one with --columns; for a column of bytes, also give --source-dtype"
        raise ShardError(dataset.location, f"has no single {kind} column of tokens among {names}: {advice}")
    return DatasetTokens(dataset, (preferred or tokens)[0], cut.source_dtype)


def _tar_samples(dataset: Dataset, chosen: Sequence[Column], target: str) -> DatasetSamples:
    mapped = to_values(chosen, _noted(dataset)) if target == "mds" else unchanged(chosen)
    return DatasetSamples(dataset, mapped, has_keys=not _is_counted(dataset))


def _chosen(dataset: Dataset, columns: Sequence[str] | None) -> list[Column]:
    there = {column.name: column for column in dataset.columns}
    if columns is None:
        return list(there.values())
    chosen = []
    for name in columns:
        full = name if name in there else f"{name}.npy"
        if full not in there:
            raise ShardError(dataset.location, f"has no column {name!r}; its columns: {', '.join(there)}")
        chosen.append(there[full])
    return chosen


def _is_block(dataset: Dataset, column: Column, target: str) -> bool:
    """Return whether all shards hold the column as one array of rows that the target's row writer accepts."""
    if dataset.manifest.format == "mds" and any(c.size is None for c in dataset.columns):
        return False
    dtype, shape = _layout(column)
    name = column.name if dataset.manifest.format == "mds" else column.name.removesuffix(".npy")
    if dtype is None or column.size is None or not shape:
        return False
    if dataset.manifest.format == "tar" and not (_is_counted(dataset) and column.name.count(".") == 1):
        return False
    if any(column not in columns for columns in dataset.shard_columns()):
        return False
    takes_it = len(shape) == 1 and dtype.name in ("uint16", "uint32") and COLUMN_NAME.fullmatch(name)
    return target == "mds" or bool(takes_it)


def _is_counted(dataset: Dataset) -> bool:
    """Return whether the keys in tars are just the running numbers that shardkit's tar writer gives."""
    first = next((n for n, info in enumerate(dataset.manifest.shards) if info.samples), None)
    if first is None:
        return True
    shard = dataset.shard(first)
    assert isinstance(shard, TarShard)
    last = len(shard) - 1
    return shard.key(0) == f"{0:0{KEY_DIGITS}d}" and shard.key(last) == f"{last:0{KEY_DIGITS}d}"


def _noted(dataset: Dataset) -> Mapping[str, Mapping[str, str]]:
    """Return the valid {extension: {"column", "encoding"}} in the card of tars converted from MDS."""
    noted = None if dataset.card is None else dataset.card.data.get("columns")
    if not isinstance(noted, dict):
        return {}
    sound: dict[str, Mapping[str, str]] = {}
    for extension, note in noted.items():
        if isinstance(note, dict) and all(isinstance(note.get(k), str) for k in ("column", "encoding")):
            try:
                encoding_of(note["encoding"])
            except ValueError:
                continue
            sound[extension] = note
    return sound


def _noted_members(dataset: Dataset) -> Mapping[str, str]:
    """Return {column: extension} from the card of MDS converted from tars; {} if missing or invalid."""
    noted = None if dataset.card is None else dataset.card.data.get("members")
    if not isinstance(noted, dict) or not all(isinstance(name, str) for name in noted.values()):
        return {}
    return noted


def _layout(column: Column) -> tuple[np.dtype[Any] | None, tuple[int, ...]]:
    """Return dtype and shape in an encoding such as "ndarray:uint16:2048"; (None, ()) without a dtype."""
    parts = column.encoding.split(":")
    if parts[0] != "ndarray" or len(parts) < 2:
        return None, ()
    try:
        dtype = np.dtype(parts[1]).newbyteorder("<")
        return dtype, tuple(int(dim) for dim in parts[2].split(",")) if len(parts) > 2 and parts[2] else ()
    except (TypeError, ValueError):
        return None, ()
