"""Open an MDS dataset, WebDataset tars, row files or flat files of tokens as one sequence of samples.

`open_dataset` determines the format of a path and reads only the index. Remote shards are read through a
cache; tars without a list are scanned to number their samples. Reading samples of a `Dataset` opens its
shards (`shardkit.datasets.opened`). Its methods about documents use `shardkit.datasets.provenance`, which is
imported on the first call.
"""

from __future__ import annotations

import operator
import os
import random
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import accumulate
from os import PathLike
from typing import TYPE_CHECKING, SupportsIndex, Unpack, cast, overload

import numpy as np

from shardkit.cache import CacheOptions
from shardkit.card import block_checksums
from shardkit.datasets.locate import Found, LocalFiles, TextRowsOf, locate
from shardkit.datasets.opened import OpenDataset, ReadOptions
from shardkit.datasets.rows import RowChoice, Rows, is_single, no_rows
from shardkit.datasets.text_packer import Pack, TokenizerChoice
from shardkit.datasets.text_rows import TextCut, TextRows, find_text_rows
from shardkit.datasets.token_rows import RowCut
from shardkit.display import Described, Facts, listed
from shardkit.errors import ShardError, warn_user
from shardkit.formats.stored import load_raw
from shardkit.formats.tar.values import checked_decode
from shardkit.hints import answers_keywords, hint
from shardkit.limits import usable_cores
from shardkit.manifest import Manifest
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import StorageOptions
from shardkit.synonyms import DATASET, OPEN
from shardkit.units import format_bytes

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa
    import tokenizers

    from shardkit.cache.indexes import TarIndexes
    from shardkit.cache.shards import CachedShards, SharedCache
    from shardkit.datasets.provenance.documents import Document, Question, Trace
    from shardkit.formats.tar.members import Scanned, TarIndex


_MAX_THREADS = 16
_UNREMEMBERED_BYTES = 1 << 30  # total size of tars above which scanning them at every start causes a warning

_FILTERS = (
    "filters of a recipe remove documents in a build, and sk.Stream(dataset, exclude=[…]) rows of a loader"
)


class Dataset(OpenDataset, Described):
    """The samples of a dataset, by number, in the order of its manifest.

    `dataset[17]` is one sample as {column: value}; `dataset[3:9]`, `dataset[[1, 5]]` and `dataset[:]` are
    `Rows`, which convert to columns for NumPy, PyTorch, Arrow and pandas. Columns are chosen when a dataset
    is opened, or by the `columns` of a conversion.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Raise AttributeError, with what to use instead of an attribute that other tools have."""
            said = "" if name.startswith("_") else hint(name, (), DATASET)
            problem = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{problem}; {said}" if said else problem, name=name, obj=self)

    @overload
    def __getitem__(self, index: RowChoice) -> Rows: ...  # type: ignore[overload-overlap]  # arrays
    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[str, object]: ...
    def __getitem__(self, index: SupportsIndex | RowChoice) -> dict[str, object] | Rows:
        """Return sample `index` as {column: value}, or `Rows` for a slice or a list of numbers.

        Negative numbers count from the end.
        """
        if isinstance(index, str):
            raise no_rows([index])
        if not is_single(index):
            return Rows(self, range(len(self)))[index]
        try:
            number = operator.index(index)
        except TypeError:
            raise TypeError(
                f"select rows by number, slice or list of numbers, not by {index!r:.100}"
            ) from None
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.location}: no sample {number}; the dataset has {len(self)}")
        return self.row(number % len(self))

    def head(self, count: int = 5) -> Rows:
        """Return the first `count` rows; a negative number leaves out as many at the end, as in pandas."""
        return self[:count]

    def select(self, rows: RowChoice | Iterable[int]) -> Rows:
        """Return the rows with these numbers, in this order: `select` of Hugging Face datasets.

        Numbers may be any iterable. To select columns, give `columns` to `shardkit.open` or to a conversion.
        """
        if isinstance(rows, str):
            raise no_rows([rows])
        is_choice = isinstance(rows, (slice, Sequence, np.ndarray))
        return self[cast(RowChoice, rows) if is_choice else list(cast(Iterable[int], rows))]

    def to_arrow(
        self, columns: Sequence[str] | None = None, *, max_bytes: int | str | None = None
    ) -> pa.Table:
        """Return all rows as an Arrow table with the row numbers as column `row`.

        Raises ShardkitError if the rows take more than `max_bytes` (default: a quarter of the free memory).
        """
        return self[:].to_arrow(columns, max_bytes=max_bytes)

    def to_pandas(
        self, columns: Sequence[str] | None = None, *, max_bytes: int | str | None = None
    ) -> pandas.DataFrame:
        """Return all rows as a data frame, whose index is the row numbers.

        Raises ShardkitError if the rows take more than `max_bytes` (default: a quarter of the free memory).
        """
        return self[:].to_pandas(columns, max_bytes=max_bytes)

    @property
    def features(self) -> dict[str, str]:
        """The columns of a row and how they are stored: {"tokens": "ndarray:uint16:2049", "url": "str"}."""
        selected = self.selected
        return {c.name: c.encoding for c in self.columns if selected is None or c.name in selected}

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer that `text` uses, by default that of the card, as an object of `tokenizers`.

        Raises ShardkitError if its file is not found, or if the card names none.
        """
        from shardkit.datasets.provenance.documents import tokenizer_of

        return tokenizer_of(self)

    def sample(self, count: int, *, seed: int = 0) -> Rows:
        """Return `count` distinct random rows in ascending order, or all if fewer; `seed` determines them."""
        drawn = random.Random(seed).sample(range(len(self)), min(count, len(self)))
        return Rows(self, np.array(sorted(drawn), np.int64))

    def text(self, row: SupportsIndex, *, tokenizer: str | PathLike[str] | None = None) -> str:
        """Return the text of a row: its decoded tokens without padding, or its column `text`.

        `tokenizer` is a tokenizer.json; the default is the file that the card names, if it still exists.
        """
        from shardkit.datasets.provenance.documents import text_of

        return text_of(self, row, tokenizer=tokenizer)

    def documents(
        self, row: SupportsIndex, *, tokenizer: str | PathLike[str] | None = None
    ) -> list[Document]:
        """Return the documents in a row, each with its range of tokens, its origin and its text.

        The text is None without a tokenizer, which is found as in `text`. Raises ShardkitError for a dataset
        without provenance: only datasets built by shardkit have it.
        """
        from shardkit.datasets.provenance.documents import documents_of

        return documents_of(self, row, tokenizer=tokenizer)

    def trace(self, **question: Unpack[Question]) -> Trace:
        """Find documents by `url=`, `id=`, `document=`, `source=` or `file=`, or in a `row=` or `step=`.

        See `shardkit.trace`.
        """
        from shardkit.datasets.provenance.documents import trace_of

        return trace_of(self, question)

    def describe(self) -> tuple[str, Facts]:
        """Return a title and facts from the index and the card. Reads no shard."""
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


@answers_keywords(OPEN)
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
    columns: Sequence[str] | None = None,
    tokenizer: TokenizerChoice | None = None,
    pack: Pack = "best_fit",
) -> Dataset:
    """Open a folder or URL with index.json (MDS) or shards.json (tars), the index itself, or files by name.

    Names of tars may be brace lists ("s3://bucket/part-{000..099}.tar"), patterns, folders, and lists of
    these. Tars without a list are all scanned when they are first opened, to number their samples; with a
    cache folder, they are not scanned again. `storage` configures access to a store, `cache` the cache for
    remote shards (a `SharedCache` serves several datasets). `verify` compares the hashes of each local shard
    when it is first opened (hashes of remote shards are always compared), and checks the card's fingerprint.
    `allow_pickle` lets pickled columns run their code.
    Flat files of tokens (Megatron's .idx and .bin, llm.c's and nanoGPT's .bin, .npy; a file, a folder or a
    pattern) are read in place as rows of `sequence_length`; for `token_dtype` and `per_file` see `RowCut`
    (`shardkit.datasets.token_rows`). If given for another dataset, `sequence_length` must match its rows.
    Row files (Parquet, Arrow, JSON lines; names as those of tars, such as "s3://bucket/data/*.parquet") are
    read in place by groups of rows, and of their columns only `columns`; in other formats, `columns` selects
    what samples have. If the lists of tokens in row files have one length, `sequence_length` says so.
    A folder of images, local or in a store, has the columns `image`, `path`, and `label` if it has a folder
    for each class; a list of images (a .csv file, metadata.jsonl) has other columns
    (`shardkit.datasets.image_files`).
    `tokenizer` makes rows of `sequence_length` tokens from the texts of row files, in place, and `pack`
    says how: see `shardkit.datasets.text_rows`. Files of tokens, and datasets that have rows, ignore both.
    `decode` selects how members of tars, and image files in columns of MDS and of Hugging Face's Parquet
    files, are decoded: with True, images become PIL images; "basic" keeps images as bytes; webdataset's
    "rgb8", "torchrgb", ... give arrays and tensors; False keeps all members of tars as bytes (see
    `shardkit.formats.tar.values`). Raises ShardError if the dataset is missing or malformed.
    """
    if not isinstance(path, (str, PathLike, Iterable)):
        raise TypeError(f"path must be a path, a URL or a list of these, not {path!r:.80}")
    decode = checked_decode(decode)
    options = ReadOptions(allow_pickle=allow_pickle, verify=verify, decode=decode, columns=columns)
    from shardkit.cache.shards import SharedCache

    shared = cache if isinstance(cache, SharedCache) else SharedCache(cache or CacheOptions())
    cut, text = None, None
    if sequence_length is not None:
        cut = RowCut(sequence_length=sequence_length, token_dtype=token_dtype, per_file=per_file)
    if tokenizer is not None:
        text = TextCut(tokenizer=tokenizer, sequence_length=sequence_length, pack=pack)
    texts = None if text is None else _text_rows_of(text, storage, shared, columns)
    found = locate(path, storage, shared.indexes(storage), cut, columns, texts=texts)
    dataset = _open(found, shared, options)
    if cut is not None and dataset.sequence_length != cut.sequence_length:
        length = "no one length" if dataset.sequence_length is None else f"{dataset.sequence_length:,}"
        raise ShardError(dataset.location, f"has rows of {length}, not of {cut.sequence_length:,} tokens")
    return dataset


def _open(found: Found, shared: SharedCache, options: ReadOptions) -> Dataset:
    """Return the dataset that was located; scans tars without a list."""
    manifest, shards, tar_indexes = found.manifest, None, None
    if found.store is not None:
        manifest, shards, tar_indexes = _open_remote(found, found.store, shared)
    elif found.versions is not None:
        manifest, tar_indexes = _scan_local(found, found.versions, shared.options)
    texts = found.rows if isinstance(found.rows, TextRows) else None
    if texts is not None:
        options = replace(options, columns=None)  # they name what the rows are made from
    card = found.card
    if options.verify and card is not None:
        card.check_fingerprint(manifest.fingerprint)
    files = LocalFiles(replace(found, manifest=manifest)) if shards is None else None
    return Dataset(
        files, manifest, card=card, options=options, shards=shards, tar_indexes=tar_indexes, rows=found.rows
    )


def _text_rows_of(
    text: TextCut, storage: StorageOptions | None, shared: SharedCache, columns: Sequence[str] | None
) -> TextRowsOf:
    """Return the function that makes rows of tokens from the texts of files at a path."""
    return partial(
        find_text_rows,
        cut=text,
        storage=storage,
        columns=columns,
        indexes=shared.indexes(storage),
        cache_folder=shared.options.folder,
        threads=max(1, usable_cores() // shared.options.processes),
    )


def _open_remote(
    found: Found, store: ResilientStore, shared: SharedCache
) -> tuple[Manifest, CachedShards, TarIndexes | None]:
    """Return (complete manifest, cached shards, index cache of scanned tars or None) of a remote dataset.

    Tars without a list are scanned. Raises ShardError for a damaged tar and StoreError if the store fails.
    """
    from shardkit.cache.shards import CachedShards

    cache, fetcher = shared.open()
    manifest, versions, card = found.manifest, found.versions, found.card
    if found.rows is not None:
        unpack = found.rows.packer.unpack if isinstance(found.rows, TextRows) else None
        objects = found.rows.objects()
        shards = CachedShards(store, manifest, cache, fetcher, objects=objects, unpack_rows=unpack)
        return manifest, shards, None
    if versions is None:
        blocks = block_checksums(manifest, card)
        return manifest, CachedShards(store, manifest, cache, fetcher, blocks=blocks), None
    from shardkit.datasets.tar_scan import scan_tars, skim_tar

    sizes = [info.stored.bytes for info in manifest.shards]
    objects = dict(enumerate(zip(sizes, versions, strict=True)))
    shards = CachedShards(store, manifest, cache, fetcher, objects=objects)
    indexes = _indexes(store.url, manifest, versions, shared.options)
    held = min(
        fetcher.connections, max(1, cache.capacity // max([1, *sizes]))
    )  # number of tars that fit in the cache together even if all are as large as the largest
    infos, before = manifest.shards, list(accumulate(sizes, initial=0))

    def skim(number: int) -> tuple[Scanned, TarIndex] | None:
        """Skim a tar that does not fit in the cache; return None for others, which are soon read again."""
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
    """Scan all tars of a local folder; return (manifest, index cache). Raises ShardError for damaged tars."""
    from shardkit.datasets.tar_scan import scan_tars

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
    from shardkit.cache.indexes import TarIndexes

    size = sum(info.stored.bytes for info in manifest.shards)
    if options.folder is None and size > _UNREMEMBERED_BYTES:
        warn_user(
            f"{url}: {format_bytes(size)} of tars without a list are scanned by each process at every start: "
            "give cache_dir to keep the results, or publish a list (docs/guides/migrate.md)"
        )
    names = [f"{url}/{info.stored.basename}" for info in manifest.shards]
    return TarIndexes.in_cache(options.folder, list(zip(names, versions, strict=True)))


def trace(
    dataset: Dataset | str | PathLike[str],
    *,
    storage: StorageOptions | None = None,
    **question: Unpack[Question],
) -> Trace:
    """Find documents in a dataset, and the training steps that used them. Give one of these arguments:

        url, id, document, source, file    documents with these URLs or patterns ("example.org/*"), ids of
                                           your own or of shardkit (hex), labels of inputs, or raw files; for
                                           a removed duplicate, the document that was kept for it
        row                                the documents in a row
        step                               the documents in a step of a run, counted from 1

    Several values are a list. `limit` (default: 20; 0: all) limits the listed items, not the totals.
    `exclude` writes the found rows as a list for `Stream(exclude=...)`, `export` all found documents to a
    .parquet, .jsonl or .csv file. A run is described by the `state` of its loader, a mapping or a file, with
    `batch_size`, `world_size` and, if the run had them, `balance`, `eos_id` and `accumulate` (batches per
    step with gradient accumulation). A mixture also needs its other `streams`, and a run that excluded rows
    needs those lists as `without`. `tokenizer` is as in `Dataset.text`, `storage` as in `open_dataset`.
    Raises ShardkitError if nothing is found.
    """
    with ExitStack() as stack:
        if not isinstance(dataset, Dataset):
            dataset = stack.enter_context(open_dataset(dataset, storage=storage))
        return dataset.trace(**question)
