"""Locate a dataset by its index, its list of tars, its tars, its row files or its flat token files.

Paths and URLs may name a folder, an index, or tars: one, a brace list, a pattern, or several of these. Only
the index and the card are read, no shard. For tars without a list, the result `Found` has only their names,
sizes and versions; `shardkit.datasets.dataset` scans them. `LocalFiles` detects that a local dataset is
replaced while it is open.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardkit.card import CARD_NAME, MAX_CARD_BYTES, DatasetCard
from shardkit.datasets.image_files import find_image_files, find_listed_images, is_image_list
from shardkit.datasets.range_store import RangeRows
from shardkit.datasets.row_files import find_rows, names_rows
from shardkit.datasets.text_rows import TextRows
from shardkit.datasets.token_rows import RowCut, find_token_rows, is_token_file
from shardkit.errors import ShardError, ShardNotFoundError
from shardkit.formats.text import TEXT_INDEX_NAME, parse_text_index
from shardkit.formats.trainers import TRAINER_FORMATS, dtype_of_stream
from shardkit.manifest import Manifest, ShardInfo
from shardkit.storage.local import LocalStore
from shardkit.storage.resilient import ResilientStore, connect
from shardkit.storage.store import (
    METADATA_NAME,
    ObjectInfo,
    ObjectNotFoundError,
    StorageOptions,
    Store,
    StoreError,
    read_body,
    without_password,
)
from shardkit.storage.url import is_remote, local_path, split_url

if TYPE_CHECKING:
    from shardkit.cache.indexes import NodeIndexes


INDEX_NAMES = ("index.json", "shards.json", TEXT_INDEX_NAME)
_FORBIDDEN = 403
_OPEN_AGAIN = "open the dataset again, with a new loader; it accepts a state of the run if the data are equal"
_HEAD_BYTES = 1 << 16
_NO_DATASET = (
    "holds no dataset: looked for index.json (MDS), shards.json, *.tar, *.parquet, *.arrow and *.jsonl files "
    "and for images"
)
TextRowsOf = Callable[[str | Sequence[str]], TextRows]

# (modification time in ns, size in bytes). It has no inode, because file systems in user space may change it.
FileVersion = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Found:
    """A located dataset: its folder or store, to which shard names are relative, its manifest and its card.

    `versions` is set for tars without a list, whose manifest has only names and sizes. `index` is the local
    index file with its version before it was read. `rows` is set for files of tokens, row files and images.
    """

    folder: Path | None
    manifest: Manifest
    card: DatasetCard | None = None
    store: ResilientStore | None = None
    versions: Sequence[str] | None = None
    index: tuple[Path, FileVersion | None] | None = None
    rows: RangeRows | None = None


class LocalFiles:
    """Detects that files of a local dataset are replaced after it was opened.

    Open shards are not checked: a memory map keeps the old content of a file that is replaced by rename. A
    shard that is replaced before it is first opened, while the index is unchanged, is detected by its size,
    or by its hashes if they are verified.
    """

    def __init__(self, found: Found) -> None:
        assert found.folder is not None
        self.folder = found.folder.absolute()
        self._shards = found.manifest.shards
        # Modification time of each shard that was opened, else 0; for scanned tars, the time before the scan.
        self._dates = np.zeros(len(self._shards), dtype=np.int64)
        if found.versions is not None:
            self._dates[:] = [int(version.partition("-")[0]) for version in found.versions]
        self._index: Path | None = None
        self._version: FileVersion | None = None
        if found.index is not None:
            self._index, self._version = found.index[0].absolute(), found.index[1]
        self._newer: tuple[FileVersion, Sequence[ShardInfo]] | None = None
        self.dates: Mapping[str, FileVersion] | None = None if found.rows is None else found.rows.dates()
        """Versions of files whose shards are ranges of them (tokens, row files); None for other datasets."""

    def was_opened(self, number: int) -> bool:
        """Return whether a shard has passed `check` before; its hashes need not be compared again."""
        return bool(self._dates[number])

    def check(self, number: int) -> None:
        """Raise ShardError if the file of shard `number`, just mapped, may not be the one that was indexed.

        If the index was replaced, the new one must have the same hashes for the shard. Takes two stat calls.
        Ranges of token files are checked when they are mapped instead.
        """
        if self.dates is not None:
            return
        info = self._shards[number]
        file = self.folder / info.stored.basename
        if (found := _version(file)) is not None:  # MosaicML's caches may have only the decompressed file
            if self._dates[number] not in (0, found[0]):
                raise ShardError(file, f"was replaced after its dataset was opened; {_OPEN_AGAIN}")
            self._dates[number] = found[0]
        if self._index is None or (version := _version(self._index)) == self._version:
            return
        if version is None:
            raise ShardError(self._index, f"was removed after the dataset was opened; {_OPEN_AGAIN}")
        if self._newer is None or self._newer[0] != version:
            self._newer = (version, find_local(self._index).manifest.shards)
        shards = self._newer[1]
        if number >= len(shards) or shards[number] != info or not (info.stored.hashes or info.raw.hashes):
            problem = (
                f"was replaced after the dataset was opened, and does not prove that {file.name} is the same"
            )
            raise ShardError(self._index, f"{problem}; {_OPEN_AGAIN}")


def _version(file: Path) -> FileVersion | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ShardError(file, f"cannot be accessed: {error.strerror or error}") from error
    return status.st_mtime_ns, status.st_size


def locate(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    storage: StorageOptions | None = None,
    indexes: NodeIndexes | None = None,
    cut: RowCut | None = None,
    columns: Sequence[str] | None = None,
    *,
    texts: TextRowsOf | None = None,
) -> Found:
    """Locate the dataset at a path or URL, or at several paths or URLs of tars or row files.

    `indexes` caches the indexes of remote datasets on this node. `cut` defines the rows of flat files of
    tokens, those that a build wrote for another trainer too. `columns`: those to read of row files.
    `texts` makes rows of tokens of these instead.
    Raises ShardError if the dataset is missing or malformed, and StoreError if a store fails.
    """

    def rows_at(path: str | Sequence[str]) -> Found:
        if texts is not None:
            rows = texts(path)
            found = Found(None, rows.manifest, rows.card, store=rows.store, rows=rows)
        else:
            length = None if cut is None else cut.sequence_length
            find = partial(find_rows, columns=columns, sequence_length=length, indexes=indexes)
            found = _rows(find(path, storage))
        if cut is not None and (cut.token_dtype is not None or cut.per_file):
            where, problem = path if isinstance(path, str) else path[0], "apply to flat files of tokens only"
            raise ShardError(where, f"has rows of its own: token_dtype and per_file {problem}")
        return found

    if not isinstance(path, (str, os.PathLike)):
        names = [os.fspath(name) for name in path]
        if names and all(map(names_rows, names)):
            return rows_at(names)
        return _find_tars(names, storage)
    text = os.fspath(path)
    if is_token_file(text):
        return _find_rows(text, cut, storage)
    if is_image_list(text) and cut is None and texts is None:
        return _rows(find_listed_images(text, storage))
    if names_rows(text) and not _names_index(text, storage):
        return rows_at(text)
    try:
        found = _locate(text, storage, indexes)
    except ShardNotFoundError as error:
        if error.problem.startswith(_NO_DATASET):  # and not the rest of an unfinished upload
            with suppress(ShardNotFoundError):
                return rows_at(text)
            if cut is None:
                with suppress(ShardNotFoundError):
                    return _rows(find_image_files(text, storage))
        if cut is None:
            raise
        return _find_rows(text, cut, storage)
    if cut is None or found.manifest.format not in TRAINER_FORMATS or not found.manifest.shards:
        return found
    folder = text.removesuffix(f"/{TEXT_INDEX_NAME}")
    given = dtype_of_stream(found.manifest.shards[0]).name
    names = [shard.stored.basename for shard in found.manifest.shards]
    return _rows(find_token_rows(folder, replace(cut, token_dtype=given), storage, names=names))


def _names_index(path: str, storage: StorageOptions | None) -> bool:
    """Return whether a path or URL that ends in .json is an index or a list of tars, and not JSON lines."""
    folder, _, name = path.rpartition("/")
    if name in (*INDEX_NAMES, CARD_NAME):
        return True
    from shardkit.formats.tar.shard_list import is_pattern

    if not name.endswith(".json") or is_pattern(path) or "{" in path:
        return False
    try:
        store = connect(folder, storage, shares_limit=True) if is_remote(path) else LocalStore(folder or ".")
        head = store.get(name, 0, min(_HEAD_BYTES, store.head(name).bytes))
    except StoreError:
        return is_remote(path) or not local_path(path).is_dir()  # it is missing; Spark writes such folders
    return b'"shardlist"' in head


def _find_rows(path: str, cut: RowCut | None, storage: StorageOptions | None) -> Found:
    return _rows(find_token_rows(path, cut, storage))


def _rows(rows: RangeRows) -> Found:
    return Found(rows.folder, rows.manifest, store=rows.store, rows=rows)  # a card describes other rows


def _locate(text: str, storage: StorageOptions | None, indexes: NodeIndexes | None) -> Found:
    """Locate a dataset that has an index or a list, or consists of tars."""
    if not is_remote(text):
        return find_local(local_path(text), storage)
    from shardkit.formats.tar.shard_list import is_pattern, is_tar_name

    if is_tar_name(split_url(text)[1]) or "::" in text:
        return _find_tars([text], storage)
    if is_pattern(text) or "{" in text:
        try:  # a folder may have such a name, although it looks like a pattern
            return _locate_remote(text, storage, indexes)
        except ShardNotFoundError:
            return _find_tars([text], storage)
    return _locate_remote(text, storage, indexes)


def _locate_remote(text: str, storage: StorageOptions | None, indexes: NodeIndexes | None) -> Found:
    """Locate the dataset at the URL of an index or a folder. Raises ShardNotFoundError if there is none."""
    folder, name = split_url(text)
    is_index = name.endswith(".json")
    store = connect(folder if is_index else text, storage, shares_limit=True).pinned()
    found = find_remote(store, name if is_index else None, storage, indexes)
    return found if found.store is not None else replace(found, store=store)


def find_local(path: Path, storage: StorageOptions | None = None) -> Found:
    """Locate the dataset at a local path. Raises ShardError if it is missing or malformed."""
    from shardkit.formats.tar.shard_list import is_tar_name

    if path.is_dir():
        return _find_in_folder(path, storage)
    if not path.exists() or is_tar_name(path.name):
        return _find_tars([str(path)], storage)
    if path.suffix != ".json":
        raise ShardError(
            path,
            "is neither a folder, an index (.json), a tar nor a row file; for text: shardkit init; for a "
            "recipe: shardkit build",
        )
    return _read_description(path, storage)


def _read_description(file: Path, storage: StorageOptions | None) -> Found:
    """Read a local index.json, shards.json or documents.json, and the card in its folder."""
    version = _version(file)
    card = DatasetCard.read(file.parent / CARD_NAME)
    if file.name == "index.json":
        from shardkit.formats import mds

        found = Found(file.parent, mds.read_index(file), card)
    else:
        from shardkit.formats.tar.shard_list import read_list

        if file.name == TEXT_INDEX_NAME:
            found = Found(file.parent, parse_text_index(file, read_list(file)), card)
        else:
            found = _listed(file, read_list(file), file.parent, card, storage)
    return replace(found, index=(file, version))


def _listed(
    where: str | os.PathLike[str],
    text: bytes,
    folder: Path | None,
    card: DatasetCard | None,
    storage: StorageOptions | None,
) -> Found:
    """Parse a list of tars (shards.json); the tars are in the list's folder or at the URLs that it has."""
    from shardkit.formats.tar.shard_list import parse_listing

    base, manifest = parse_listing(where, text)
    if base is None:
        return Found(folder, manifest, card)
    if _place(base) != _place(os.fspath(where)) and not (storage and storage.follow_urls):
        raise ShardError(
            where,
            f"lists tars elsewhere, at {without_password(base)}: requests would go there, signed with your "
            "credentials; if you trust this list, pass --storage follow_urls=true or "
            "StorageOptions(follow_urls=True)",
        )
    return Found(None, manifest, card, connect(base, storage, shares_limit=True).pinned())


def _place(url: str) -> str:
    """Return the bucket or host of a URL; "" for a path."""
    return "/".join(url.split("/", 3)[:3]).lower() if is_remote(url) else ""


def find_remote(
    store: Store,
    index_name: str | None = None,
    storage: StorageOptions | None = None,
    indexes: NodeIndexes | None = None,
) -> Found:
    """Locate the dataset in a store with two or three requests; `index_name` is the index that a user named.

    With `indexes`, one process of the node sends the requests for all. Without an index, the folder's tars
    are listed. A dataset with a card was built or published as a whole, so no second index is requested. For
    a large dataset, index.bin is fetched; only the metadata of index.json are read then.
    """
    from shardkit.formats import mds
    from shardkit.formats.mds.index import INDEX_NAME, TABLE_NAME, load_table

    names = [index_name] if index_name else [*INDEX_NAMES]
    errors: list[StoreError] = []

    def fetch() -> dict[str, bytes | None]:
        first = names[0]
        with ThreadPoolExecutor(1, thread_name_prefix="shardkit-open") as pool:
            pending = pool.submit(_get, store, CARD_NAME, errors)
            is_json = first == INDEX_NAME
            found = _get_index(store, errors) if is_json else {first: _get(store, first, errors)}
            card = pending.result()
        has_index = any(text is not None for text in found.values())
        for name in names[1:]:
            is_known = has_index and (card is not None or name == TEXT_INDEX_NAME)  # text has cards, too
            found[name] = None if is_known else _get(store, name, errors)
        return {CARD_NAME: card, TABLE_NAME: None} | found

    answers: Mapping[str, bytes | Path | None]
    answers = (
        fetch() if indexes is None else indexes.objects(store.url, [CARD_NAME, TABLE_NAME, *names], fetch)
    )
    there = [(name, found) for name in [TABLE_NAME, *names] if (found := answers[name]) is not None]
    card_text = None if (found := answers[CARD_NAME]) is None else _text(found)
    if not there:
        return _find_in_store(store, names, card_text, errors, is_named=index_name is not None)
    if len(there) > 1:
        both = " and ".join(name for name, _ in there)
        raise ShardError(store.url, f"has both {both}; open one of them by its name")
    [(name, found)] = there
    where = f"{store.url}/{name}"
    card = None if card_text is None else DatasetCard.parse(f"{store.url}/{CARD_NAME}", card_text)
    if name == TEXT_INDEX_NAME:
        return Found(None, parse_text_index(where, _text(found)), card)
    if name not in (INDEX_NAME, TABLE_NAME):
        return _listed(where, _text(found), None, card, storage)
    if name == TABLE_NAME:
        if (table := load_table(found, is_proved=True)) is None:
            raise ShardError(where, "the copy in the cache folder is damaged; remove its `indexes` folder")
        return Found(None, Manifest("mds", table, blocks=table.blocks), card)
    if indexes is not None and isinstance(found, Path):
        return Found(None, indexes.index(found, where), card)
    return Found(None, mds.parse_index(where, _text(found)), card)


def _text(found: bytes | Path) -> bytes:
    return found.read_bytes() if isinstance(found, Path) else found


def _get_index(store: Store, errors: list[StoreError]) -> dict[str, bytes | None]:
    """Fetch index.bin if it is valid and belongs to the current index.json, otherwise index.json.

    Every upload stores the hash of index.json in the object's metadata, which arrive before its bytes.
    """
    from shardkit.formats.mds.index import INDEX_NAME, LARGE_INDEX_BYTES, TABLE_NAME, load_table

    try:
        with store.open(INDEX_NAME) as body:
            info = body.info
            digest = info.metadata.get(METADATA_NAME)
            _check_size(store, info)
            if info.bytes < LARGE_INDEX_BYTES or digest is None:
                return {INDEX_NAME: read_body(body, f"{store.url}/{INDEX_NAME}").tobytes()}
        # The body is closed first: if the store throttles requests, it may hold the only connection.
        table = _get(store, TABLE_NAME, [])
        if table is not None and load_table(table, (info.bytes, digest)) is not None:
            return {INDEX_NAME: None, TABLE_NAME: table}
        return {INDEX_NAME: _get(store, INDEX_NAME, errors)}
    except StoreError as error:
        _check_missing(error, INDEX_NAME, errors)
        return {INDEX_NAME: None}


def _get(store: Store, key: str, errors: list[StoreError]) -> bytes | None:
    """Fetch an object; None if it is missing.

    S3 answers 403 for a missing object if the caller may not list; such errors are added to `errors`.
    """
    try:
        with store.open(key) as body:
            _check_size(store, body.info)
            return read_body(body, f"{store.url}/{key}").tobytes()
    except StoreError as error:
        _check_missing(error, key, errors)
        return None


def _check_size(store: Store, info: ObjectInfo) -> None:
    """Raise ShardError, before memory is allocated, if an object is too large for an index or a card."""
    from shardkit.formats.mds.index import MAX_INDEX_BYTES

    limit = MAX_CARD_BYTES if info.key == CARD_NAME else MAX_INDEX_BYTES
    if info.bytes > limit:
        problem = f"the store states {info.bytes:,} bytes; at most {limit:,} are read; upload it again"
        raise ShardError(f"{store.url}/{info.key}", problem)


def _check_missing(error: StoreError, key: str, errors: list[StoreError]) -> None:
    """Raise `error` unless it means that the object is missing, or may be missing (403)."""
    if isinstance(error, ObjectNotFoundError):
        return
    if error.status != _FORBIDDEN:
        raise error
    if key != CARD_NAME:
        errors.append(error)


def _find_in_store(
    store: Store, names: list[str], card: bytes | None, errors: Sequence[StoreError], *, is_named: bool
) -> Found:
    """Locate the tars of a folder without an index. Raises ShardError if there are none."""
    from shardkit.formats.tar.find import folder_tars

    if errors:
        raise errors[0]
    if is_named:
        raise ShardNotFoundError(store.url, f"holds no {names[0]}")
    if card is not None:
        problem = "is unfinished: it has a card but no index; run the upload or the build again"
        raise ShardError(store.url, problem)
    objects = folder_tars(store)
    if not objects:
        raise ShardNotFoundError(store.url, _NO_DATASET)
    return _unscanned(None, objects)


def _find_tars(names: Sequence[str], storage: StorageOptions | None) -> Found:
    """Locate tars by name, without a card: a card describes a whole dataset, not a selection of tars."""
    from shardkit.formats.tar.find import expand, is_there, local_tars, remote_tars

    if not (len(names) == 1 and Path(names[0]).exists()):  # a file may have the name "a{1}.tar"
        names = expand(names, lambda name: is_there(name, storage))
    remote = [is_remote(name) for name in names]
    if all(remote):
        store, objects = remote_tars(names, storage)
        return _unscanned(None, objects, store)
    if any(remote):
        raise ShardError(
            names[remote.index(False)], "is local but others are remote; open each as a separate stream"
        )
    folder, objects = local_tars([str(local_path(name)) for name in names])
    return _unscanned(folder, objects)


def _unscanned(
    folder: Path | None, objects: Sequence[ObjectInfo], store: ResilientStore | None = None
) -> Found:
    from shardkit.formats.tar.find import unscanned

    return Found(folder, unscanned(objects), store=store, versions=[info.version for info in objects])


def _find_in_folder(folder: Path, storage: StorageOptions | None) -> Found:
    from shardkit.formats.tar.find import local_objects, refuse_unfinished
    from shardkit.formats.tar.shard_list import tar_files

    there = [folder / name for name in INDEX_NAMES if (folder / name).is_file()]
    if len(there) > 1:
        both = " and ".join(file.name for file in there)
        raise ShardError(folder, f"has both {both}; open one of them by its name")
    if there:
        return _read_description(there[0], storage)
    if (folder / CARD_NAME).exists() or (folder / "provenance").is_dir():
        missing = " nor ".join(INDEX_NAMES[:2])
        raise ShardError(folder, f"is an unfinished build: it has neither {missing} yet; run the build again")
    names = tar_files(folder)
    if not names:
        refuse_unfinished(str(folder), sorted(file.name for file in folder.iterdir()))
        problem = _NO_DATASET
        parts = sorted(file.parent.name for file in folder.glob("*/index.json"))[:3]
        if parts:
            problem += (
                f"; but its sub-folders do ({', '.join(parts)}, …): give each as a Stream, or merge indexes"
            )
        raise ShardNotFoundError(folder, problem)
    return _unscanned(folder, local_objects(folder, names))
