"""Access the shards of a dataset through `OpenDataset`, for loaders, row costs, provenance and `Dataset`.

A shard is opened when one of its samples is requested. The most recently used shards stay open, within limits
of their number and of the bytes decompressed into memory. Open shards hold no file descriptors, but systems
also limit the maps of a process (usually 65,530): if a process has `MAX_MAPS` open, all its datasets drop
their open shards. Dropped shards are not closed: a thread that still reads one, or a view on it, keeps it
alive. Opening a dropped shard again takes some tens of microseconds. An `OpenDataset` may be shared by
threads and pickled for processes.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Bytes
from shardkit.card import DatasetCard
from shardkit.datasets.image_files import ImageFiles, ImageFilesShard
from shardkit.datasets.locate import LocalFiles
from shardkit.datasets.range_store import RangeRows, RangeStore
from shardkit.datasets.row_files import FileRows
from shardkit.errors import ShardError
from shardkit.files import Closing, open_maps
from shardkit.formats.stored import load_raw
from shardkit.formats.text import TEXT_FORMATS, TextShard
from shardkit.formats.trainers import TRAINER_FORMATS
from shardkit.manifest import (
    LOSS_MASK,
    TOKENS,
    Column,
    Manifest,
    ShardInfo,
    ShardTable,
    merge_columns,
    token_layout,
)
from shardkit.order.arrangement import StreamSizes
from shardkit.order.exclusions import Exclusions
from shardkit.storage.local import LocalStore
from shardkit.storage.store import Store

if TYPE_CHECKING:
    from shardkit.cache.indexes import TarIndexes
    from shardkit.cache.shards import CachedShards, CacheReader
    from shardkit.formats.rows import RowShard
    from shardkit.formats.tar import TarShard
    from shardkit.order.balance import RowCosts


MAX_OPEN_SHARDS = 1024  # limit per dataset
MAX_MAPS = 16384  # limit per process: a quarter of Linux's default; leaves maps for other libraries
MAX_RESIDENT_BYTES = 2 << 30  # limit of decompressed shards per dataset; the last one used always stays

IN_PLACE = ("tokens", "row_files", "image_files")
"""Formats whose shards are ranges of files that others wrote."""

# Datasets with open shards, by id(). Threads and the garbage collector change it, only by atomic operations.
_keeping: dict[int, weakref.ref[OpenDataset]] = {}


class ShardReader(Protocol):
    """The interface of an open shard of any format."""

    info: ShardInfo

    def __len__(self) -> int: ...
    def sample(self, row: int, columns: Container[str] | None = None) -> dict[str, object]: ...
    def fixed_rows(self, column: str) -> npt.NDArray[np.generic] | None: ...
    @property
    def columns(self) -> tuple[Column, ...]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """Options for opening shards; see `open_dataset`."""

    allow_pickle: bool = False
    verify: bool = False
    decode: bool | str = True
    columns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.columns is not None and (isinstance(self.columns, str) or not self.columns):
            raise ValueError(f"columns must be a list of at least one name, not {self.columns!r}")


class OpenDataset(Closing):
    """A dataset whose shards are opened on demand, when their samples are read."""

    def __init__(
        self,
        files: LocalFiles | None,
        manifest: Manifest,
        *,
        card: DatasetCard | None = None,
        options: ReadOptions | None = None,
        shards: CachedShards | None = None,
        tar_indexes: TarIndexes | None = None,
        rows: RangeRows | None = None,
    ) -> None:
        """Pass `files` for a local dataset, `shards` for a remote one.

        Pass `tar_indexes` for scanned tars, `rows` for rows and images that are read in place.
        """
        assert (files is None) != (shards is None)
        self.manifest = manifest
        self.card = card
        self.shards = shards
        self.row_costs: dict[str, RowCosts] = {}
        """Row cost tables that loaders have opened, by file name; pickled with the dataset for workers."""
        self._files = files
        self._tar_indexes = tar_indexes
        self.in_place = rows
        """The files that hold the rows, if these are read in place."""
        self._rows = rows if isinstance(rows, FileRows) else None
        self._images = rows if isinstance(rows, ImageFiles) else None
        self._options = options or ReadOptions()
        self._lock = Lock()
        self._open: OrderedDict[int, ShardReader] = OrderedDict()

    @property
    def path(self) -> Path:
        """The absolute path of the local folder. Raises ShardError for a remote dataset."""
        if self._files is None:
            raise ShardError(self.location, "is remote: it has no local path")
        return self._files.folder

    @property
    def location(self) -> str:
        """The path or URL of the dataset's folder, for messages."""
        return str(self.path) if self.shards is None else self.shards.store.url

    @property
    def store(self) -> Store:
        """The store that holds the dataset's files, shards included."""
        if self.shards is not None:
            return self.shards.store
        store = LocalStore(self.path)
        return RangeStore(store) if self.manifest.format in IN_PLACE else store

    def where(self, number: int) -> str:
        """Return the path or URL of shard `number`, for messages."""
        return f"{self.location}/{self.manifest.shards[number].stored.basename}"

    def name_of(self, number: int) -> str:
        """Return the name of shard `number` for reports: its file, with the rows of it if they are some."""
        if self.in_place is not None:
            return self.in_place.name_of(number)
        return self.manifest.shards[number].stored.basename

    def place_of(self, number: int, row: int) -> tuple[str, int]:
        """Return (name of a file, number of a row in it) of a row of shard `number`, for reports."""
        return (self.name_of(number), row) if self.in_place is None else self.in_place.place_of(number, row)

    @property
    def fingerprint(self) -> str:
        """A digest that identifies the shards and their order; see `Manifest.fingerprint`."""
        return self.manifest.fingerprint

    def stream_sizes(
        self, name: str, excluded: Exclusions | None = None, limit: int | None = None
    ) -> StreamSizes:
        """Return the sizes of this dataset from which the sample order of a stream is computed."""
        manifest = self.manifest
        return StreamSizes(
            name,
            self.fingerprint,
            manifest.shard_samples,
            int(manifest.raw_bytes.clip(0).sum()),
            self._rows is not None or self._is_compressed,
            excluded,
            limit,
            self._held_bytes,
            self.card is not None and self.card.is_shuffled,
        )

    @property
    def _held_bytes(self) -> int:
        """The memory that all shards take if the default window shall keep it small, or 0.

        Rows that are made from texts, and those of a build in the same order, get the same window.
        """
        if self._rows is not None:
            return self._rows.decoded_bytes
        is_in_order = self.card is not None and self.card.data.get("shuffled") is False
        if (self.manifest.format == "text" or is_in_order) and self._token_layout is not None:
            dtype, length = self._token_layout
            return len(self) * length * dtype.itemsize
        return 0

    @property
    def _is_compressed(self) -> bool:
        # Rows that are made from texts are cached as they are read, as if they had been built.
        return self.manifest.format != "text" and any(kind.compression for kind in self.manifest.kinds)

    def __len__(self) -> int:
        return self.manifest.samples

    def row(self, number: int, columns: Container[str] | None = None) -> dict[str, object]:
        """Return sample `number`, counted from 0, decoding only `columns` if they are given."""
        starts = self.manifest.shard_starts
        shard = int(np.searchsorted(starts, number, side="right")) - 1
        return self.shard(shard).sample(number - int(starts[shard]), columns or self.selected)

    def __iter__(self) -> Iterator[dict[str, object]]:
        for number in range(len(self.manifest.shards)):
            shard = self.shard(number)
            for row in range(len(shard)):
                yield shard.sample(row, self.selected)

    def shard(self, number: int, reader: CacheReader | None = None) -> ShardReader:
        """Return shard `number`, opened if necessary; `reader` loads it if it is remote. Thread-safe."""
        with self._lock:
            shard = self._open.get(number)
            if shard is not None:
                self._open.move_to_end(number)
                return shard
        # Open outside the lock, so that threads can open different shards in parallel; one may open twice.
        names = self._names
        opened = self._open_shard(number, reader)
        if names:
            cast("TarShard", opened).names = names
        with self._lock:
            shard = self._open.setdefault(number, opened)
            self._open.move_to_end(number)
            self._forget_oldest()
            _keeping[id(self)] = weakref.ref(self, partial(_forget_dataset, id(self)))
        if open_maps() > MAX_MAPS:
            _forget_all()
        return shard

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the first shard with samples, or (); for tars, merged with the columns in the list.

        MDS shards are assumed to have equal columns; only `token_column` is checked for all shards.
        """
        filled = np.flatnonzero(self.manifest.shard_samples).tolist()
        first = self.columns_of(filled[0]) if filled else ()
        if self.manifest.format != "tar":
            return first
        stated = (number for number in filled if self.manifest.shards[number].columns)
        return merge_columns([first, *map(self.columns_of, stated)])

    @property
    def selected(self) -> Sequence[str] | None:
        """The columns with which the dataset was opened, which rows have by default; None: all."""
        return self._options.columns

    @property
    def verifies(self) -> bool:
        """Whether the dataset was opened with `verify`."""
        return self._options.verify

    @property
    def decode(self) -> bool | str:
        """The option `decode` with which the dataset was opened."""
        return self._options.decode

    @property
    def gives_bytes(self) -> bool:
        """Whether all values are bytes, which is so for tars opened with `decode=False`."""
        return self.manifest.format == "tar" and self._options.decode is False

    @cached_property
    def token_column(self) -> str | None:
        """Name of the column that holds a row of integers, of constant length, in every sample, or None.

        It is "tokens" (members `tokens.npy` in tars, "input_ids" in row files) if that is such a column,
        otherwise the only such column. Tars for which the list records no columns are opened to find it,
        each once.
        """
        candidates = {c.name: c for c in self.columns if token_layout(c) is not None}
        names = [TOKENS, f"{TOKENS}.npy"] if self._rows is None else [TOKENS, "input_ids"]
        preferred = [candidates[name] for name in names if name in candidates]
        column = next(iter(preferred or candidates.values()), None)
        if column is None or (not preferred and len(candidates) > 1):
            return None
        return column.name if all(column in columns for columns in self.shard_columns()) else None

    @property
    def loss_mask_column(self) -> str | None:
        """Name of the loss mask column, with 1 for tokens to train on and 0 for others, or None.

        It is "loss_mask" (members `loss_mask.npy` in tars).
        """
        names = (LOSS_MASK, f"{LOSS_MASK}.npy") if self.manifest.format == "tar" else (LOSS_MASK,)
        return next((column.name for column in self.columns if column.name in names), None)

    def column_name(self, name: str) -> str:
        """Return the name of a column; `name` may be its members' extension, which causes a warning."""
        if (known := self._names.get(name)) is None:
            return name
        from shardkit.formats.tar import tell_name

        tell_name(name, known)
        return known

    def shard_columns(self) -> Iterator[tuple[Column, ...]]:
        """Yield the columns of the shards that have samples, each distinct tuple of columns once.

        Tars for which the list records no columns are opened to find them, each once.
        """
        seen: set[tuple[Column, ...]] = set()
        if isinstance(self.manifest.shards, ShardTable):
            found: Iterable[tuple[Column, ...]] = (kind.columns for kind in self.manifest.kinds)
        else:
            found = map(self.columns_of, np.flatnonzero(self.manifest.shard_samples).tolist())
        for columns in found:
            if columns not in seen:
                seen.add(columns)
                yield columns

    @property
    def sequence_length(self) -> int | None:
        """Number of tokens per row of `token_column`; None if there is none."""
        layout = self._token_layout
        return None if layout is None else layout[1]

    @property
    def token_dtype(self) -> np.dtype[np.generic] | None:
        """Stored dtype of `token_column`; None if there is none."""
        layout = self._token_layout
        return None if layout is None else layout[0]

    def keep_only(self, numbers: Set[int]) -> None:
        """Drop the open shards that are not among `numbers`, so that those evicted from the cache free space.

        If the cache has room for all data read through it, shards stay open until other datasets evict them.
        """
        with self._lock:
            unused = self._open.keys() - numbers
            for number in unused if self.shards is None else unused - self.shards.still_open(unused):
                del self._open[number]

    def close(self) -> None:
        """Drop the open shards and stop fetching; the dataset stays usable and opens shards again on demand.

        Memory maps are released, unless a view still uses them.
        """
        self._forget()
        if self.shards is not None:
            self.shards.close()

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_open")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock, self._open = Lock(), OrderedDict()

    @cached_property
    def _token_layout(self) -> tuple[np.dtype[np.generic], int] | None:
        column = next((c for c in self.columns if c.name == self.token_column), None)
        return None if column is None else token_layout(column)

    @cached_property
    def _names(self) -> dict[str, str]:
        """Maps the extension of a tar column to its name if they differ; the same for all shards.

        Determined from the columns in the list of tars, or if it has none, from the first shard. Members that
        are not decoded are files and keep their extensions.
        """
        filled = np.flatnonzero(self.manifest.shard_samples).tolist()
        if self.manifest.format != "tar" or self.gives_bytes or not filled:
            return {}
        from shardkit.formats.tar import column_names

        stated = [self.manifest.shards[number].columns for number in filled]
        if not stated[0]:
            first = self._open_shard(filled[0], None)
            stated[0] = cast("TarShard", first).member_columns
        return column_names(merge_columns(stated))

    def columns_of(self, number: int) -> tuple[Column, ...]:
        """Return the columns of shard `number`; if the index does not record them, the shard is opened."""
        stated = self.manifest.shards[number].columns
        if not stated:
            return self.shard(number).columns
        if not self._names:
            return stated
        from shardkit.formats.tar import renamed

        return renamed(stated, self._names)

    def _open_shard(self, number: int, reader: CacheReader | None) -> ShardReader:
        if self._files is None:
            assert self.shards is not None
            return self._shard_from(number, (reader or self.shards).load(number))
        try:
            shard = self._local_shard(number, self._files)
        except ShardError:
            self._files.check(number)  # raises a clearer error if the shard was replaced
            raise
        self._files.check(number)
        return shard

    def _local_shard(self, number: int, files: LocalFiles) -> ShardReader:
        info, options = self.manifest.shards[number], self._options
        if self._rows is not None:
            from shardkit.formats.tokens import map_piece, pieces_of

            assert files.dates is not None
            pieces = pieces_of(info.raw.basename)
            return self._row_shard(
                number, [(piece.start, map_piece(files.folder, piece, files.dates)) for piece in pieces]
            )
        if self._images is not None:
            return self._image_files(number)
        if files.dates is not None:
            from shardkit.formats import tokens

            return tokens.open_shard(files.folder, info, files.dates)
        verify = options.verify and not files.was_opened(number)
        if self.manifest.format == "mds":
            from shardkit.formats import mds

            return mds.open_shard(
                files.folder,
                info,
                allow_pickle=options.allow_pickle,
                verify=verify,
                decode=options.decode,
            )
        return self._shard_from(number, load_raw(self.manifest.format, files.folder, info, verify=verify))

    def _shard_from(self, number: int, raw: Bytes) -> ShardReader:
        info, options, where = self.manifest.shards[number], self._options, self.where(number)
        if self._rows is not None:
            from shardkit.formats.rows import split_pieces
            from shardkit.formats.tokens import pieces_of

            return self._row_shard(number, split_pieces(pieces_of(info.raw.basename), raw))
        if self._images is not None:
            return self._image_files(number, raw)
        if self.manifest.format == "mds":
            from shardkit.formats import mds

            return mds.shard_from_raw(
                where, info, raw, allow_pickle=options.allow_pickle, decode=options.decode
            )
        if self.manifest.format in ("tokens", "text"):
            from shardkit.formats.tokens import TokenShard

            return TokenShard(where, info, raw)
        if self.manifest.format in TEXT_FORMATS:
            return TextShard(info, raw, self.manifest.format, file=where)
        if self.manifest.format in TRAINER_FORMATS:
            from shardkit.formats.tokens import TokenStream

            return TokenStream(where, info, raw, self.manifest.format)
        from shardkit.formats import tar

        index = None if self._tar_indexes is None else self._tar_indexes.index(number)
        return tar.shard_from_raw(
            where, info, raw, allow_pickle=options.allow_pickle, decode=options.decode, index=index
        )

    def _row_shard(self, number: int, pieces: Sequence[tuple[int, Bytes]]) -> RowShard:
        from shardkit.formats.rows import RowShard

        assert self._rows is not None
        part, info = self._rows.parts[number], self.manifest.shards[number]
        return RowShard(f"{self.location}/{part.file}", info, part, pieces, decode=self._options.decode)

    def _image_files(self, number: int, raw: Bytes | None = None) -> ImageFilesShard:
        """Return a shard of image files, whose bytes are `raw`, or else those of local files."""
        from shardkit.formats.rows import split_pieces
        from shardkit.formats.tokens import map_piece, pieces_of

        assert self._images is not None
        info = self.manifest.shards[number]
        pieces = pieces_of(info.raw.basename)
        files, parts = self._files, [] if raw is None else split_pieces(pieces, raw)

        def read(row: int) -> Bytes:
            if raw is not None:
                return parts[row][1]
            assert files is not None
            assert files.dates is not None
            return map_piece(files.folder, pieces[row], files.dates)

        values, decode = self._images.values_of(number), self._options.decode
        return ImageFilesShard(self.location, info, pieces, read, values, decode=decode)

    def _forget(self) -> None:
        with self._lock:
            self._open.clear()
            _keeping.pop(id(self), None)

    def _forget_oldest(self) -> None:
        """Drop least recently used shards until the limits are kept; the caller holds the lock."""
        while len(self._open) > 1:
            resident = 0
            if self._rows is not None:
                resident = sum(cast("RowShard", shard).resident_bytes for shard in self._open.values())
            elif self.shards is None:  # the cache of a remote dataset has its own limit
                resident = sum(s.info.raw.bytes for s in self._open.values() if s.info.compression)
            if len(self._open) <= MAX_OPEN_SHARDS and resident <= MAX_RESIDENT_BYTES:
                return
            self._open.popitem(last=False)


def _forget_all() -> None:
    """Drop the open shards of all datasets in the process."""
    for reference in list(_keeping.values()):
        dataset = reference()
        if dataset is not None:
            dataset._forget()


def _forget_dataset(key: int, died: weakref.ref[OpenDataset]) -> None:
    _keeping.pop(key, None)
