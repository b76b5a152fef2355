"""Reads litdata's chunk folders: index.json and chunks of tokens (TokensLoader) or any items (PyTreeLoader).

    index.json  {"chunks": [{chunk_bytes, chunk_size (items), dim (tokens), filename}],
                 "config": {data_format, data_spec, item_loader, compression, …}}
    chunk       u32 items n | u32 offsets[n + 1] from the file's start | items
    item        TokensLoader: the values of one array. PyTreeLoader: u32 size of each leaf, then the leaves

With zstd, one frame holds a whole chunk (`compression_level` "chunk"), one item ("sample"), or several items
("batch", the default). With "batch", a chunk is:

    chunk       "LDFZ01\\0\\0" | u16 1 | u16 0 | u32 items n | u32 items per frame | u32 frames
                u32 offsets[n + 1] into the uncompressed items
                per frame: u32 first item, u32 items, u64 offset in the file, u32 bytes, u32 raw bytes
                frames

Each item of a token dataset is a document. litdata's TokensLoader starts its fixed-size blocks anew in each
chunk and leaves out the chunk's last tokens; `per_file` with `drop_tail` gives exactly these rows. A chunk is
held in memory whole, because litdata writes small chunks. Leaves (values of an item) of plain kinds become
MDS columns or tar members. Other leaves are refused by name, as are encrypted chunks and chunks with Arrow's
own compression.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.files import load_json
from shardkit.formats.mds.encodings import encoding_of
from shardkit.hashing import hash_bytes
from shardkit.manifest import Column, FileInfo, checked_basename
from shardkit.tools.convert.columns import to_members, unchanged
from shardkit.tools.convert.source import SOURCE_HASH, Sample, TokenBlock, read_json

_MAX_INDEX_BYTES = 1 << 30
_MAX_CHUNK_BYTES = 1 << 32  # 4 GiB, because the offsets in a chunk are u32
_BATCHES = b"LDFZ01\0\0"
_FRAME = struct.Struct("<IIQII")
_TORCH_DTYPES = {
    0: "float32", 1: "float32", 2: "float64", 3: "float64", 8: "float16", 9: "float16", 11: "uint8",
    12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64", 20: "uint16",
}  # fmt: skip
_NUMPY_DTYPES = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
# Array leaves with a header: {leaf kind: (dtype of the header's integers, {number: dtype of the values})}.
_WITH_HEADER = {"tensor": (">u4", _TORCH_DTYPES), "numpy": ("<u4", dict(enumerate(_NUMPY_DTYPES)))}
# Leaf kinds whose bytes are a valid MDS value as they are: {litdata kind: MDS encoding}.
_SAME = {"str": "str", "bytes": "bytes", "int": "int", "jpeg": "jpeg", "float": "float64", "pil": "pil"}


def is_litdata(folder: Path) -> bool:
    """Return whether the folder's index.json belongs to litdata, not to an MDS dataset."""
    file = folder / "index.json"
    if not file.is_file():
        return False
    with file.open("rb") as handle:
        head = handle.read(1 << 16)
    return b'"shards"' not in head and (b'"chunks"' in head or b'"data_spec"' in head)


def litdata_source(folder: Path, target: str) -> LitdataTokens | LitdataSamples:
    """Return the source that reads a litdata folder: as tokens, or as samples with any columns.

    Raises ShardError if the index is invalid or describes data that cannot be converted.
    """
    index = _Index(folder)
    has_tokens = all(tokens is not None for _, _, _, tokens in index.chunks)
    # Older litdata versions do not record the loader: chunks that all count tokens are for TokensLoader.
    if index.loader == "TokensLoader" or (index.loader is None and has_tokens):
        return LitdataTokens(index)
    if index.loader in ("PyTreeLoader", None):
        return LitdataSamples(index, target)
    raise index.refused(
        f"was written for {index.loader}: only TokensLoader and PyTreeLoader can be converted"
    )


class _Index:
    """The checked content of index.json."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "index.json"
        content = read_json(self.file, _MAX_INDEX_BYTES)
        config, chunks = content.get("config"), content.get("chunks")
        if not isinstance(config, dict) or not isinstance(chunks, list) or not chunks:
            raise self.refused("is not a litdata index: it has no config or no chunks")
        self.config: dict[str, Any] = config
        self.loader = config.get("item_loader")
        if config.get("encryption"):
            raise self.refused("describes encrypted chunks: decrypt them first")
        if config.get("ipc_compression"):
            codec = config["ipc_compression"]
            raise self.refused(f"has ipc_compression {codec!r}: write the chunks without it")
        compression = config.get("compression")
        if compression is not None and not str(compression).startswith("zstd"):
            raise self.refused(f"has compression {compression!r}: only zstd is supported")
        self.level = config.get("compression_level") or ("chunk" if compression is not None else None)
        if self.level not in (None, "chunk", "batch", "sample"):
            raise self.refused(
                f"has compression_level {self.level!r:.40}: only chunk, batch and sample are supported"
            )
        formats = config.get("data_format")
        if not isinstance(formats, list) or not all(isinstance(f, str) for f in formats):
            raise self.refused("has no data_format, or one that is not a list of strings")
        self.formats: list[str] = formats
        self.chunks = [self._chunk(number, chunk) for number, chunk in enumerate(chunks)]

    def refused(self, problem: str) -> ShardError:
        return ShardError(self.file, problem)

    def _chunk(self, number: int, chunk: object) -> tuple[str, int, int, int | None]:
        """Return (file name, bytes, items, tokens) of an entry of "chunks"; tokens may be None (unknown)."""
        if not isinstance(chunk, dict):
            raise self.refused(f"chunk {number:,} is not a JSON object")
        name = checked_basename(chunk.get("filename"), self.file)
        size, items, dim = (chunk.get(key) for key in ("chunk_bytes", "chunk_size", "dim"))
        if type(size) is not int or type(items) is not int or not 0 <= items <= size <= _MAX_CHUNK_BYTES:
            raise self.refused(
                f"chunk {number:,} ({name}) has the invalid sizes chunk_bytes {size!r:.40} and chunk_size "
                f"{items!r:.40}"
            )
        if dim is not None and type(dim) is not int:
            raise self.refused(f"chunk {number:,} ({name}) has {dim!r:.40} tokens (dim), not an integer")
        return name, size, items, dim


class _Litdata:
    """Base class of `LitdataTokens` and `LitdataSamples`: reads and decompresses chunks."""

    kind: ClassVar[str] = "litdata"

    def __init__(self, index: _Index) -> None:
        self._index = index
        self.files = len(index.chunks)
        self.files_done = 0
        self.bytes = sum(size for _, size, _, _ in index.chunks)
        self.digests: list[FileInfo] = []

    @property
    def facts(self) -> Mapping[str, object]:
        return {"item_loader": self._index.loader, "data_format": self._index.formats}

    def _chunks(self) -> Iterator[tuple[Path, npt.NDArray[np.uint8], npt.NDArray[np.int64], int | None, int]]:
        """Yield (path, content, item offsets, tokens by the index or None, stored bytes) of each chunk."""
        for name, _, items, dim in self._index.chunks:
            path = self._index.folder / name
            try:
                stored = path.read_bytes()
            except OSError as error:
                raise ShardError(path, f"cannot be read: {error.strerror or error}") from error
            self.digests.append(FileInfo(name, len(stored), hash_bytes(stored, [SOURCE_HASH])))
            raw = self._unpacked(path, stored)
            yield path, raw, _offsets(path, raw, items), dim, len(stored)
            self.files_done += 1

    def _unpacked(self, path: Path, stored: bytes) -> npt.NDArray[np.uint8]:
        if self._index.level is None:
            return np.frombuffer(stored, np.uint8)
        if self._index.level == "chunk":
            return np.frombuffer(_frame(path, memoryview(stored), _MAX_CHUNK_BYTES), np.uint8)
        items = _items_of_batches if self._index.level == "batch" else _items_of_samples
        return np.frombuffer(_plain_chunk(items(path, stored)), np.uint8)


class LitdataTokens(_Litdata):
    """Reads a TokensLoader dataset, in which each item is one array of tokens."""

    has_documents = True
    max_token: int | None = None
    left_out = ()

    def __init__(self, index: _Index) -> None:
        super().__init__(index)
        dtype = _array_dtype(index.formats[0]) if len(index.formats) == 1 else None
        if dtype is None or np.dtype(dtype).kind not in "ui":
            raise index.refused(f"has data_format {index.formats}, which is not one array of integers")
        self.dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")

    def blocks(self) -> Iterator[TokenBlock]:
        """Yield one block per chunk; each item is a document."""
        document = 0
        for path, raw, offsets, dim, stored in self._chunks():
            body = raw[offsets[0] : offsets[-1]]
            if ((offsets - offsets[0]) % self.dtype.itemsize).any():
                raise ShardError(path, f"has items whose size is not a multiple of a {self.dtype.name} value")
            tokens = (
                body.view(self.dtype)
                if body.ctypes.data % self.dtype.itemsize == 0
                else body.copy().view(self.dtype)
            )
            if dim not in (None, len(tokens)):
                raise ShardError(path, f"has {len(tokens):,} tokens, but the index records {dim:,}")
            ends = (offsets[1:] - offsets[0]) // self.dtype.itemsize
            yield TokenBlock(tokens, ends, str(path), document, 0, stored, ends_file=True)
            document += len(ends)


class LitdataSamples(_Litdata):
    """Reads a PyTreeLoader dataset, in which each item is a dict of leaves or one leaf."""

    has_keys = False

    def __init__(self, index: _Index, target: str) -> None:
        super().__init__(index)
        names = _leaf_names(index)
        columns, self._leaves = [], []
        for name, leaf in zip(names, index.formats, strict=True):
            found = _leaf(leaf)
            if found is None:
                raise index.refused(f"leaf {name!r} is {leaf}, which MDS columns cannot hold")
            encoding, convert = found
            columns.append(Column(name, encoding, encoding_of(encoding).size))
            self._leaves.append(convert)
        try:
            mapped = to_members(columns) if target == "wds" else unchanged(columns)
        except ValueError as error:
            raise index.refused(str(error)) from error
        self._columns = list(zip(columns, mapped, strict=True))
        self.columns = {column.target: column.encoding for column in mapped}
        self.names = {column.target: column.source for column in mapped}

    def samples(self) -> Iterator[Sample]:
        """Yield items in order; raises ShardError for a damaged item."""
        for path, raw, offsets, _, stored in self._chunks():
            for row in range(len(offsets) - 1):
                place = f"{path}: item {row:,}"
                data = raw[offsets[row] : offsets[row + 1]].data
                try:
                    values = self._values(data)
                except (ValueError, TypeError) as error:
                    raise ShardError(place, str(error)) from error
                yield Sample(values, None, place, stored // (len(offsets) - 1))

    def _values(self, data: memoryview) -> dict[str, bytes | memoryview]:
        head = 4 * len(self._leaves)
        if len(data) < head:
            raise ValueError(f"has {len(data):,} bytes, too few for the sizes of its leaves")
        sizes = np.frombuffer(data[:head], "<u4").tolist()
        if head + sum(sizes) != len(data):
            raise ValueError(
                f"its leaves take {sum(sizes):,} bytes, but it has {len(data) - head:,} for them"
            )
        values: dict[str, bytes | memoryview] = {}
        for convert, (column, mapped), size in zip(self._leaves, self._columns, sizes, strict=True):
            leaf, head = convert(data[head : head + size]), head + size
            if column.size not in (None, len(leaf)):
                raise ValueError(f"{column.name!r} has {len(leaf):,} bytes, wrong for {column.encoding}")
            values[mapped.target] = mapped.convert(memoryview(leaf))
        return values


def _frame(path: Path, stored: memoryview, most: int) -> bytes:
    """Decompress a zstd frame; raises ShardError if it is invalid or its content exceeds `most` bytes."""
    import zstandard

    try:
        size = zstandard.frame_content_size(stored)
        if not 0 <= size <= most:
            raise ShardError(path, "has a zstd frame that does not declare its size, or is too large")
        data: bytes = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)
    except zstandard.ZstdError as error:
        raise ShardError(path, f"is not valid zstd data, which its index says it is: {error}") from error
    return data


def _items_of_batches(path: Path, stored: bytes) -> list[bytes]:
    """Return the items of a chunk with compression_level "batch"; raises ShardError if it is damaged."""
    head = len(_BATCHES) + 16
    if len(stored) < head or not stored.startswith(_BATCHES):
        raise ShardError(path, "has no header of batches, but the index has level batch", offset=0)
    version, _, count, _, frames = struct.unpack_from("<HHIII", stored, len(_BATCHES))
    if version != 1:
        raise ShardError(path, f"has frames of version {version}; only 1 is supported", offset=len(_BATCHES))
    start = head + 4 * (count + 1)
    if len(stored) < start + _FRAME.size * frames:
        raise ShardError(path, f"has {len(stored):,} bytes, too few for its tables: truncated", offset=head)
    offsets = np.frombuffer(stored, "<u4", count + 1, head).astype(np.int64)
    if offsets[0] or (np.diff(offsets) < 0).any():
        raise ShardError(path, "has item offsets that do not start at 0 or do not increase", offset=head)
    items: list[bytes] = []
    for first, many, place, size, raw_bytes in _FRAME.iter_unpack(stored[start:][: _FRAME.size * frames]):
        if first != len(items) or first + many > count or place + size > len(stored):
            raise ShardError(path, f"has a gap or overlap in its frames at item {first:,}", offset=start)
        edges = (offsets[first : first + many + 1] - offsets[first]).tolist()
        data = _frame(path, memoryview(stored)[place : place + size], edges[-1])
        if len(data) != raw_bytes or edges[-1] != len(data):
            raise ShardError(
                path, f"the frame of item {first:,} has {len(data):,} bytes, but its items need {edges[-1]:,}"
            )
        items += [data[begin:end] for begin, end in pairwise(edges)]
    if len(items) != count:
        raise ShardError(path, f"has frames for only {len(items):,} of its {count:,} items", offset=start)
    return items


def _items_of_samples(path: Path, stored: bytes) -> list[bytes]:
    """Return the items of a chunk with compression_level "sample"; raises ShardError if it is damaged."""
    count = int.from_bytes(stored[:4], "little")
    offsets = _offsets(path, np.frombuffer(stored, np.uint8), count).tolist()
    items, left = [], _MAX_CHUNK_BYTES
    for begin, end in pairwise(offsets):
        items.append(_frame(path, memoryview(stored)[begin:end], left))
        left -= len(items[-1])
    return items


def _plain_chunk(items: Sequence[bytes]) -> bytes:
    """Return the bytes of an uncompressed chunk that holds `items`."""
    head = 4 * (len(items) + 2)
    offsets = np.cumsum([head, *map(len, items)])
    return struct.pack("<I", len(items)) + offsets.astype("<u4").tobytes() + b"".join(items)


def _offsets(path: Path, raw: npt.NDArray[np.uint8], items: int) -> npt.NDArray[np.int64]:
    """Return int64[items + 1], the offsets in a chunk's header; raises ShardError unless they are valid."""
    head = 4 * (items + 2)
    if len(raw) < head:
        raise ShardError(path, f"has {len(raw):,} bytes, too few for the offsets of {items:,} items")
    words = np.frombuffer(raw[:head], "<u4").astype(np.int64)
    if words[0] != items:
        raise ShardError(path, f"has {words[0]:,} items, but the index records {items:,}", offset=0)
    offsets = words[1:]
    if offsets[0] != head or offsets[-1] != len(raw) or (np.diff(offsets) < 0).any():
        problem = f"its offsets do not run from {head:,} to the end of its {len(raw):,} bytes"
        raise ShardError(path, f"{problem}: it is truncated or damaged", offset=4)
    return offsets


def _leaf_names(index: _Index) -> Sequence[str]:
    """Return the names of an item's leaves, in order: the keys of its dict, or "value" for a single leaf."""
    try:
        spec = load_json(index.config["data_spec"])[1]
        kind, children = spec["type"], spec["children_spec"]
        if kind is None:
            return ["value"]
        names: list[str] = load_json(spec["context"])
        flat = all(child["type"] is None for child in children)
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise index.refused(f"has a data_spec that cannot be read: {error!r}") from error
    if kind != "builtins.dict" or not flat or not all(isinstance(name, str) for name in names):
        raise index.refused("describes items that are not flat dicts of values: flatten them when writing")
    if len(names) != len(index.formats) or len(set(names)) != len(names):
        raise index.refused(
            f"has {len(names)} leaf names, but {len(index.formats)} formats: each format needs a unique name"
        )
    return names


def _leaf(name: str) -> tuple[str, Callable[[memoryview], bytes | memoryview]] | None:
    """Return (MDS encoding, function that encodes a leaf) for a litdata kind; None if MDS cannot hold it."""
    if name in _SAME:
        decode = encoding_of(_SAME[name]).decode if name in ("str", "pil") else None
        return _SAME[name], lambda data: data if decode is None else (decode(data), data)[1]
    if name == "bool":
        return "uint8", lambda data: data
    if name == "jpeg_array":
        return "jpeg_array", lambda data: data
    if (dtype := _array_dtype(name)) is not None:
        encode = encoding_of(f"ndarray:{dtype}").encode
        return f"ndarray:{dtype}", lambda data: encode(_flat(data, dtype))
    if name in _WITH_HEADER:
        word, dtypes = _WITH_HEADER[name]
        return "ndarray", lambda data: encoding_of("ndarray").encode(_array(data, word, dtypes))
    return None


def _array_dtype(name: str) -> str | None:
    """Return the dtype of a one-axis array kind such as `no_header_tensor:17`; None for another kind."""
    kind, colon, number = name.partition(":")
    if not colon or not number.isdecimal():
        return None
    if kind == "no_header_tensor":
        return _TORCH_DTYPES.get(int(number))
    if kind == "no_header_numpy" and int(number) < len(_NUMPY_DTYPES):
        return _NUMPY_DTYPES[int(number)]
    return None


def _flat(data: memoryview, dtype: str) -> npt.NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise ValueError(f"has {len(data):,} bytes, not a multiple of the size of {dtype}")
    values: npt.NDArray[Any] = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    return values


def _array(data: memoryview, word: str, dtypes: Mapping[int, str]) -> npt.NDArray[Any]:
    """Decode an array with a header: dtype number, number of axes and size of each axis, in dtype `word`.

    `dtypes` is {dtype number: dtype}. The values follow the header, little-endian.
    """
    if len(data) < 8:
        raise ValueError(f"has an array of {len(data)} bytes, too few for its 8-byte header")
    number, axes = (int(value) for value in np.frombuffer(data[:8], word))
    if number not in dtypes or axes > 32 or len(data) < 8 + 4 * axes:
        raise ValueError(f"has an array of type {number} with {axes} axes, which cannot be converted")
    shape = tuple(int(dim) for dim in np.frombuffer(data[8 : 8 + 4 * axes], word))
    values = _flat(data[8 + 4 * axes :], dtypes[number])
    return values.reshape(shape)
