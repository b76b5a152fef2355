"""Open a folder of image files, local or in a store, as a dataset whose shards are groups of files.

`find_image_files` lists the files and makes a manifest whose shards are consecutive files, up to
`SHARD_FILES` and `SHARD_BYTES`. Nothing is copied or converted, and all code that reads shards works with
them (cache, prefetch, eviction, resume). Rows are those of torchvision's `ImageFolder`, in its order: by
class, folder and name. Classes are the folders directly below the dataset's, numbered in the order of their
names. A list of images (`find_listed_images`) has other columns and an order of its own instead. Local files
are mapped while they are decoded; remote ones are read by `RangeStore`, one request each.

Fingerprint. It is computed from the names and sizes of all files, which no hash proves: an image replaced by
another of the same size is not noticed between runs. Within a run, a file that is replaced is an error.

Cost. A listing takes one request per 1,000 files, at each start. A store answers a request in tens of
milliseconds, so that a node gets some hundred images a second from it (`connections` at a time): convert
larger datasets to shards (`shardkit convert`). Local folders have no such limit.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from typing import Any

from shardkit.arrays import Bytes
from shardkit.datasets.range_store import AnyStore, RangeRows, connect_ranges
from shardkit.errors import NOT_WHOLE, ShardError, ShardNotFoundError, warn_user
from shardkit.files import load_json
from shardkit.formats.budget import SampleBudget
from shardkit.formats.mds.encodings import encoding_of
from shardkit.formats.mds.images import decode_as
from shardkit.formats.tokens import Piece, name_of
from shardkit.manifest import Column, FileInfo, Manifest, ShardInfo
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import ObjectInfo, StorageOptions
from shardkit.storage.url import is_remote, local_path, split_url

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""The extensions of image files, as torchvision's ImageFolder has them; their case does not matter."""
SHARD_FILES = 32  # files that are planned, fetched and cached together
SHARD_BYTES = 4 << 20
MAX_FILES = 1 << 20
MAX_LIST_BYTES = 512 << 20
SLOW_FILES = 100_000  # remote files above which reading each by a request is warned of


LIST_NAME = "metadata.jsonl"
"""The name of lists of images in JSON lines, as in Hugging Face's folders of images."""
_LISTS = ("metadata.csv", LIST_NAME)
_NAMES = ("file_name", "path", "file", "image")
_FOR_TEXT = "for text: shardkit init"


@dataclass(frozen=True, slots=True)
class ImageFiles(RangeRows):
    """The image files of a dataset; `values` are those of its columns besides `image` and `path`, by row."""

    values: Mapping[str, Sequence[Any]]

    def values_of(self, number: int) -> dict[str, Sequence[Any]]:
        """Return the values of the rows of shard `number`."""
        low, high = self.manifest.shard_starts[number : number + 2].tolist()
        return {name: values[low:high] for name, values in self.values.items()}


def is_image_list(path: str) -> bool:
    """Return whether a path or URL names a list of images: a CSV file, or metadata.jsonl."""
    return path.endswith(".csv") or path.rpartition("/")[2] == LIST_NAME


def find_image_files(path: str, storage: StorageOptions | None = None) -> ImageFiles:
    """Find the image files in a folder, local or in a store, and in its sub-folders.

    If it has a metadata.csv or metadata.jsonl, that is the list of its images. Names that begin with a dot
    are left out. Raises ShardNotFoundError if there are none, and ShardError if some are in folders of
    classes and others are not, or if there are too many.
    """
    store = connect_ranges(path.rstrip("/"), storage)
    found = []
    for info in store.list():
        if info.key in _LISTS:
            return find_listed_images(f"{path.rstrip('/')}/{info.key}", storage)
        is_hidden = any(part.startswith(".") for part in info.key.split("/"))
        if info.key.lower().endswith(IMAGE_SUFFIXES) and not is_hidden:
            found.append(info)
            _check_count(path, len(found))
    if not found:
        raise ShardNotFoundError(path, f"holds no image files ({', '.join(IMAGE_SUFFIXES)})")
    found.sort(key=lambda info: (_class_of(info.key), *_folder_and_name(info.key)))
    of_rows = [_class_of(info.key) for info in found]
    classes = sorted(set(of_rows))
    if "" in classes and len(classes) > 1:
        inside = next(info.key for info in found if _class_of(info.key))
        problem = f"has images in folders ({inside}), which are classes, and others beside them"
        problem += f" ({found[0].key}): move them into a folder, or open the folders as streams"
        raise ShardError(path, problem)
    if classes == [""]:
        return _dataset(path, store, found, {}, {})
    numbers = {name: number for number, name in enumerate(classes)}
    labels = {"label": [numbers[name] for name in of_rows]}
    return _dataset(path, store, found, labels, {"label": "int"}, "\0".join(classes))


def find_listed_images(path: str, storage: StorageOptions | None = None) -> ImageFiles:
    """Find the images that a file of CSV or JSON lines lists, with its other columns, in its order.

    The files are named by the first of the columns `file_name`, `path`, `file` and `image` that is there,
    relative to the list's folder. Raises ShardError for a malformed list and for files that do not exist.
    """
    folder, name = _split(path)
    store = connect_ranges(folder, storage)
    size = store.head(name).bytes
    if size > MAX_LIST_BYTES:
        problem = f"is too large for a list of images: {size:,} bytes, at most {MAX_LIST_BYTES:,}"
        raise ShardError(path, f"{problem}; {_FOR_TEXT}")
    data = store.get(name)
    columns = _parse_list(path, data)
    named = next((column for column in _NAMES if column in columns), None)
    if named is None:
        have = ", ".join(columns) or "none"
        problem = f"is no list of images: it has no {' or '.join(_NAMES)}, only {have:.200}"
        raise ShardError(path, f"{problem}; {_FOR_TEXT}")
    names = columns.pop(named)
    _check_count(path, len(names))
    if clash := columns.keys() & {"image", "path"}:
        raise ShardError(path, f"has the columns {named!r} and {min(clash)!r}: rename the latter")
    for number, file in enumerate(names):
        if not isinstance(file, str) or not file or {"", ".", ".."} & {*file.split("/")}:
            where = f"image {number + 1} is {file!r:.200}"
            raise ShardError(path, f"{where}, not the name of a file relative to the list's folder")
    prefix = os.path.commonprefix(names)  # noqa: RUF071 (of keys, not folders)
    there = {info.key: info for info in store.list(prefix)}
    if missing := next((file for file in names if file not in there), None):
        raise ShardError(path, f"lists {missing!r:.200}, but there is no such file in {folder or '.'}")
    encodings = {column: _encoding_of(values) for column, values in columns.items()}
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return _dataset(folder, store, [there[file] for file in names], columns, encodings, digest)


def _check_count(path: str, count: int) -> None:
    if count > MAX_FILES:
        problem = f"has more than {MAX_FILES:,} image files: write shards with `shardkit convert`"
        raise ShardError(path, f"{problem}, from one part at a time")


def _split(path: str) -> tuple[str, str]:
    if is_remote(path):
        return split_url(path)
    place = local_path(path)
    return str(place.parent), place.name


def _parse_list(path: str, data: bytes) -> dict[str, list[Any]]:
    """Return the columns of a file of CSV or JSON lines."""
    try:
        text = data.decode("utf-8-sig")
        if path.endswith(".csv"):
            lines: list[Any] = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
        else:
            lines = [load_json(line) for line in text.split("\n") if line.strip()]
    except (ValueError, csv.Error) as error:
        raise ShardError(path, f"cannot be read: {error}") from error
    if not lines:
        raise ShardError(path, f"lists no images: {NOT_WHOLE}")
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or line.keys() != lines[0].keys() or None in line:
            raise ShardError(path, f"row {number:,} has other columns than the first")
        if path.endswith(".csv") and None in line.values():
            raise ShardError(path, f"row {number:,} has fewer values than columns")
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    return {name: _numbers(values) for name, values in columns.items()} if path.endswith(".csv") else columns


def _numbers(values: list[str]) -> list[Any]:
    """Return the texts of a column as numbers if all are."""
    for kind in (int, float):
        with suppress(ValueError):
            if all(str(value).isascii() and "_" not in value for value in values):
                return [kind(value) for value in values]
    return values


def _encoding_of(values: Sequence[Any]) -> str:
    """Return the encoding, in MDS's terms, of a column of a list."""
    kinds = {type(value) for value in values}
    if kinds == {int} and max(map(abs, values)) < 1 << 63:
        return "int"
    if kinds <= {int, float}:
        return "float64"
    return "str" if kinds == {str} else "json"


def _dataset(
    folder: str,
    store: AnyStore,
    files: Sequence[ObjectInfo],
    values: Mapping[str, Sequence[Any]],
    encodings: Mapping[str, str],
    facts: str = "",
) -> ImageFiles:
    """Return the dataset of these files; `facts` become part of its fingerprint."""
    if is_remote(folder) and len(files) > SLOW_FILES:
        warn_user(
            f"{folder}: has {len(files):,} image files, and each takes a request: `shardkit convert` writes "
            "shards, which are fetched much faster"
        )
    are_png = all(info.key.lower().endswith(".png") for info in files)
    described = [Column(name, encoding) for name, encoding in encodings.items()]
    columns = (Column("image", "png" if are_png else "jpeg"), *described, Column("path", "str"))
    shards = []
    for pieces in _shards(files):
        size = sum(piece.bytes for piece in pieces)
        shards.append(ShardInfo(FileInfo(name_of(pieces), size), len(pieces), columns))
    digest = hashlib.blake2b(facts.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    manifest = Manifest("image_files", shards, seen=digest)
    versions = {info.key: info.version for info in files}
    local = None if is_remote(folder) else local_path(folder or ".")
    return ImageFiles(local, store if isinstance(store, ResilientStore) else None, manifest, versions, values)


def _class_of(path: str) -> str:
    """Return the class of an image file: the first folder of its name, or "" for one directly in the root."""
    return path.partition("/")[0] if "/" in path else ""


def _folder_and_name(key: str) -> tuple[str, str]:
    """Return (folder, name) of a file, by which torchvision sorts the files of a class."""
    folder, _, name = key.rpartition("/")
    return folder, name


def _shards(files: Sequence[ObjectInfo]) -> Iterator[list[Piece]]:
    pieces: list[Piece] = []
    size = 0
    for info in files:
        if pieces and (len(pieces) == SHARD_FILES or size + info.bytes > SHARD_BYTES):
            yield pieces
            pieces, size = [], 0
        pieces.append(Piece(info.key, 0, info.bytes))
        size += info.bytes
    yield pieces


class ImageFilesShard:
    """An open shard of image files, each of them a sample; safe to share among threads.

    `image` is the file, decoded as the option `decode` says (`formats.mds.images`), `path` its name in the
    dataset's folder. Other columns are its `label`, the number of its class, or those of a list.
    """

    def __init__(
        self,
        where: str | PathLike[str],
        info: ShardInfo,
        pieces: Sequence[Piece],
        read: Callable[[int], Bytes],
        values: Mapping[str, Sequence[Any]],
        *,
        decode: bool | str = True,
    ) -> None:
        """`where`: the dataset's folder or URL. `read`: returns the bytes of file number i of `pieces`.

        `values`: those of the columns besides `image` and `path`, one for each file.
        """
        self.info = info
        self._where, self._pieces, self._read = where, pieces, read
        self._values, self._decode = values, decode

    def __len__(self) -> int:
        return self.info.samples

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.info.columns

    def sample(self, row: int, columns: Container[str] | None = None) -> dict[str, object]:
        """Return {"image": …, "path": …, …} of one file, of `columns` only if they are given.

        Raises IndexError unless 0 <= row < len, and ShardError if the image cannot be decoded.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"{os.fspath(self._where)}: no row {row}; the shard has {len(self)} files")
        path = self._pieces[row].file
        values: dict[str, object] = {}
        for column in self.columns:
            if columns is not None and column.name not in columns:
                continue
            is_image = column.name == "image"
            values[column.name] = self._image(row, path) if is_image else self._value(column, row)
        return values

    def payloads(self, row: int) -> dict[str, memoryview]:
        """Return {column: bytes} of one file in the columns' encodings; the image as it is stored."""
        return {
            column.name: self._read(row).data
            if column.name == "image"
            else memoryview(encoding_of(column.encoding).encode(self._value(column, row)))
            for column in self.columns
        }

    def fixed_rows(self, column: str) -> None:
        """Return None: no column has values of constant size in one piece of memory."""

    def close(self) -> None:
        """Do nothing: files are opened only while they are read."""

    def _value(self, column: Column, row: int) -> object:
        if column.name == "path":
            return self._pieces[row].file
        value = self._values[column.name][row]
        return float(value) if column.encoding == "float64" else value

    def _image(self, row: int, path: str) -> object:
        data = self._read(row).data
        try:
            return decode_as(data, self._decode, SampleBudget(len(data)), more_formats=True)
        except ValueError as error:
            raise ShardError(f"{os.fspath(self._where)}/{path}", str(error)) from error
