"""Any MDS dataset, folder of WebDataset tars, or flat files of tokens, as one sequence of samples.

`open_dataset` finds out what a path holds and reads the index only. Remote shards come through a cache; tars
that no list describes are scanned to number their samples. Shards open when a sample of theirs is asked for,
and the most recently used stay open, bounded in number and in bytes decompressed into memory. Open shards
hold no file descriptors, but systems limit the maps of a process, too (usually 65,530): where a process has
`MAX_MAPS` open, all its datasets forget the shards that they keep. Shards that fall out are forgotten, not
closed: a thread that still reads one, or a view that still shows it, keeps it alive. To open a forgotten one
again costs some tens of microseconds. A `Dataset` may be shared by threads and pickled for processes.
"""

from __future__ import annotations

import operator
import os
import random
import weakref
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol, SupportsIndex, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Bytes
from shardkit.cache.contract import CacheOptions
from shardkit.card import DatasetCard, block_checksums
from shardkit.datasets.locate import Found, LocalFiles, locate
from shardkit.datasets.range_store import RangeStore
from shardkit.datasets.rows import RowChoice, Rows, is_single
from shardkit.datasets.token_rows import RowCut
from shardkit.errors import ShardError, warn_user
from shardkit.facts import Described, Facts, listed
from shardkit.files import Closing, open_maps
from shardkit.formats.stored import load_raw
from shardkit.formats.tar.values import checked_decode
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
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import StorageOptions, Store
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.cache.reader import CacheReader
    from shardkit.cache.shards import CachedShards, SharedCache
    from shardkit.cache.tar_scan import TarIndexes
    from shardkit.formats.tar import TarShard
    from shardkit.formats.tar.members import Scanned, TarIndex
    from shardkit.order.balance import RowCosts
    from shardkit.tools.trace.documents import Document, Question, Trace

__all__ = ["Dataset", "ReadOptions", "ShardReader", "open_dataset"]

MAX_OPEN_SHARDS = 1024  # of a dataset
MAX_MAPS = 16384  # of a process: a quarter of what Linux allows by default, the rest is for others
MAX_RESIDENT_BYTES = 2 << 30  # of decompressed shards held in memory; the newest stays whatever its size
_MAX_THREADS = 16
_UNREMEMBERED_BYTES = 1 << 30  # of tars that may be scanned at every opening without a word

# Datasets that keep shards open. Each change is one atomic step: threads and the garbage collector share it.
_keeping: dict[int, weakref.ref[Dataset]] = {}


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


class Dataset(Closing, Described):
    """The samples of a dataset, by number, in the order of its manifest.

    `dataset[17]` is one as {column: value}; `dataset[3:9]`, `dataset[[1, 5]]` and `dataset[:]` are `Rows`,
    which NumPy, PyTorch, Arrow and pandas take as columns.
    """

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

    @overload
    def __getitem__(self, index: RowChoice) -> Rows: ...  # type: ignore[overload-overlap]  # arrays
    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[str, object]: ...
    def __getitem__(self, index: SupportsIndex | RowChoice) -> dict[str, object] | Rows:
        """Sample `index` as {column: value}; `Rows` for a slice or a list of numbers.

        Negative numbers count from the end.
        """
        if not is_single(index):
            return Rows(self, range(len(self)))[index]
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.location}: sample {number} of {len(self)}")
        return self.row(number % len(self))

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

    def sample(self, count: int, *, seed: int = 0) -> Rows:
        """`count` rows drawn without repetition, ascending, the same ones for a seed; all rows if fewer."""
        drawn = random.Random(seed).sample(range(len(self)), min(count, len(self)))
        return Rows(self, np.array(sorted(drawn), np.int64))

    # The tool for these questions may use every layer: it is imported when it is asked, never before.

    def text(self, row: SupportsIndex, *, tokenizer: str | PathLike[str] | None = None) -> str:
        """The text of a row: its tokens decoded, padding left out, or its column `text` if it has no tokens.

        `tokenizer`: the tokenizer.json; default: the one that the card names, if it is still there.
        """
        from shardkit.tools.trace.documents import text_of

        return text_of(self, row, tokenizer=tokenizer)

    def documents(
        self, row: SupportsIndex, *, tokenizer: str | PathLike[str] | None = None
    ) -> list[Document]:
        """The documents in a row: which tokens are theirs, where they are from, and their text.

        Text is None without a tokenizer, which is found as in `text`. ShardkitError for a dataset without
        provenance: only those that shardkit has built have it.
        """
        from shardkit.tools.trace.documents import documents_of

        return documents_of(self, row, tokenizer=tokenizer)

    def trace(self, **question: Unpack[Question]) -> Trace:
        """Find documents by `url=`, `document=`, `source=` or `file=`, or those of a `row=` or a `step=`.

        See `shardkit.trace`.
        """
        from shardkit.tools.trace.documents import trace

        return trace(self, **question)

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
            for number in unused if self.shards is None else unused - self.shards.kept(unused):
                del self._open[number]

    def close(self) -> None:
        """Forget the open shards, stop fetching; the dataset stays usable and opens them again when asked.

        Their maps end here, but for those that a view still shows.
        """
        self._forget()
        if self.shards is not None:
            self.shards.close()

    def describe(self) -> tuple[str, Facts]:
        """What the index and the card say; reads no shard."""
        manifest, card = self.manifest, self.card
        shards = f"{len(manifest.shards):,}, {manifest.format}"
        is_stated = manifest.format != "tar" or all(info.columns for info in manifest.shards)
        length = self.sequence_length if is_stated else None
        facts = [("shards", shards), ("rows", f"{len(self):,}")]
        if length is not None:
            assert self.token_dtype is not None
            facts[-1] = ("rows", f"{len(self):,}, each of {length:,} tokens ({self.token_dtype.name})")
            tokens, padding = len(self) * length, None if card is None else card.data.get("padding")
            if isinstance(padding, int) and 0 < padding < tokens:
                facts.append(("tokens", f"{tokens - padding:,}, and {padding:,} of padding"))
            else:
                facts.append(("tokens", f"{tokens:,}"))
        if is_stated and len(self.columns) > (length is not None):
            facts.append(("columns", listed([f"{c.name} ({c.encoding})" for c in self.columns])))
        if card is not None and (file := card.tokenizer.file) is not None:
            facts.append(("tokenizer", f"{file}, eos {card.tokenizer.eos}"))
        if card is not None and card.source_labels:
            facts.append(("sources", listed(list(dict.fromkeys(card.source_labels)))))
        return f"Dataset {self.location}", [*facts, ("fingerprint", self.fingerprint)]

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


def _forget_dataset(key: int, died: weakref.ref[Dataset]) -> None:
    _keeping.pop(key, None)


def open_dataset(
    path: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    allow_pickle: bool = False,
    verify: bool = False,
    decode: bool | str = True,
    storage: StorageOptions | None = None,
    cache: CacheOptions | SharedCache | None = None,
    sequence_length: int | None = None,
    token_dtype: str | None = None,
    per_file: bool = False,
) -> Dataset:
    """Open a folder or URL with index.json (MDS) or shards.json (tars), the index itself, or tars by name.

    Names of tars may be brace lists ("s3://bucket/part-{000..099}.tar"), patterns, folders, and lists of
    these. Tars that no list describes are all scanned when they are first opened, to number their samples;
    never again if there is a cache folder. Remote shards come through a cache, as `cache` says (a
    `SharedCache` serves several datasets), by a store that is reached as `storage` says. `verify` compares
    each local shard's hashes when it is first opened (remote ones always are), and the card's fingerprint.
    `allow_pickle` lets pickled columns run their code.
    Flat files of tokens (Megatron's .idx and .bin, llm.c's and nanoGPT's .bin, .npy; a file, a folder or a
    pattern) are read in place as rows of `sequence_length`; `token_dtype` and `per_file` are those of
    `RowCut` (`shardkit.datasets.token_rows`). Another dataset must have rows of `sequence_length`, if given.
    `decode` says what members of tars become: True decodes them, images into PIL's; "basic" leaves images as
    bytes; webdataset's "rgb8", "torchrgb", … give arrays and tensors; False leaves everything as bytes (see
    `shardkit.formats.tar.values`). ShardError says what is wrong with a dataset, or what was looked for.
    """
    options = ReadOptions(allow_pickle=allow_pickle, verify=verify, decode=checked_decode(decode))
    from shardkit.cache.shards import CachedShards, SharedCache

    shared = cache if isinstance(cache, SharedCache) else SharedCache(cache or CacheOptions())
    cut = None
    if sequence_length is not None:
        cut = RowCut(sequence_length=sequence_length, token_dtype=token_dtype, per_file=per_file)
    found = locate(path, storage, shared.indexes(storage), cut)
    manifest, shards, tar_indexes = found.manifest, None, None
    if found.store is not None and found.rows is not None:
        shards = CachedShards(found.store, manifest, *shared.open(), objects=found.rows.objects())
    elif found.store is not None:
        manifest, shards, tar_indexes = _open_remote(found, found.store, shared)
    elif found.versions is not None:
        manifest, tar_indexes = _scan_local(found, found.versions, shared.options)
    card = found.card
    if verify and card is not None:
        card.check_fingerprint(manifest.fingerprint)
    files = LocalFiles(replace(found, manifest=manifest)) if shards is None else None
    dataset = Dataset(files, manifest, card=card, options=options, shards=shards, tar_indexes=tar_indexes)
    if cut is not None and dataset.sequence_length != cut.sequence_length:
        length = "none of one length" if dataset.sequence_length is None else f"{dataset.sequence_length:,}"
        raise ShardError(dataset.location, f"has rows of its own, {length}, not of {cut.sequence_length:,}")
    return dataset


def _open_remote(
    found: Found, store: ResilientStore, shared: SharedCache
) -> tuple[Manifest, CachedShards, TarIndexes | None]:
    """The shards of a remote dataset by a cache, and a complete manifest, for which tars may be scanned.

    ShardError names a tar that is damaged; StoreError.
    """
    from shardkit.cache.shards import CachedShards

    cache, fetcher = shared.open()
    manifest, versions, card = found.manifest, found.versions, found.card
    if versions is None:
        blocks = block_checksums(manifest, card)
        return manifest, CachedShards(store, manifest, cache, fetcher, blocks=blocks), None
    from shardkit.cache.tar_scan import scan_tars, skim_tar

    sizes = [info.stored.bytes for info in manifest.shards]
    objects = dict(enumerate(zip(sizes, versions, strict=True)))
    shards = CachedShards(store, manifest, cache, fetcher, objects=objects)
    indexes = _indexes(store.url, manifest, versions, shared.options)
    held = min(
        fetcher.connections, max(1, cache.capacity // max([1, *sizes]))
    )  # together, what the cache has room for
    infos, before = manifest.shards, list(accumulate(sizes, initial=0))

    def skim(number: int) -> tuple[Scanned, TarIndex] | None:
        """Of tars that the cache has room for, whole ones are wanted: they are read again soon."""
        if before[number + 1] <= cache.capacity:
            return None
        return skim_tar(store, infos[number], versions[number])

    try:
        manifest = scan_tars(
            manifest, shards.load, shards.where, indexes, threads=fetcher.connections, held=held, skim=skim
        )
    finally:
        shards.close()
    shards = CachedShards(store, manifest, cache, fetcher, objects=objects)
    return manifest, shards, indexes


def _scan_local(found: Found, versions: Sequence[str], options: CacheOptions) -> tuple[Manifest, TarIndexes]:
    """The manifest of a folder of tars, each scanned; ShardError names one that is damaged."""
    from shardkit.cache.tar_scan import scan_tars

    folder, manifest = found.folder, found.manifest
    assert folder is not None
    indexes = _indexes(str(folder.absolute()), manifest, versions, options)
    infos = manifest.shards
    scanned = scan_tars(
        manifest,
        lambda number: load_raw("tar", folder, infos[number]),
        lambda number: str(folder / infos[number].stored.basename),
        indexes,
        threads=min(_MAX_THREADS, os.cpu_count() or 1),
    )
    return scanned, indexes


def _indexes(url: str, manifest: Manifest, versions: Sequence[str], options: CacheOptions) -> TarIndexes:
    from shardkit.cache.tar_scan import TarIndexes

    size = sum(info.stored.bytes for info in manifest.shards)
    if options.folder is None and size > _UNREMEMBERED_BYTES:
        warn_user(
            f"{url}: {format_bytes(size)} of tars without a list are scanned by each process at every start: "
            "give cache_dir, where what is found is kept, or publish a list (docs/guides/migrate.md)"
        )
    names = [f"{url}/{info.stored.basename}" for info in manifest.shards]
    return TarIndexes.in_cache(options.folder, list(zip(names, versions, strict=True)))
