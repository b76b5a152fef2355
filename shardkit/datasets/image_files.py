"""Open a folder of image files, local or in a store, as a dataset whose shards are groups of files.

`find_image_files` lists the files and makes a manifest whose shards are consecutive files, up to
`SHARD_FILES` and `SHARD_BYTES`. Nothing is copied or converted, and all code that reads shards works with
them (cache, prefetch, eviction, resume). Rows are those of torchvision's `ImageFolder`, in its order: by
class, folder and name. Classes are the folders directly below the dataset's, numbered in the order of their
names. Local files are mapped while they are decoded; remote ones are read by `RangeStore`, one request each.

Fingerprint. It is computed from the names and sizes of all files, which no hash proves: an image replaced by
another of the same size is not noticed between runs. Within a run, a file that is replaced is an error.

Cost. A listing takes one request per 1,000 files, at each start. A store answers a request in tens of
milliseconds, so that a node gets some hundred images a second from it (`connections` at a time): convert
larger datasets to shards (`shardkit convert`). Local folders have no such limit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike

from shardkit.arrays import Bytes
from shardkit.datasets.range_store import RangeRows, connect_ranges
from shardkit.errors import ShardError, ShardNotFoundError, warn_user
from shardkit.formats.budget import SampleBudget
from shardkit.formats.mds.images import decode_as
from shardkit.formats.tokens import Piece, name_of
from shardkit.manifest import Column, FileInfo, Manifest, ShardInfo
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import ObjectInfo, StorageOptions
from shardkit.storage.url import is_remote, local_path

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""The extensions of image files, as torchvision's ImageFolder has them; their case does not matter."""
SHARD_FILES = 32  # files that are planned, fetched and cached together
SHARD_BYTES = 4 << 20
MAX_FILES = 1 << 20
SLOW_FILES = 100_000  # remote files above which reading each by a request is warned of


@dataclass(frozen=True, slots=True)
class ImageFiles(RangeRows):
    """The image files of a folder, and the number of each class."""

    labels: Mapping[str, int]


def find_image_files(path: str, storage: StorageOptions | None = None) -> ImageFiles:
    """Find the image files in a folder, local or in a store, and in its sub-folders.

    Names that begin with a dot are left out. Raises ShardNotFoundError if there are none, and ShardError if
    some are in folders of classes and others are not, or if there are too many.
    """
    store = connect_ranges(path.rstrip("/"), storage)
    found = []
    for info in store.list():
        is_hidden = any(part.startswith(".") for part in info.key.split("/"))
        if info.key.lower().endswith(IMAGE_SUFFIXES) and not is_hidden:
            found.append(info)
            if len(found) > MAX_FILES:
                problem = f"has more than {MAX_FILES:,} image files: write shards with `shardkit convert`"
                raise ShardError(path, f"{problem}, from one class at a time")
    if not found:
        raise ShardNotFoundError(path, f"holds no image files ({', '.join(IMAGE_SUFFIXES)})")
    if is_remote(path) and len(found) > SLOW_FILES:
        warn_user(
            f"{path}: has {len(found):,} image files, and each takes a request: `shardkit convert` writes "
            "shards, which are fetched much faster"
        )
    found.sort(key=lambda info: (class_of(info.key), *_folder_and_name(info.key)))
    classes = sorted({class_of(info.key) for info in found})
    if "" in classes and len(classes) > 1:
        inside, outside = (
            next(i.key for i in found if bool(class_of(i.key)) is are) for are in (True, False)
        )
        problem = f"has images in folders ({inside}), which are classes, and others beside them ({outside})"
        raise ShardError(path, f"{problem}: move them into a folder, or open the folders as streams")
    labels = {} if classes == [""] else {name: number for number, name in enumerate(classes)}
    folder = None if is_remote(path) else local_path(path)
    versions = {info.key: info.version for info in found}
    remote = store if isinstance(store, ResilientStore) else None
    return ImageFiles(folder, remote, _manifest(found, labels), versions, labels)


def class_of(path: str) -> str:
    """Return the class of an image file: the first folder of its name, or "" for one directly in the root."""
    return path.partition("/")[0] if "/" in path else ""


def _folder_and_name(key: str) -> tuple[str, str]:
    """Return (folder, name) of a file, by which torchvision sorts the files of a class."""
    folder, _, name = key.rpartition("/")
    return folder, name


def _manifest(files: Sequence[ObjectInfo], labels: Mapping[str, int]) -> Manifest:
    are_png = all(info.key.lower().endswith(".png") for info in files)
    columns = [Column("image", "png" if are_png else "jpeg"), Column("path", "str")]
    if labels:
        columns.insert(1, Column("label", "int"))
    shards = []
    for pieces in _shards(files):
        size = sum(piece.bytes for piece in pieces)
        shards.append(ShardInfo(FileInfo(name_of(pieces), size), len(pieces), tuple(columns)))
    digest = hashlib.blake2b("\0".join(labels).encode(), digest_size=16)
    return Manifest("image_files", shards, seen=digest.hexdigest())


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

    `image` is the file, decoded as the option `decode` says (`formats.mds.images`), `label` the number of its
    class, and `path` its name in the dataset's folder.
    """

    def __init__(
        self,
        where: str | PathLike[str],
        info: ShardInfo,
        pieces: Sequence[Piece],
        read: Callable[[int], Bytes],
        labels: Mapping[str, int],
        *,
        decode: bool | str = True,
    ) -> None:
        """`where`: the dataset's folder or URL. `read`: returns the bytes of file number i of `pieces`.

        `labels`: the number of each class.
        """
        self.info = info
        self._where, self._pieces, self._read = where, pieces, read
        self._labels, self._decode = labels, decode

    def __len__(self) -> int:
        return self.info.samples

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.info.columns

    def sample(self, row: int, columns: Container[str] | None = None) -> dict[str, object]:
        """Return {"image": …, "label": …, "path": …} of one file, of `columns` only if they are given.

        Raises IndexError unless 0 <= row < len, and ShardError if the image cannot be decoded.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"{os.fspath(self._where)}: no row {row}; the shard has {len(self)} files")
        path = self._pieces[row].file
        values: dict[str, object] = {}
        for column in self.columns:
            if columns is not None and column.name not in columns:
                continue
            if column.name == "image":
                values["image"] = self._image(row, path)
            else:
                values[column.name] = path if column.name == "path" else self._labels[class_of(path)]
        return values

    def payloads(self, row: int) -> dict[str, memoryview]:
        """Return {column: bytes} of one file in the columns' encodings; the image as it is stored."""
        path = self._pieces[row].file
        values = {"image": self._read(row).data, "path": memoryview(path.encode())}
        if self._labels:
            values["label"] = memoryview(self._labels[class_of(path)].to_bytes(8, "little"))
        return values

    def fixed_rows(self, column: str) -> None:
        """Return None: no column has values of constant size in one piece of memory."""

    def close(self) -> None:
        """Do nothing: files are opened only while they are read."""

    def _image(self, row: int, path: str) -> object:
        data = self._read(row).data
        try:
            return decode_as(data, self._decode, SampleBudget(len(data)), more_formats=True)
        except ValueError as error:
            raise ShardError(f"{os.fspath(self._where)}/{path}", str(error)) from error
