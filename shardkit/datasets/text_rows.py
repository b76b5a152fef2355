"""Open files of text, in place, as a dataset of packed rows of tokens.

    row files (row_files) -> texts of a shard -> packed rows of tokens (text_packer) -> cache -> batches

A shard is the same range of a file as in `row_files`. It is fetched as it is stored, and tokenized and
packed when it arrives, like a compressed shard that is decompressed. Its rows of tokens are what the cache
holds, so processes of a node that share a cache folder share them. All code that reads shards works with them
(prefetch by deadline, eviction, resume). Local files are read through the cache, too.

Rows. The documents of each shard are packed on their own, in the order of the file, so any shard can be made
without the others. The rows of a dataset are those of its shards, in order. `shardkit build` makes the same
rows from the same Parquet files with `pack.order: source`. A text that is empty makes no document; one that
is null is left out, with a warning.

Index. The number of rows of a shard follows from the lengths of its documents, which one pass over all texts
measures (`text_index`). The pass also chooses the engine of the tokenizer (`shardkit.tokens.parity`).

Fingerprint. It is computed from that of the files, the tokenizer, the lengths of all documents, and how they
are packed: a state continues on no other rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from shardkit.arrays import Bytes, Ints
from shardkit.cache.folder import SUBFOLDER
from shardkit.card import DatasetCard
from shardkit.datasets.range_store import RangeRows, connect_ranges
from shardkit.datasets.row_files import FileRows, find_rows
from shardkit.datasets.text_index import Lengths, TextIndex
from shardkit.datasets.text_packer import (
    EMPTY,
    TOKENIZER_KEYS,
    Pack,
    TextPacker,
    TextTokenizer,
    TokenizerChoice,
)
from shardkit.errors import ShardError, warn_user
from shardkit.files import load_json, publish_bytes, user_cache_folder
from shardkit.hashing import digest_of
from shardkit.limits import usable_cores
from shardkit.manifest import FileInfo, Manifest, ShardInfo
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import StorageOptions

if TYPE_CHECKING:
    from shardkit.cache.indexes import NodeIndexes
    from shardkit.tokens.packing import Placement

TEXT, MESSAGES = "text", "messages"
_LISTS = ("list<", "large_list<")  # how the types of conversations begin
_LIBRARIES = ("tokenizers", "gigatoken", "sentencepiece", "tiktoken", "jinja2")
_MEASURED = 2  # version of what `Documents.measured` holds
_SAMPLED_SHARDS = 16  # whose texts the engines are compared on
_SAMPLE_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCut:
    """Options that define rows of text: the tokenizer, the length of a row, and how documents are packed."""

    tokenizer: TokenizerChoice
    """A tokenizer file, its folder or model, or a mapping with the keys of `tokenizer` in a recipe."""
    sequence_length: int | None
    """Number of tokens per row."""
    pack: Pack = "best_fit"
    """Cut only documents longer than a row ("best_fit"), or wherever a row ends ("concat")."""

    def __post_init__(self) -> None:
        if self.sequence_length is None or self.sequence_length < 2:
            raise ValueError(
                f"tokenizer= packs texts into rows: give sequence_length, a number of at least 2, "
                f"not {self.sequence_length!r}"
            )
        if self.pack not in get_args(Pack):
            raise ValueError(f"pack must be one of {', '.join(get_args(Pack))}, not {self.pack!r}")
        if isinstance(self.tokenizer, Mapping) and (unknown := self.tokenizer.keys() - {*TOKENIZER_KEYS}):
            raise ValueError(f"tokenizer has no key {min(unknown)!r}; known: {', '.join(TOKENIZER_KEYS)}")


@dataclass(frozen=True, slots=True)
class TextRows(RangeRows):
    """Rows of tokens that are made from texts in files: what opens them, and the card that describes them."""

    packer: TextPacker
    card: DatasetCard
    index: TextIndex
    numbers: Ints
    """The number in the index of each shard, int64[shards]; those without documents are left out here."""

    def name_of(self, number: int) -> str:
        """Return the file of the texts of shard `number` and their rows there."""
        return self.packer.rows.name_of(number)

    def where(self, number: int) -> str:
        """Return the path or URL of the file of shard `number`."""
        assert self.store is not None
        return self.store.where(self.packer.rows.parts[number].file)

    def stored(self, name: str) -> Bytes:
        """Return the bytes of the files that `name`, of a shard of texts or of other columns, stands for."""
        assert self.store is not None
        return np.frombuffer(self.store.get(name, version=self.version_of(name)), np.uint8)

    def measured(self, number: int) -> Lengths:
        """Return `Documents.measured` of shard `number`, from the index or measured again.

        Raises ShardError if these are not the lengths that made the rows.
        """
        found = self.index.lengths(int(self.numbers[number]))
        if found is None:
            stored = self.stored(self.packer.rows.manifest.shards[number].raw.basename)
            found = self.packer.documents(number, stored, self.where(number)).measured
        if self.packer.count(found) != self.manifest.shards[number].samples:
            raise ShardError(self.where(number), "has other texts than when it was opened; open it again")
        return found

    def placed(self, number: int) -> tuple[Ints, Placement]:
        """Return the documents of shard `number`, as rows of its texts, and where they are in its rows."""
        measured = self.measured(number)
        documents = np.flatnonzero(measured > EMPTY)
        return documents, self.packer.place(measured[documents].astype(np.int64))


def find_text_rows(
    path: str | Sequence[str],
    cut: TextCut,
    storage: StorageOptions | None = None,
    *,
    columns: Sequence[str] | None = None,
    indexes: NodeIndexes | None = None,
    cache_folder: str | PathLike[str] | None = None,
    threads: int | None = None,
) -> TextRows:
    """Find rows of tokens in files of text: the column of `columns`, or "text", "messages", the only text.

    The first time, all texts are tokenized to count the rows; the result is kept in the cache folder, or in
    that of the user. Raises what `find_rows` raises, and ValueError if it is unclear what is text.
    """
    chosen: list[str] = []

    def choose(encodings: Mapping[str, str]) -> list[str]:
        chosen[:] = [_text_column(path, encodings, columns)]
        return chosen

    rows = find_rows(path, storage, columns=choose, indexes=indexes)
    [column] = chosen
    has_chat = rows.manifest.shards[0].columns[0].encoding != "str"
    tokenizer = TextTokenizer.of(cut.tokenizer, has_chat=has_chat)
    store = rows.store or connect_ranges(str(rows.folder), storage, is_cached=True)
    assert isinstance(store, ResilientStore)
    assert cut.sequence_length is not None
    packer = TextPacker(rows, column, tokenizer, cut.sequence_length, cut.pack)
    folder = user_cache_folder() if cache_folder is None else Path(cache_folder) / SUBFOLDER
    folder = None if folder is None else folder / "text" / _index_key(rows, tokenizer)
    objects = rows.objects()

    def fetch(number: int) -> Bytes:
        name = rows.manifest.shards[number].raw.basename
        return np.frombuffer(store.get(name, version=objects[number][1]), np.uint8)

    packer = replace(packer, tokenizer=_with_engine(packer, fetch, store, folder))

    def measure(number: int) -> Lengths:
        where = store.where(rows.parts[number].file)
        return packer.documents(number, fetch(number), where).measured

    sizes = [info.stored.bytes for info in rows.manifest.shards]
    index = TextIndex(folder, sizes, threads=threads or usable_cores())
    samples, digest, nulls = index.rows(f"{cut.sequence_length}-{cut.pack}", measure, packer.count)
    if nulls:
        warn_user(f"{path}: {nulls:,} rows have no text (null), and are left out")
    return _text_rows(rows, store, packer, index, samples, digest)


def _text_column(path: object, encodings: Mapping[str, str], columns: Sequence[str] | None) -> str:
    """Return the column of texts or conversations. Raises ValueError if that is unclear."""
    if columns is not None and len(columns) > 1:
        raise ValueError(f"rows of tokens are made from one column: columns={[*columns]!r} names several")
    if columns is not None:
        if columns[0] not in encodings:
            raise ValueError(f"{path} has no column {columns[0]!r}; it has {', '.join(encodings)}")
        if not (encodings[columns[0]] == "str" or encodings[columns[0]].startswith(_LISTS)):
            found = f"column {columns[0]!r} is {encodings[columns[0]]}"
            raise ValueError(f"{path}: {found}, not text or conversations: name another one")
        return columns[0]
    texts = [name for name, encoding in encodings.items() if encoding == "str"]
    if TEXT in texts:
        return TEXT
    if MESSAGES in encodings:
        return MESSAGES
    if len(texts) == 1:
        return texts[0]
    raise ValueError(
        f"{path} has {'several' if texts else 'no'} columns of text, and none is called {TEXT!r} or "
        f"{MESSAGES!r}: name one of its columns, columns=[...]: {', '.join(encodings)}"
    )


def _index_key(rows: FileRows, tokenizer: TextTokenizer) -> str:
    """Return the name of the index: of the texts, the tokenizer, and the libraries that tokenize."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return digest_of([rows.manifest.fingerprint, tokenizer.key, versions, _MEASURED])


def _with_engine(
    packer: TextPacker, fetch: Callable[[int], Bytes], store: ResilientStore, folder: Path | None
) -> TextTokenizer:
    """Return the tokenizer with the engine that the index names, or that a comparison on texts chooses."""
    from shardkit.tokens.parity import sample_texts

    file = None if folder is None else folder / "engine.json"
    tokenizer = packer.tokenizer
    if file is not None:
        try:
            known = load_json(file.read_bytes())
            unlike = tuple((first, last) for first, last in known.pop("unlike"))
            return replace(tokenizer, unlike=unlike, **known)
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            pass  # it is not there, or damaged

    def texts_of(number: int) -> Iterator[str]:
        where = store.where(packer.rows.parts[number].file)
        values = packer.shard(number, fetch(number), where).arrow(packer.column)
        for text in values.drop_null().cast("large_binary"):
            yield str(text.as_py(), "utf-8", "replace")  # counting rows names the one that is not UTF-8

    shards = len(packer.rows.manifest.shards)
    sampled = range(0, shards, -(-shards // _SAMPLED_SHARDS))
    if tokenizer.chat is not None:  # parts of conversations are encoded by the tokenizer's own library
        sampled = range(0)
    chosen = tokenizer.chosen(sample_texts([texts_of(number) for number in sampled], _SAMPLE_BYTES))
    if file is not None:
        names = ("engine", "unlike", "eos_id", "bos_id", "vocab_size")
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            publish_bytes(file, json.dumps({name: getattr(chosen, name) for name in names}).encode())
    return chosen


def _text_rows(
    rows: FileRows, store: ResilientStore, packer: TextPacker, index: TextIndex, samples: Ints, digest: str
) -> TextRows:
    filled = np.flatnonzero(samples).tolist()  # a build makes no shard of a unit without documents, either
    if not filled:
        raise ShardError(store.url, f"has no text in column {packer.column!r}")
    infos = [rows.manifest.shards[number] for number in filled]
    kept = replace(
        rows,
        manifest=replace(rows.manifest, shards=infos),
        parts=[rows.parts[number] for number in filled],
    )
    packer, samples = replace(packer, rows=kept), samples[filled]
    columns, tokenizer = packer.columns, packer.tokenizer
    width = sum(column.size or 0 for column in columns)
    facts = {**tokenizer.key, "length": packer.sequence_length, "pack": packer.pack}
    seen = digest_of([rows.manifest.seen, facts, digest])
    kind = f"text-{digest_of([facts, digest])}"  # names the entries in the cache
    shards = [
        ShardInfo(FileInfo(info.raw.basename, int(count) * width), int(count), columns, info.stored, kind)
        for info, count in zip(infos, samples, strict=True)
    ]
    card = DatasetCard(
        {
            "tokenizer": {
                "file": tokenizer.path.name,
                "digest": tokenizer.digest,
                "eos": tokenizer.eos,
                "eos_id": tokenizer.eos_id,
                **({} if tokenizer.bos_id is None else {"bos": tokenizer.bos, "bos_id": tokenizer.bos_id}),
            },
            "recipe": {"tokenizer": {"path": str(tokenizer.path)}},
        },
        f"the tokenizer of {store.url}",
    )
    manifest, numbers = Manifest("text", shards, seen=seen), np.array(filled)
    return TextRows(None, store, manifest, rows.versions, packer, card, index, numbers)
