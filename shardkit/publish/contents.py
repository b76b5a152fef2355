"""Which files belong to a dataset: its index, the shards in it, its card, and the files that the card lists.

Index and card are read from any store, including a folder, and checked before any file is sent: names stay in
the dataset, no file is named twice, the card belongs to the same dataset, and every file exists with the size
in index or card. Other files are not part of the dataset and are only counted. A large dataset also has
index.bin (`shardkit.formats.mds.index`). Cards name neither index.bin nor the tables of row costs, which are
transferred with the dataset.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property

from shardkit.card import CARD_NAME, FILES_NAME, MAX_CARD_BYTES, MAX_FILES_BYTES, DatasetCard
from shardkit.datasets.locate import INDEX_NAMES
from shardkit.errors import ShardError
from shardkit.formats.mds.index import TABLE_NAME
from shardkit.formats.text import TEXT_FORMATS, TEXT_INDEX_NAME, parse_text_index, text_index_bytes
from shardkit.formats.trainers import TRAINER_FORMATS
from shardkit.hashing import HASH_NAMES, digest_of, hash_bytes
from shardkit.manifest import FileInfo, Manifest
from shardkit.storage.store import METADATA_NAME, ObjectInfo, ObjectNotFoundError, Store

__all__ = [
    "CONTENT_HASH",
    "INDEX_NAMES",
    "LOCK_NAME",
    "MARKER_NAME",
    "MAX_TRIES",
    "Contents",
    "Listing",
    "check_files",
    "checkable_hash",
    "content_hash",
    "find_contents",
    "find_only_contents",
    "head_if_any",
    "index_files",
    "make_contents",
    "with_files",
    "with_table",
]

MARKER_NAME = ".shardkit-publishing.json"
LOCK_NAME = ".shardkit-publishing.lock"
CONTENT_HASH = "xxh3_128"
MAX_TRIES = 3  # how often a file is fetched if its hash is wrong, in case the network damaged it
MAX_FILES = 1 << 22  # maximum number of files of one transfer: four million, as in the largest index
MAX_NAMED = 8  # maximum number of files that an error names
MAX_LEFT = 1000  # maximum number of files outside the dataset that a listing names; it counts all
_HASH_NAME = "shardkit-dataset"
_CONTROL_NAMES = frozenset({*INDEX_NAMES, MARKER_NAME, LOCK_NAME})
# Hash names, fastest first; all other hashes count as slower, in alphabetical order.
_QUICKEST = ("xxh3_128", "xxh128", "xxh3_64", "xxh64", "xxh32", "blake2b", "sha1", "sha256", "md5")


@dataclass(frozen=True)
class Contents:
    """A dataset's files in writing order: shards, files that the card lists, the card, index.bin.

    `card` includes the files that files.json lists; `card_bytes` is the card as stored. The index is not in
    `files`: it is written after all of them.
    """

    where: str
    manifest: Manifest
    index_name: str
    index: bytes
    card: DatasetCard | None
    card_bytes: bytes | None
    files: tuple[FileInfo, ...]

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all files except the index."""
        return frozenset(file.basename for file in self.files)

    @property
    def owned(self) -> frozenset[str]:
        """Names of files to delete when another dataset replaces this one; includes card and index.bin."""
        return self.names | {CARD_NAME, TABLE_NAME}

    @property
    def bytes(self) -> int:
        """The size of all files except the index, in bytes."""
        return sum(file.bytes for file in self.files)

    @cached_property
    def identity(self) -> str:
        """A digest of index and card, and so of every size and hash that they contain."""
        parts = [self.index, self.card_bytes or b""]
        return digest_of([_HASH_NAME, *(hash_bytes(part, ["blake2b"])["blake2b"] for part in parts)])

    def is_same(self, other: Contents) -> bool:
        """Return whether both have the same stored shards in the same order, and cards that do not differ.

        If only one of them has a card, the cards do not differ.
        """
        if self.identity == other.identity:
            return True
        if self.manifest.format != other.manifest.format or self.index_name != other.index_name:
            return False
        cards = {json.dumps(c.card.data, sort_keys=True) for c in (self, other) if c.card is not None}
        return len(cards) < 2 and list(self.manifest.shards) == list(other.manifest.shards)


@dataclass(frozen=True)
class Listing:
    """The objects in a store: `found` maps requested names to objects.

    `others` names up to `MAX_LEFT` objects that were not requested; `other_count` counts all of them.
    """

    found: Mapping[str, ObjectInfo]
    others: tuple[str, ...]
    other_count: int

    @classmethod
    def of(cls, store: Store, names: Set[str]) -> Listing:
        """List the store and look for `names`; indexes, index.bin, marker and lock do not count as others."""
        found: dict[str, ObjectInfo] = {}
        others: list[str] = []
        count = 0
        for info in store.list():
            if info.key in names:
                found[info.key] = info
            elif info.key not in _CONTROL_NAMES and info.key != TABLE_NAME:
                count += 1
                if count <= MAX_LEFT:
                    others.append(info.key)
        return cls(found, tuple(others), count)

    def find(self, store: Store, name: str) -> ObjectInfo | None:
        """Return an object or None; ask the store if it is not listed, since listings skip linked folders."""
        return self.found.get(name) or head_if_any(store, name)


def head_if_any(store: Store, name: str) -> ObjectInfo | None:
    """Return size, version and metadata of an object, or None if it does not exist."""
    try:
        return store.head(name)
    except ObjectNotFoundError:
        return None


def find_contents(store: Store, *, strict: bool = True) -> list[Contents]:
    """Return the datasets whose indexes are in a store: none, one, or several if it has several indexes.

    Raises ShardError if an index or a card is invalid. If not `strict`, an invalid card counts as missing.
    """
    found = []
    for name in INDEX_NAMES:
        index = _read(store, name)
        if index is None:
            continue
        try:
            card = _read(store, CARD_NAME)
            listed = _read(store, FILES_NAME) if card is not None and FILES_NAME.encode() in card else None
            found.append(make_contents(store.url, name, index, card, listed=listed))
        except ShardError:
            if strict:
                raise
            found.append(make_contents(store.url, name, index, None))
    return found


def find_only_contents(store: Store) -> Contents | None:
    """Return the dataset in a store, or None. Raises ShardError if there are two."""
    found = find_contents(store)
    if len(found) > 1:
        names = " and ".join(contents.index_name for contents in found)
        raise ShardError(store.url, f"has both {names}; remove the one that you do not want")
    return found[0] if found else None


def index_files(manifest: Manifest) -> dict[str, bytes]:
    """Return {name: data} for a dataset's index, preceded by index.bin if there are many shards."""
    from shardkit.formats import mds, tar

    if manifest.format == "mds":
        return mds.index_files(manifest.shards, manifest.blocks)
    if manifest.format in (*TEXT_FORMATS, *TRAINER_FORMATS):
        return {TEXT_INDEX_NAME: text_index_bytes(manifest)}
    return {"shards.json": tar.shard_list_bytes(manifest.shards, manifest.blocks)}


def make_contents(
    where: str,
    index_name: str,
    index: bytes,
    card: bytes | None,
    table: bytes | None = None,
    *,
    listed: bytes | None = None,
) -> Contents:
    """Make a dataset from the bytes of its index, card, index.bin (`table`) and files.json (`listed`).

    Raises ShardError if they are invalid or contradict each other.
    """
    from shardkit.formats import mds, tar

    index_file = f"{where}/{index_name}"
    parsers = {"index.json": mds.parse_index, "shards.json": tar.parse_shard_list}
    manifest = parsers.get(index_name, parse_text_index)(index_file, index)
    files = [shard.stored for shard in manifest.shards]
    facts = None
    if card is not None:
        facts = DatasetCard.parse(f"{where}/{CARD_NAME}", card)
        facts.check_fingerprint(manifest.fingerprint)
        if facts.files_table is not None:
            if listed is None:
                raise ShardError(f"{where}/{FILES_NAME}", "is missing, but the card refers to it")
            facts = facts.with_files(listed)
        files += [facts.file(name) for name in facts.file_names]
        files.append(FileInfo(CARD_NAME, len(card), {CONTENT_HASH: content_hash(card)}))
    if (blocks := manifest.blocks) is not None and (stated := _named(files, blocks.basename)) != blocks:
        if stated is not None:
            raise ShardError(
                index_file,
                f"states a size or hash for {blocks.basename} that differs from the one in {CARD_NAME}",
            )
        files.append(blocks)
    if len(files) > MAX_FILES:
        raise ShardError(
            index_file, f"names {len(files):,} files; the limit of one transfer is {MAX_FILES:,}"
        )
    seen = set(_CONTROL_NAMES)
    for file in files:
        if file.basename in seen:
            raise ShardError(index_file, f"{file.basename!r} is named twice; repair the index first")
        seen.add(file.basename)
    contents = Contents(where, manifest, index_name, index, facts, card, tuple(files))
    return contents if table is None else with_table(contents, table)


def _named(files: Iterable[FileInfo], name: str) -> FileInfo | None:
    return next((file for file in files if file.basename == name), None)


def with_table(contents: Contents, table: bytes) -> Contents:
    """Return the dataset with `table`, its index.bin, added."""
    return with_files(contents, [FileInfo(TABLE_NAME, len(table), {CONTENT_HASH: content_hash(table)})])


def with_files(contents: Contents, files: Iterable[FileInfo]) -> Contents:
    """Return the dataset with `files` added, which neither its index nor its card names."""
    return replace(contents, files=(*contents.files, *files))


def check_files(store: Store, contents: Contents) -> tuple[Contents, Listing]:
    """Return `contents` with the actual sizes of its files in `store`, and the listing of the store.

    Raises ShardError that names files which are missing or have another size.
    """
    listing = Listing.of(store, contents.names)
    problems: list[str] = []
    files = []
    for file in contents.files:
        info = listing.find(store, file.basename)
        if info is None:
            problems.append(f"{file.basename} is missing")
        elif file.bytes >= 0 and file.bytes != info.bytes:
            problems.append(f"{file.basename} has {info.bytes:,} bytes instead of {file.bytes:,}")
        else:
            files.append(replace(file, bytes=info.bytes))
        if len(problems) > MAX_NAMED:
            break
    if problems:
        more = ", and more" if len(problems) > MAX_NAMED else ""
        text = "; ".join(problems[:MAX_NAMED])
        raise ShardError(contents.where, f"is incomplete: {text}{more}; run shardkit verify for details")
    return replace(contents, files=tuple(files)), listing


def checkable_hash(file: FileInfo) -> str | None:
    """Return the name of the file's fastest known hash, or None if it has no known hash."""
    by_speed = (*_QUICKEST, *sorted(HASH_NAMES.difference(_QUICKEST)))
    return next((name for name in by_speed if name in file.hashes), None)


def content_hash(data: bytes) -> str:
    """Return the xxh3-128 of data, which published objects have in their metadata."""
    return hash_bytes(data, [CONTENT_HASH])[CONTENT_HASH]


def _read(store: Store, name: str) -> bytes | None:
    from shardkit.formats.mds.index import MAX_INDEX_BYTES

    try:
        info = store.head(name)
        limit = {CARD_NAME: MAX_CARD_BYTES, FILES_NAME: MAX_FILES_BYTES}.get(name, MAX_INDEX_BYTES)
        if info.bytes > limit:
            raise ShardError(f"{store.url}/{name}", f"has {info.bytes:,} bytes; the limit is {limit:,}")
        kept = info.metadata.get(METADATA_NAME)
        for _ in range(MAX_TRIES):
            data = store.get(name, version=info.version)
            got = content_hash(data)
            if kept in (None, got):
                return data
        problem = f"has {CONTENT_HASH} {got}, but its metadata {kept}, after {MAX_TRIES} fetches"
        raise ShardError(f"{store.url}/{name}", f"{problem}: upload it again")
    except ObjectNotFoundError:
        return None
