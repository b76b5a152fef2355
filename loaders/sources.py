"""Reads planned samples: gathers them if all wanted columns have constant size, and decodes them otherwise.

`open_source` chooses once, when a loader is created. Streams whose rows have the same memory layout share one
reader (`gather.FixedRows`). `DecodedSamples` reads any column, sample by sample: numbers and arrays of
constant shape become one array, everything else (text, images, arrays of any length) a list with one entry
per sample. The encoding in the index determines which columns are stacked, so the type of a key is the same
in all batches. `MixedSource` joins the samples of streams that need different readers. Columns that cannot be
in one batch are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from shardkit.datasets.dataset import Dataset
from shardkit.errors import ShardError, ShardNotFoundError
from shardkit.formats.mds.encodings import constant_layout
from shardkit.formats.rows import IMAGE, RowShard, decode_together
from shardkit.loaders.config import TokenDtype
from shardkit.loaders.gather import FixedColumn, FixedRows, OutputMemory
from shardkit.loaders.streams import Columns, ReadRows, Streams
from shardkit.manifest import LOSS_MASK, Column

# Pairs (stored dtype, delivered dtype) that are allowed although large ids would overflow: ids are normally
# far below 2**31, and each batch is checked for larger ones.
_SAME_SIZE = {("uint32", "int32"), ("uint64", "int64")}

PLAN_BYTES = 1 << 30  # maximum stored size of the samples in one plan

_UNKNOWN_BYTES = 1 << 16  # assumed size of a sample if an index does not record the sizes of its tars

AHEAD_BYTES = 4 << 20  # stored size of samples of row files that are decoded together for later batches

PLANS_IN_CACHE = 16  # the cache has room for this many plans, so no plan evicts shards that are in use


class Source(Protocol):
    """Opens the shards of planned samples and returns functions that read these samples."""

    def open_rows(self, shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]) -> tuple[ReadRows, bool]:
        """Return a reader of the samples (shard[i], row[i]), and whether shards had to be fetched first.

        Shards are numbered as in `Streams.once`.
        """


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """A source with the names, types and sizes of the columns that it reads."""

    source: Source
    columns: tuple[str, ...]  # names of the columns in a batch
    token_key: str | None  # name of the token column in a batch; None if tokens are not delivered
    token_dtype: np.dtype[np.generic] | None  # type of tokens in batches; the source may read another type
    stored_bytes: int  # mean stored size of a sample
    delivered_bytes: int | None  # delivered size of a sample; None if it varies
    may_overflow: bool = False  # whether `token_dtype` holds only the lower half of the stored type's range
    plan_bytes: int = PLAN_BYTES  # maximum stored size of a plan's samples; its shards are open together


def open_source(
    streams: Streams,
    columns: Sequence[str] | None,
    dtype: TokenDtype,
    output: OutputMemory,
    *,
    mixed_lengths: bool = False,
    keep_stored: bool = False,
    changes: bool = False,
) -> SourceInfo:
    """Return the source of `columns` (None: all); tokens are converted to `dtype`.

    Raises ValueError for unknown names, and for streams whose columns cannot be in one batch. `output`:
    memory that gathered rows are written to. `keep_stored`: if all streams store tokens in one type, the
    source reads that type, because the receiver searches the tokens before it converts them. `changes`: the
    receiver changes samples, so their delivered size is not known.
    """
    once = streams.once
    each = [_open_one(dataset, columns, dtype) for dataset in once.datasets]
    first = each[0]
    for number, other in enumerate(each[1:], 1):
        _check_alike(once, number, first, other, mixed_lengths)
    keep_stored &= len({dataset.token_dtype for dataset in once.datasets}) == 1
    return SourceInfo(
        source=_one_source(once, [part.as_stored() for part in each] if keep_stored else each, output),
        columns=first.names,
        token_key=first.token_key,
        token_dtype=None if first.token_key is None else first.delivered.get(first.token_key),
        stored_bytes=sum(part.stored_bytes for part in each) // len(each),
        delivered_bytes=first.delivered_bytes
        if not changes and all(part.delivered_bytes == first.delivered_bytes for part in each)
        else None,
        may_overflow=any(part.may_overflow for part in each),
        plan_bytes=min(part.plan_bytes for part in each),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """The columns to read from one stream, and their types."""

    dataset: Dataset
    names: tuple[str, ...]  # names of the columns
    token_key: str | None
    delivered: dict[str, np.dtype[np.generic]]  # dtypes in batches, by name, of columns that are converted
    fixed: dict[str, FixedColumn] | None  # all columns, by name; None unless all have constant size
    stored_bytes: int
    plan_bytes: int

    @property
    def delivered_bytes(self) -> int | None:
        if self.fixed is None:
            return None
        return sum(prod(column.shape) * column.delivered.itemsize for column in self.fixed.values())

    @property
    def may_overflow(self) -> bool:
        if self.token_key is None or self.dataset.token_dtype is None:
            return False
        wanted = self.delivered.get(self.token_key)
        return wanted is not None and not np.can_cast(self.dataset.token_dtype, wanted)

    def as_stored(self) -> _Part:
        """Return a copy that does not convert tokens."""
        if self.token_key is None or self.dataset.token_dtype is None:
            return self
        native = self.dataset.token_dtype.newbyteorder("=")
        fixed = self.fixed
        if fixed is not None:
            fixed = fixed | {self.token_key: replace(fixed[self.token_key], delivered=native)}
        return replace(self, delivered={self.token_key: native}, fixed=fixed)


def _open_one(dataset: Dataset, columns: Sequence[str] | None, dtype: TokenDtype) -> _Part:
    token_column = _token_column(dataset)
    if dataset.manifest.format == "text":
        columns = None  # they name what the rows are made from
    names = _wanted_names(dataset, columns)
    token_key = token_column if token_column in names else None
    delivered: dict[str, np.dtype[np.generic]] = {}
    if token_key is not None and dataset.token_dtype is not None:
        delivered[token_key] = output_dtype(dtype, dataset.token_dtype)
    plan_bytes = PLAN_BYTES
    if dataset.shards is not None:
        plan_bytes = min(plan_bytes, dataset.shards.cache.capacity // PLANS_IN_CACHE)
    fixed = _fixed_columns(dataset, names, delivered)
    if fixed is None:
        sizes = dataset.manifest.raw_bytes
        mean = int(sizes.sum()) // max(1, len(dataset))
        stored_bytes = _UNKNOWN_BYTES if (sizes < 0).any() else max(1, mean)
    else:
        stored_bytes = sum(prod(column.shape) * column.stored.itemsize for column in fixed.values())
    return _Part(dataset, names, token_key, delivered, fixed, stored_bytes, plan_bytes)


def _one_source(streams: Streams, parts: list[_Part], output: OutputMemory) -> Source:
    """Return one reader for all streams if their rows have the same layout, else a `MixedSource`."""
    layouts = [
        None if part.fixed is None else {k: (c.shape, c.stored, c.delivered) for k, c in part.fixed.items()}
        for part in parts
    ]
    if layouts[0] is not None and all(layout == layouts[0] for layout in layouts):
        assert parts[0].fixed is not None
        return FixedRows(streams, parts[0].fixed, output)
    if len(parts) == 1:
        return DecodedSamples(streams, parts[0].names, parts[0].delivered)
    alone = [
        Streams([part.dataset], [name], readers=[reader], run=streams.run)
        for part, name, reader in zip(parts, streams.names, streams.readers, strict=True)
    ]
    return MixedSource(
        streams, [_one_source(own, [part], output) for own, part in zip(alone, parts, strict=True)]
    )


def _check_alike(streams: Streams, number: int, first: _Part, other: _Part, mixed_lengths: bool) -> None:
    """Raise ValueError unless samples of both streams can be in one batch.

    With `mixed_lengths`, shapes may differ.
    """
    names = f"streams {streams.names[0]!r} and {streams.names[number]!r}"
    if {*first.names} != {*other.names}:
        raise ValueError(
            f"{names} have different columns, {', '.join(first.names)} and {', '.join(other.names)}: "
            "select common columns with columns=[...]"
        )
    if first.token_key != other.token_key:
        raise ValueError(f"{names} have their tokens in different columns: select one with columns=[...]")
    if first.delivered != other.delivered:
        raise ValueError(f"{names} store tokens in different types: give dtype='int64'")
    for name in first.names:
        mine, its = _layout(first.dataset, name), _layout(other.dataset, name)
        if (mine is None) != (its is None) or (mine is not None and its is not None and mine[0] != its[0]):
            if name in first.delivered:
                continue
            raise ValueError(
                f"{names} have different types in column {name!r}: leave it out with columns=[...]"
            )
        if mine is not None and its is not None and mine[1] != its[1] and not mixed_lengths:
            raise ValueError(
                f"{names} have different shapes in column {name!r}, {list(mine[1])} and {list(its[1])}: "
                "build them with one shape, or give Order(mixed_lengths=True, schedule=…) that switches "
                "between them"
            )


def _columns(dataset: Dataset) -> Sequence[Column]:
    """Return the columns with their encodings in samples: "bytes" if the dataset does not decode values."""
    return [Column(c.name, "bytes") for c in dataset.columns] if dataset.gives_bytes else dataset.columns


def _token_column(dataset: Dataset) -> str | None:
    return None if dataset.gives_bytes else dataset.token_column


def _layout(dataset: Dataset, name: str) -> tuple[np.dtype[np.generic], tuple[int, ...]] | None:
    column = next((column for column in _columns(dataset) if column.name == name), None)
    return None if column is None else constant_layout(column.encoding)


def _wanted_names(dataset: Dataset, columns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the distinct names in `columns` (None: all); raise ValueError for an unknown name."""
    known = [column.name for column in _columns(dataset)]
    is_tar = dataset.manifest.format == "tar"
    if columns is None:
        # In tars of other tools `__key__` names the sample; in packed rows it only repeats the row number.
        token_column = _token_column(dataset)
        is_rows = token_column is not None and {*known} <= {token_column, LOSS_MASK}
        return tuple(known if not is_tar or is_rows else ["__key__", *known])
    chosen = tuple(dict.fromkeys(map(dataset.column_name, columns)))
    unknown = [name for name in chosen if name not in known and not (is_tar and name == "__key__")]
    if unknown:
        raise ValueError(f"{dataset.location} has no column {unknown[0]!r}; it has {', '.join(known)}")
    return chosen


def _fixed_columns(
    dataset: Dataset, names: Sequence[str], delivered: dict[str, np.dtype[np.generic]]
) -> dict[str, FixedColumn] | None:
    """Return the named columns as `FixedColumn`s; None if a column varies in size."""
    by_name = {column.name: column for column in _columns(dataset)}
    fixed = {}
    for name in names:
        column = by_name.get(name)
        layout = None if column is None or column.size is None else constant_layout(column.encoding)
        if column is None or layout is None:
            return None
        dtype, shape = layout
        fixed[name] = FixedColumn(name, shape, dtype, delivered.get(name, dtype.newbyteorder("=")))
    return fixed if _has_stride(dataset, [by_name[name] for name in names]) else None


def _has_stride(dataset: Dataset, wanted: list[Column]) -> bool:
    """Return whether in every shard consecutive rows of these columns are a constant distance apart."""
    for columns in dataset.shard_columns():
        if not set(wanted) <= set(columns):
            return False
        # In MDS, a column of varying size shifts all others. Tar indexes give sizes only of strided columns.
        if dataset.manifest.format == "mds" and any(column.size is None for column in columns):
            return False
    return True


def output_dtype(requested: TokenDtype, stored: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """Return the NumPy dtype of delivered tokens; None and "stored" keep the stored dtype.

    Raises ValueError if token ids would not fit, because ids that wrap around silently ruin a run.
    """
    native = stored.newbyteorder("=")
    if requested is None or (isinstance(requested, str) and requested == "stored"):
        return native
    # torch's types are called torch.int64 and the like; NumPy knows them by the same names.
    name = str(requested).removeprefix("torch.") if "torch" in str(requested) else requested
    try:
        wanted: np.dtype[np.generic] = np.dtype(cast(Any, name))
    except TypeError:
        raise ValueError(f"dtype must be an integer type of torch or NumPy, not {requested!r}") from None
    if wanted.kind not in "iu":
        raise ValueError(f"dtype must be an integer type, not {requested}, because tokens are ids")
    if not np.can_cast(native, wanted) and (native.name, wanted.name) not in _SAME_SIZE:
        raise ValueError(f"dtype {requested} cannot hold tokens stored as {native}; use int64")
    return wanted


class _ReadAhead:
    """Reads the columns of samples for several batches at once, which costs less for each shard.

    The first batch is read alone, and each time as many samples more as were read before.
    """

    def __init__(self, read: Callable[[int, int], Columns | None], count: int, most: int) -> None:
        """`read` reads samples from one number to another (exclusive) of `count`; up to `most` at once."""
        self._read, self._count, self._most = read, count, most
        self._size = 0
        self._block: tuple[int, int, Columns] = (0, 0, {})

    def read(self, low: int, high: int) -> Columns | None:
        """Return the columns of samples `low` to `high`; None if a value cannot be read."""
        first, stop, columns = self._block
        if not first <= low < high <= stop:
            size = max(high - low, min(2 * self._size, self._most))
            first, stop = low, min(low + size, self._count)
            found = self._read(first, stop)
            if found is None:  # perhaps because of a sample of a later batch
                return None if stop == high else self._read(low, high)
            columns, self._size = found, size
            self._block = first, stop, columns
        if (first, stop) == (low, high):
            return columns
        # Copies, so that a batch that is kept does not keep the others.
        return {name: values[low - first : high - first].copy() for name, values in columns.items()}


class DecodedSamples:
    """Reads the wanted columns of any dataset by decoding sample by sample."""

    def __init__(
        self, streams: Streams, names: Sequence[str], delivered: Mapping[str, np.dtype[np.generic]]
    ) -> None:
        """`streams`: one stream; `names`: columns to read; `delivered`: types of columns to convert."""
        (dataset,) = streams.datasets
        self._streams = streams
        self._names = tuple(names)
        self._wanted = frozenset(names)
        self._delivered = dict(delivered)
        by_name = {column.name: column for column in _columns(dataset)}
        layouts = {name: constant_layout(by_name[name].encoding) for name in names if name in by_name}
        self._stacked = {name: layout[0] for name, layout in layouts.items() if layout is not None}
        self._has_columns = dataset.manifest.format == "row_files"
        mean = max(1, int(dataset.manifest.raw_bytes.clip(0).sum()) // max(1, len(dataset)))
        has_images = any(column.encoding == IMAGE for column in by_name.values())
        self._most_ahead = 0 if has_images else AHEAD_BYTES // mean

    def open_rows(self, shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]) -> tuple[ReadRows, bool]:
        """Open the shards of rows to decode: see `Source.open_rows`."""
        is_late = bool(self._streams.use(0, np.unique(shard).tolist()))
        self._streams.run.fetch_ahead()  # now, because decoding needs whole shards from the first sample on

        ahead = _ReadAhead(partial(self._by_column, shard, row), len(shard), self._most_ahead)

        def read(low: int, high: int) -> Columns:
            if self._has_columns and low < high and (columns := ahead.read(low, high)) is not None:
                return columns
            places = list(zip(shard[low:high].tolist(), row[low:high].tolist(), strict=True))
            # Shard by shard, so that a decompressed shard is not closed and opened again within a batch.
            by_shard = np.argsort(shard[low:high], kind="stable").tolist()
            found = {i: self._sample(*places[i]) for i in by_shard}
            samples = [found[i] for i in range(len(places))]
            return {name: self._column(name, samples, places) for name in self._names}

        return read, is_late

    def _by_column(
        self, shards: npt.NDArray[np.int32], rows: npt.NDArray[np.int64], low: int, high: int
    ) -> Columns | None:
        """Read samples low to high by column, from shards with columns; None if a value cannot be read."""
        shard, row = shards[low:high], rows[low:high]
        order = np.argsort(shard, kind="stable")
        numbers, firsts = np.unique(shard[order], return_index=True)
        groups = list(zip(numbers.tolist(), np.split(order, firsts[1:]), strict=True))
        opened = [(cast(RowShard, self._streams.shard(number)), where) for number, where in groups]
        try:
            decode_together([part for part, _ in opened], self._names)
            return {
                name: self._joined([(where, part.values(name, row[where])) for part, where in opened], name)
                for name in self._names
            }
        except (ShardError, ValueError):
            return None  # reading sample by sample raises an error that names the row

    def _joined(
        self, parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.generic] | list[object]]], name: str
    ) -> npt.NDArray[np.generic] | list[object]:
        if name not in self._stacked:
            return _joined(parts) if parts else []
        dtype = self._delivered.get(name, self._stacked[name])
        return np.asarray(_joined([(where, np.asarray(values)) for where, values in parts])).astype(dtype)

    def _sample(self, shard: int, row: int) -> dict[str, object]:
        """Return a sample. If it cannot be read, raise ShardError, which says how to exclude its row."""
        opened = self._streams.shard(shard)
        try:
            return opened.sample(row, self._wanted)
        except ShardNotFoundError:
            raise
        except ShardError as error:
            problem = f"{error.problem}; {self._streams.exclusion_advice(shard, row)}"
            raise ShardError(error.file, problem, offset=error.offset) from error

    def _column(
        self, name: str, samples: list[dict[str, object]], places: list[tuple[int, int]]
    ) -> npt.NDArray[np.generic] | list[object]:
        for sample, place in zip(samples, places, strict=True):
            if name not in sample:
                problem = f"has no column {name!r}; select columns that all samples have with columns=[...]"
                raise self._error(place, problem)
        values = [sample[name] for sample in samples]
        if name not in self._stacked:
            return values
        dtype = self._delivered.get(name, self._stacked[name])
        arrays = [np.asarray(value) for value in values]
        for array, place in zip(arrays, places, strict=True):
            if array.shape != arrays[0].shape:
                found = f"has shape {array.shape} in column {name!r}, but others have {arrays[0].shape}"
                raise self._error(place, found)
        return np.stack(arrays).astype(dtype) if arrays else np.empty(0, dtype)

    def _error(self, place: tuple[int, int], problem: str) -> ShardError:
        problem = f"sample {place[1]} {problem}; {self._streams.exclusion_advice(*place)}"
        return ShardError(self._streams.where(place[0]), problem)


class MixedShapesError(ValueError):
    """A batch would hold sequences of different lengths."""


class MixedSource:
    """Reads streams with the same column names that need different readers."""

    def __init__(self, streams: Streams, sources: Sequence[Source]) -> None:
        self._streams = streams
        self._sources = list(sources)

    def open_rows(self, shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]) -> tuple[ReadRows, bool]:
        """Open rows of several streams: see `Source.open_rows`."""
        by_shard = np.argsort(shard, kind="stable")
        parts: list[tuple[npt.NDArray[np.int64], ReadRows]] = []
        is_late = False
        for stream, piece, numbers in self._streams.split(shard[by_shard]):
            where = np.sort(by_shard[piece])  # indices of the stream's samples, in the order of the plan
            if len(where):
                own = shard[where] - np.int32(self._streams.first_shard(stream))
                assert len(own) == len(numbers)
                read, waits = self._sources[stream].open_rows(own, row[where])
                parts.append((where, read))
                is_late |= waits
        return partial(_read, parts), is_late


def _read(parts: list[tuple[npt.NDArray[np.int64], ReadRows]], low: int, high: int) -> Columns:
    found = []
    for where, read in parts:
        first, last = np.searchsorted(where, (low, high)).tolist()
        if first < last:
            found.append((where[first:last] - low, read(first, last)))
    if len(found) == 1:
        return found[0][1]
    if not found:
        return parts[0][1](0, 0) if parts else {}
    return {name: _joined([(where, columns[name]) for where, columns in found]) for name in found[0][1]}


def _joined(
    parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.generic] | list[object]]],
) -> npt.NDArray[np.generic] | list[object]:
    count = sum(len(where) for where, _ in parts)
    first = parts[0][1]
    if isinstance(first, list):
        values: list[object] = [None] * count
        for where, part in parts:
            for place, value in zip(where.tolist(), part, strict=True):
                values[place] = value
        return values
    shapes = {part.shape[1:] for _, part in parts if isinstance(part, np.ndarray)}
    if len(shapes) > 1:
        found = " and ".join(map(str, sorted(shapes)))
        raise MixedShapesError(
            f"a batch would hold samples of different shapes, {found}: with mixed_lengths=True, the schedule "
            "must switch between streams at a position that is a multiple of the global batch"
        )
    whole = np.empty((count, *shapes.pop()), dtype=first.dtype)
    for where, part in parts:
        whole[where] = part
    return whole
