"""The shards of an open dataset: what loaders, tables beside it and `Dataset` itself read it through.

Shards open when a sample of theirs is asked for, and the most recently used stay open, bounded in number and
in bytes decompressed into memory. Open shards hold no file descriptors, but systems limit the maps of a
process, too (usually 65,530): where a process has `MAX_MAPS` open, all its datasets forget the shards that
they keep. Shards that fall out are forgotten, not closed: a thread that still reads one, or a view that still
shows it, keeps it alive. To open a forgotten one again costs some tens of microseconds. An `OpenDataset` may
be shared by threads and pickled for processes.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Bytes
from shardkit.card import DatasetCard
from shardkit.datasets.locate import LocalFiles
from shardkit.datasets.range_store import RangeStore
from shardkit.errors import ShardError
from shardkit.files import Closing, open_maps
from shardkit.formats.stored import load_raw
from shardkit.formats.text import TEXT_FORMATS, TextShard
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
    from shardkit.formats.tar import TarShard
    from shardkit.order.balance import RowCosts


MAX_OPEN_SHARDS = 1024  # of a dataset
MAX_MAPS = 16384  # of a process: a quarter of what Linux allows by default, the rest is for others
MAX_RESIDENT_BYTES = 2 << 30  # of decompressed shards held in memory; the newest stays whatever its size

# Datasets that keep shards open. Each change is one atomic step: threads and the garbage collector share it.
_keeping: dict[int, weakref.ref[OpenDataset]] = {}


class ShardReader(Protocol):
    """What open shards of all formats can do."""

    info: ShardInfo

    def __len__(self) -> int: ...
    def sample(self, row: int, columns: Container[str] | None = None) -> dict[str, object]: ...
    def fixed_rows(self, column: str) -> npt.NDArray[np.generic] | None: ...
    @property
    def columns(self) -> tuple[Column, ...]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How shards are opened; see `open_dataset`."""

    allow_pickle: bool = False
    verify: bool = False
    decode: bool | str = True


class OpenDataset(Closing):
    """The shards of a dataset, opened as they are needed, and the samples in them."""

    def __init__(
        self,
        files: LocalFiles | None,
        manifest: Manifest,
        *,
        card: DatasetCard | None = None,
        options: ReadOptions | None = None,
        shards: CachedShards | None = None,
        tar_indexes: TarIndexes | None = None,
    ) -> None:
        """`files` of a local dataset, or `shards` of a remote one; `tar_indexes`: what a scan has found."""
        assert (files is None) != (shards is None)
        self.manifest = manifest
        self.card = card
        self.shards = shards
        self.row_costs: dict[str, RowCosts] = {}
        """Tables that loaders have opened, by name: copies for other processes need not open them again."""
        self._files = files
        self._tar_indexes = tar_indexes
        self._options = options or ReadOptions()
        self._lock = Lock()
        self._open: OrderedDict[int, ShardReader] = OrderedDict()

    @property
    def path(self) -> Path:
        """The local folder, absolute; ShardError for a remote dataset, which has none."""
        if self._files is None:
            raise ShardError(self.location, "is remote: it has no local path")
        return self._files.folder

    @property
    def location(self) -> str:
        """The folder's path or the URL, for messages."""
        return str(self.path) if self.shards is None else self.shards.store.url

    @property
    def store(self) -> Store:
        """The store that holds the dataset's files, shards included."""
        if self.shards is not None:
            return self.shards.store
        store = LocalStore(self.path)
        return RangeStore(store) if self.manifest.format == "tokens" else store

    def where(self, number: int) -> str:
        """The path or URL of shard `number`, for messages."""
        return f"{self.location}/{self.manifest.shards[number].stored.basename}"

    @property
    def fingerprint(self) -> str:
        """Identifies the shards and their order; see `Manifest.fingerprint`."""
        return self.manifest.fingerprint

    def stream_sizes(
        self, name: str, excluded: Exclusions | None = None, limit: int | None = None
    ) -> StreamSizes:
        """Return what the order of a run takes of a stream that draws on this dataset."""
        manifest = self.manifest
        return StreamSizes(
            name,
            self.fingerprint,
            manifest.shard_samples,
            int(manifest.raw_bytes.clip(0).sum()),
            any(kind.compression for kind in manifest.kinds),
            excluded,
            limit,
        )

    def __len__(self) -> int:
        return self.manifest.samples

    def row(self, number: int, columns: Container[str] | None = None) -> dict[str, object]:
        """Sample `number`, from 0; `columns`: decode these only."""
        starts = self.manifest.shard_starts
        shard = int(np.searchsorted(starts, number, side="right")) - 1
        return self.shard(shard).sample(number - int(starts[shard]), columns)

    def __iter__(self) -> Iterator[dict[str, object]]:
        for number in range(len(self.manifest.shards)):
            shard = self.shard(number)
            for row in range(len(shard)):
                yield shard.sample(row)

    def shard(self, number: int, reader: CacheReader | None = None) -> ShardReader:
        """Shard `number` of the manifest, open; a remote one is loaded as `reader` does. Thread-safe."""
        with self._lock:
            shard = self._open.get(number)
            if shard is not None:
                self._open.move_to_end(number)
                return shard
        # Outside the lock, so that threads open different shards at once; at worst two open the same one.
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
        """The columns of the first shard that has samples, or (); of tars, those that others state as well.

        MDS shards are taken to be alike; `token_column` is the one property checked on all of them.
        """
        filled = np.flatnonzero(self.manifest.shard_samples).tolist()
        first = self.columns_of(filled[0]) if filled else ()
        if self.manifest.format != "tar":
            return first
        stated = (number for number in filled if self.manifest.shards[number].columns)
        return merge_columns([first, *map(self.columns_of, stated)])

    @property
    def verifies(self) -> bool:
        """Whether it was opened with `verify`."""
        return self._options.verify

    @property
    def gives_bytes(self) -> bool:
        """Whether every member of a sample is its bytes: a dataset of tars opened with `decode=False`."""
        return self.manifest.format == "tar" and self._options.decode is False

    @cached_property
    def token_column(self) -> str | None:
        """The column that holds one row of integers of constant length in every sample, or None.

        "tokens" if it is one, which in tars are the members `tokens.npy`; otherwise the only such column.
        Tars whose list does not state columns are opened for this, each once.
        """
        candidates = {c.name: c for c in self.columns if token_layout(c) is not None}
        preferred = [c for n, c in candidates.items() if n in (TOKENS, f"{TOKENS}.npy")]
        column = next(iter(preferred or candidates.values()), None)
        if column is None or (not preferred and len(candidates) > 1):
            return None
        return column.name if all(column in columns for columns in self.shard_columns()) else None

    @property
    def loss_mask_column(self) -> str | None:
        """The column with a 1 for each token that is trained on and a 0 for each other one, or None.

        "loss_mask" if there is one, which in tars are the members `loss_mask.npy`.
        """
        names = (LOSS_MASK, f"{LOSS_MASK}.npy") if self.manifest.format == "tar" else (LOSS_MASK,)
        return next((column.name for column in self.columns if column.name in names), None)

    def column_name(self, name: str) -> str:
        """Return the name of a column; warns if `name` is the extension of its members."""
        if (known := self._names.get(name)) is None:
            return name
        from shardkit.formats.tar import tell_name

        tell_name(name, known)
        return known

    def shard_columns(self) -> Iterator[tuple[Column, ...]]:
        """The columns of the shards that have samples, those that are alike once.

        Tars whose list does not state columns are opened for this, each once.
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
        """Tokens of a row of `token_column`."""
        layout = self._token_layout
        return None if layout is None else layout[1]

    @property
    def token_dtype(self) -> np.dtype[np.generic] | None:
        """Type of `token_column` as stored."""
        layout = self._token_layout
        return None if layout is None else layout[0]

    def keep_only(self, numbers: Set[int]) -> None:
        """Forget the open shards that are not among `numbers`, so that those evicted free their room.

        Those of a cache that has room for all that is read through it stay open until they are evicted for
        another dataset.
        """
        with self._lock:
            unused = self._open.keys() - numbers
            for number in unused if self.shards is None else unused - self.shards.still_open(unused):
                del self._open[number]

    def close(self) -> None:
        """Forget the open shards, stop fetching; the dataset stays usable and opens them again when asked.

        Their maps end here, but for those that a view still shows.
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
        """Names of columns of tars that are not the extension of their members, as all shards have them.

        The columns that lists state decide, and of other lists those of the first shard. Members that are
        not decoded are files, which keep their extensions.
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
        """The columns of shard `number`, which is opened for this if its list does not state them."""
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
            self._files.check(number)  # says more if that is why
            raise
        self._files.check(number)
        return shard

    def _local_shard(self, number: int, files: LocalFiles) -> ShardReader:
        info, options = self.manifest.shards[number], self._options
        if files.dates is not None:
            from shardkit.formats import tokens

            return tokens.open_shard(files.folder, info, files.dates)
        verify = options.verify and not files.was_opened(number)
        if self.manifest.format == "mds":
            from shardkit.formats import mds

            return mds.open_shard(files.folder, info, allow_pickle=options.allow_pickle, verify=verify)
        return self._shard_from(number, load_raw(self.manifest.format, files.folder, info, verify=verify))

    def _shard_from(self, number: int, raw: Bytes) -> ShardReader:
        info, options, where = self.manifest.shards[number], self._options, self.where(number)
        if self.manifest.format == "mds":
            from shardkit.formats import mds

            return mds.shard_from_raw(where, info, raw, allow_pickle=options.allow_pickle)
        if self.manifest.format == "tokens":
            from shardkit.formats.tokens import TokenShard

            return TokenShard(where, info, raw)
        if self.manifest.format in TEXT_FORMATS:
            return TextShard(info, raw, self.manifest.format, file=where)
        from shardkit.formats import tar

        index = None if self._tar_indexes is None else self._tar_indexes.index(number)
        return tar.shard_from_raw(
            where, info, raw, allow_pickle=options.allow_pickle, decode=options.decode, index=index
        )

    def _forget(self) -> None:
        with self._lock:
            self._open.clear()
            _keeping.pop(id(self), None)

    def _forget_oldest(self) -> None:
        """Hold the bounds; the lock is held by the caller."""
        while len(self._open) > 1:
            resident = 0
            if self.shards is None:  # a remote dataset's cache has a budget of its own
                resident = sum(s.info.raw.bytes for s in self._open.values() if s.info.compression)
            if len(self._open) <= MAX_OPEN_SHARDS and resident <= MAX_RESIDENT_BYTES:
                return
            self._open.popitem(last=False)


def _forget_all() -> None:
    """Let all datasets of the process forget the shards that they keep open."""
    for reference in list(_keeping.values()):
        dataset = reference()
        if dataset is not None:
            dataset._forget()


def _forget_dataset(key: int, died: weakref.ref[OpenDataset]) -> None:
    _keeping.pop(key, None)
